"""Layers that AutoEP makes (DeepSpeed 0.19.2 and newer)."""
