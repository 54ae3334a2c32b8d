"""Describe what an expert computes, and read its weights from known module classes."""

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from deepep_moe.nn.moe import SwiGLU
from deepep_moe.ops.grouped_mlp import Activation


class ExpertWeights(NamedTuple):
    """A feed-forward network of two matrices: `activation(x @ w1.T + b1) @ w2.T + b2`, for rows x [num_rows, hidden]."""

    w1: Tensor
    """[inner, hidden], as `torch.nn.Linear` has it. For "swiglu" inner is 2 x intermediate, and the gate's rows come first."""
    b1: Tensor | None
    """[inner], or None."""
    w2: Tensor
    """[hidden, intermediate]."""
    b2: Tensor | None
    """[hidden], or None."""
    activation: Activation
    """"swiglu" for `silu(gate) * up`, or a function [num_rows, inner] -> [num_rows, intermediate] that treats each row alone and changes
    nothing in place. The same function for all experts of a layer."""


Reader = Callable[[nn.Module], ExpertWeights | None]
"""Returns the weights of an expert, or None for an expert that must be called."""


def read_known(expert: nn.Module) -> ExpertWeights | None:
    """Return the weights of an expert whose classes say what it computes. None for any other.

    Known are `deepep_moe.nn.SwiGLU` and `torch.nn.Sequential` of a Linear, an activation and a Linear. The activation is a GELU, ReLU,
    SiLU, Tanh or Sigmoid. Identity and Dropout may stand between them. Subclasses are not known. The caller looks for hooks, forwards that
    were replaced, and Dropout that drops.
    """
    if type(expert) is SwiGLU:
        first, second = expert.gate_up, expert.down
        is_known = type(first) is type(second) is nn.Linear
        return ExpertWeights(first.weight, first.bias, second.weight, second.bias, "swiglu") if is_known else None
    if type(expert) is not nn.Sequential:
        return None
    parts = [part for part in expert if type(part) not in (nn.Identity, nn.Dropout)]
    if len(parts) != 3 or not type(parts[0]) is type(parts[2]) is nn.Linear:
        return None
    function = _FUNCTIONS.get((type(parts[1]), getattr(parts[1], "approximate", None)))
    return function and ExpertWeights(parts[0].weight, parts[0].bias, parts[2].weight, parts[2].bias, function)


def name_of(expert: nn.Module) -> str:
    """Return the class of an expert, for a Sequential with those of its parts."""
    name = type(expert).__name__
    return f"{name}({', '.join(type(part).__name__ for part in expert)})" if isinstance(expert, nn.Sequential) else name


_FUNCTIONS: dict[tuple[type[nn.Module], str | None], Callable[[Tensor], Tensor]] = {
    (nn.ReLU, None): nn.functional.relu,
    (nn.SiLU, None): nn.functional.silu,
    (nn.Tanh, None): torch.tanh,
    (nn.Sigmoid, None): torch.sigmoid,
    (nn.GELU, "none"): nn.functional.gelu,
    (nn.GELU, "tanh"): functools.partial(nn.functional.gelu, approximate="tanh"),
}
"""Functions of activations and their approximations. They do not work in place even if the module does."""
