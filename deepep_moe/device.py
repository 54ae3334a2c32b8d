"""Devices, streams and element types as native code takes them."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor

from deepep_moe import _C, torch_module

_Result = TypeVar("_Result")
GPU = "cuda"
"""The type of the devices that the CUDA kernels serve."""

DTYPE_NAMES = {
    torch.float32: "float32",
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
    torch.float8_e4m3fn: "float8_e4m3fn",
    torch.float8_e5m2: "float8_e5m2",
}
DTYPES = {dtype: getattr(_C.DType, name) for dtype, name in DTYPE_NAMES.items()}
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
"""Element types that kernels compute with."""


def is_lazy(tensor: Tensor) -> bool:
    """Are its values not those of its memory? So autograd may hand on negatives, zeros that have no memory, and sparse gradients."""
    return tensor.layout is not torch.strided or tensor.is_neg() or tensor._is_zerotensor()


def readable(tensor: Tensor) -> Tensor:
    """Return the tensor as native code reads it: contiguous memory that holds its values."""
    if is_lazy(tensor):
        tensor = (tensor if tensor.layout is torch.strided else tensor.to_dense()).clone()  # which resolves
    return tensor.contiguous()


def is_gpu(device: torch.device) -> bool:
    return device.type == GPU


def native_for(tensor: Any) -> Any:
    """Return the module whose functions serve plain calls on the GPU of `tensor`, or None. They return None for a call that Python is to
    make."""
    if torch.compiler.is_compiling() or not isinstance(tensor, Tensor) or not is_gpu(tensor.device):
        return None
    return torch_module.MODULE


def device_index(device: torch.device | None) -> int:
    """Return the number of the GPU, 0 without one."""
    return 0 if device is None or device.index is None else device.index


def current_stream(device: torch.device | None) -> int:
    """Return the address of the device's current stream, 0 without a GPU. `torch.cuda.current_stream` makes an object of it, which takes
    as long as a launch."""
    return torch._C._cuda_getCurrentRawStream(device.index) if device is not None and device.type == "cuda" else 0


def call_stream(device: torch.device | None) -> int:
    """Return `current_stream(device)` for a call of a buffer. A bit of it says that somebody else owns the stream, who may destroy it once
    the call is made (`torch.cuda.ExternalStream`)."""
    stream: int = 0 if device is None else torch_module.needed().call_stream(device)
    return stream


def on_device(tensor: Tensor) -> contextlib.AbstractContextManager[Any]:
    """Make the tensor's GPU the current one meanwhile."""
    return contextlib.nullcontext() if tensor.device.index in (None, torch.cuda.current_device()) else torch.cuda.device(tensor.device)


def launch(kernel: Callable[..., _Result], *arguments: object, on: Tensor) -> _Result:
    """Call a kernel of `_C` for the GPU of the tensor `on`: its last argument is the current stream there."""
    with on_device(on):
        return kernel(*arguments, current_stream(on.device))


@contextlib.contextmanager
def making_on(x: Tensor) -> Iterator[None]:
    """Make a buffer's backend in its first dispatch, for the GPU of `x`. Raises ValueError where that is captured in a CUDA graph."""
    if torch.cuda.is_current_stream_capturing():
        raise ValueError("a buffer of a process without a group gets its memory in its first dispatch; make one before the capture")
    with on_device(x):
        yield
