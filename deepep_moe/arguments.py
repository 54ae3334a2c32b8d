"""Checks of single arguments. Wrong types raise TypeError, wrong values ValueError."""

import numbers
import operator
from collections.abc import Collection
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

_INT64 = torch.int64


def as_int(name: str, value: Any, what: str = "an int", least: int | None = None, most: int | None = None) -> int:
    """Return a plain int for any whole number, such as NumPy's or a tensor of one; PyTorch's symbols stay. Raises TypeError, which
    says `what` it must be, for anything else, bools among it, and ValueError for less than `least` or more than `most`."""
    number = value if type(value) is int or isinstance(value, torch.SymInt) else None
    if number is None and not isinstance(value, bool) and getattr(value, "dtype", None) is not torch.bool:
        with suppress(TypeError):
            number = operator.index(value)
    if number is None:
        raise TypeError(f"{name} is {value!r}; it must be {what}")
    if least is not None and number < least:
        raise ValueError(f"{name} is {number}; it must be at least {least}")
    if most is not None and number > most:
        raise ValueError(f"{name} is {number}; it must be at most {most}")
    return number  # type: ignore[return-value]


def check_choice(name: str, value: object, choices: Collection[object]) -> None:
    if value not in choices:
        raise ValueError(f"{name} is {value!r}; it must be one of {list(choices)}")


def as_float(name: str, value: Any) -> float:
    """Return a plain float, also of ints and of NumPy's. Raises TypeError for anything else, bools and tensors among it."""
    if type(value) in (float, int):
        return float(value)
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name} is {value!r}; it must be a float")
    return float(value)


def check_bool(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"{name} is {value!r}; it must be a bool")


def check_is_tensor(name: str, value: object) -> None:
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, not {type(value).__name__}")


def _is_ordinary(tensor: Tensor) -> bool:
    """Nearly all are."""
    return type(tensor) is Tensor and tensor.layout is torch.strided and not tensor.is_nested


def lacks_memory(tensor: Tensor) -> bool:
    """Was the tensor's storage freed or cut (`untyped_storage().resize_`), so that reading it would read what is not its own?"""
    if tensor.numel() == 0:
        return False
    last = tensor.storage_offset() + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.untyped_storage().nbytes() < (last + 1) * tensor.itemsize


def check_memory(name: str, tensor: Tensor) -> None:
    """Refuse a tensor whose storage was freed or cut. Tensors that PyTorch traces or transforms have none to look at."""
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return
    if (_is_ordinary(tensor) or isinstance(tensor, torch.nn.Parameter)) and lacks_memory(tensor):
        num_bytes = tensor.untyped_storage().nbytes()
        raise ValueError(
            f"{name} has shape {list(tensor.shape)} and {num_bytes} bytes of memory: its storage was freed or cut; fill it again"
        )


def check_plain(name: str, tensor: Tensor) -> None:
    """Refuse a tensor without rows of its own in this process's memory, for which no operator has a rule."""
    check_memory(name, tensor)
    if _is_ordinary(tensor):
        return
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0:
        return
    kind, names = type(tensor), {base.__name__ for base in type(tensor).__mro__} if type(tensor) is not Tensor else ()
    if "DTensor" in names:
        raise TypeError(f"{name} is a DTensor; pass {name}.to_local()")
    if tensor.is_nested:
        raise TypeError(f"{name} is a nested tensor; it must be dense: pass {name}.values()")
    if "FakeTensor" in names:
        raise TypeError(f"{name} is a {kind.__name__}, which has no data; it must be a torch.Tensor with data")
    if tensor.layout is not torch.strided:
        raise TypeError(f"{name} has layout {tensor.layout}; it must be dense: pass {name}.to_dense()")


def check_owns_memory(name: str, tensor: Tensor) -> None:
    """Refuse what `check_plain` refuses, and tensors that wrap others, which only operators could read."""
    check_plain(name, tensor)
    if type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__:
        raise TypeError(f"{name} is a {type(tensor).__name__}, which wraps other tensors; it must be a plain torch.Tensor")


def check_tensor(
    name: str, tensor: Tensor, shape: tuple[int, ...], dtypes: tuple[torch.dtype, ...], device: torch.device | None = None, *,
    any_strides: bool = False, like: str = "x",
) -> None:  # fmt: skip
    """Raise TypeError or ValueError unless the tensor has this shape and one of these dtypes, and lies on the device, that of `like`."""
    if not isinstance(tensor, Tensor):  # inline, because a function call costs as much as two of the checks
        check_is_tensor(name, tensor)
    if tensor.dtype not in dtypes:
        allowed = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise TypeError(f"{name} has dtype {str(tensor.dtype).removeprefix('torch.')}; it must be {allowed}")
    if tensor.shape != shape:
        raise ValueError(f"{name} has shape {list(tensor.shape)}; it must be {list(shape)}")
    if device is not None and tensor.device != device:
        raise ValueError(f"{name} is on {tensor.device}; it must be on {device}, like {like}")
    # Native code cannot read the negative of a memory. Indices are never such, and the check costs time. Dynamo does not know it.
    if dtypes[0] is not _INT64 and not torch.compiler.is_compiling() and tensor.is_neg():
        raise ValueError(f"{name} is a lazy negative (its is_neg() is True); pass {name}.resolve_neg()")
    if not any_strides and not tensor.is_contiguous():
        raise ValueError(f"{name} with shape {list(shape)} and strides {list(tensor.stride())} is not contiguous; pass {name}.contiguous()")
