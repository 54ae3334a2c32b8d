"""Other libraries' interfaces on deepep_moe: `deep_ep` answers to DeepEP's name (docs/coming_from_deepep.md)."""
