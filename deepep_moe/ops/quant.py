"""Quantization of rows, for exchanges in fp8."""

from deepep_moe.backends.quantize import quantize_fp8

__all__ = ["quantize_fp8"]
