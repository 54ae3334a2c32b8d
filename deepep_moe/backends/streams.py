"""The stream that kernels are launched on."""

import torch


def current_stream(device: torch.device | None) -> int:
    """The address of a GPU's current stream. `torch.cuda.current_stream` makes an object of it, which takes as long as a launch. 0 without
    a GPU."""
    return torch._C._cuda_getCurrentRawStream(device.index) if device is not None and device.type == "cuda" else 0
