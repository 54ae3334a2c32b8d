"""Modules for training mixture-of-experts layers."""

from deepep_moe.nn.router import Router

__all__ = ["Router"]
