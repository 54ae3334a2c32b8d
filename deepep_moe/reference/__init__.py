"""Slow PyTorch definitions of every operation, which all backends match bit for bit."""

from deepep_moe.reference.gate import gate

__all__ = ["gate"]
