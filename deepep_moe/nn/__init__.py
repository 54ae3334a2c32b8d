"""Modules for training mixture-of-experts layers, with no framework around them."""

from deepep_moe.nn.moe import LocalExperts, MoELayer, SwiGLU
from deepep_moe.nn.router import Router

__all__ = ["LocalExperts", "MoELayer", "Router", "SwiGLU"]
