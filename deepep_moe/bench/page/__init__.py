"""One HTML page of a run, and of two runs side by side."""
