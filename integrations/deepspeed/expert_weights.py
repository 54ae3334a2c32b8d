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
    function = _function_of(parts[1])
    return function and ExpertWeights(parts[0].weight, parts[0].bias, parts[2].weight, parts[2].bias, function)


def name_of(expert: nn.Module) -> str:
    """Return the class of an expert, for a Sequential with those of its parts."""
    name = type(expert).__name__
    return f"{name}({', '.join(type(part).__name__ for part in expert)})" if isinstance(expert, nn.Sequential) else name


_FUNCTIONS: dict[type[nn.Module], Callable[[Tensor], Tensor]] = {
    nn.ReLU: nn.functional.relu,
    nn.SiLU: nn.functional.silu,
    nn.Tanh: torch.tanh,
    nn.Sigmoid: torch.sigmoid,
}


def _function_of(activation: nn.Module) -> Callable[[Tensor], Tensor] | None:
    """Return an activation's function, one object for equal activations, which does not work in place even if the module does."""
    return _gelu(activation.approximate) if type(activation) is nn.GELU else _FUNCTIONS.get(type(activation))


@functools.cache
def _gelu(approximate: str) -> Callable[[Tensor], Tensor]:
    return functools.partial(nn.functional.gelu, approximate=approximate)
