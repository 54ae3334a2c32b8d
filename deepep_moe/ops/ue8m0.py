"""Scales that are powers of two as UE8M0: biased exponents of fp32, four to an int32, the first in the lowest byte, as DeepEP has them."""

import torch
from torch import Tensor

_FRACTION_BITS = 23  # of fp32, below its exponent
_PER_WORD = 4


def num_words(num_scales: int) -> int:
    """Return how many int32 hold `num_scales` scales."""
    return -(-num_scales // _PER_WORD)


def unpack(words: Tensor, num_scales: int) -> Tensor:
    """Return [..., num_scales] fp32 of `words` [..., ceil(num_scales / 4)] int32. An exponent of 0 gives 0."""
    shifts = torch.arange(0, 32, 8, dtype=torch.int32, device=words.device)
    exponents = (words[..., None] >> shifts & 0xFF).flatten(-2)[..., :num_scales]
    return (exponents << _FRACTION_BITS).view(torch.float32)


def pack(scales: Tensor) -> Tensor:
    """Return [..., ceil(num_scales / 4)] int32 of `scales` [..., num_scales] fp32, as `unpack` made them."""
    exponents = scales.contiguous().view(torch.int32) >> _FRACTION_BITS
    exponents = torch.nn.functional.pad(exponents, (0, -scales.shape[-1] % _PER_WORD)).to(torch.uint8)
    return exponents.contiguous().view(torch.int32)
