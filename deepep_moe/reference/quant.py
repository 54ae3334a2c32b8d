"""Quantization to fp8, block by block."""

import torch
from torch import Tensor

BLOCK = 128


def quantize_fp8(x: Tensor) -> tuple[Tensor, Tensor]:
    """See `deepep_moe.ops.quantize_fp8`. x: [num_tokens, hidden]."""
    num_blocks = -(-x.shape[1] // BLOCK)
    y = torch.empty(x.shape, dtype=torch.float8_e4m3fn)
    scales = torch.empty(x.shape[0], num_blocks)
    for token in range(x.shape[0]):
        for block in range(num_blocks):
            columns = slice(block * BLOCK, (block + 1) * BLOCK)
            values = x[token, columns].float()
            largest = torch.maximum(values.abs().max(), torch.tensor(1e-4))
            y[token, columns] = (values * (torch.tensor(448.0) / largest)).clamp(-448, 448).to(torch.float8_e4m3fn)
            scales[token, block] = largest / torch.tensor(448.0)
    return y, scales
