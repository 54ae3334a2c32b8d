"""Layers of `deepspeed.moe.layer.MoE`."""
