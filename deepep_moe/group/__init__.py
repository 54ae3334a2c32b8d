"""The ranks of a buffer: what they agree on and how they find each other."""
