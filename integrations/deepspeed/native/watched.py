"""Find out whether a call of a module does more than the forward of its class."""

import functools
from typing import Any

import torch


def has_hooks(module: torch.nn.Module) -> bool:
    """Return whether the module has hooks of its own."""
    state = module.__dict__
    return bool(state["_forward_hooks"] or state["_forward_pre_hooks"] or state["_backward_hooks"] or state["_backward_pre_hooks"])


def is_replaced(module: torch.nn.Module) -> bool:
    """Return whether a module's forward was replaced, on the module or in its class."""
    module_class: Any = type(module)
    return "forward" in module.__dict__ or not _has_own(module_class, module_class.forward)


@functools.cache
def _has_own(module_class: Any, forward: Any) -> bool:
    """Return whether the forward comes from the module in which its class was defined."""
    owner = next(base for base in module_class.__mro__ if "forward" in vars(base))
    return bool(getattr(forward, "__globals__", {}).get("__name__") == owner.__module__)
