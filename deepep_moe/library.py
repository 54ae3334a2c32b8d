"""PyTorch operators of this library: how they are defined, called and differentiated.

Only calls that PyTorch traces go through its dispatcher. The others go past it: to an autograd function where a gradient is wanted, else
straight to the implementation. A host that waits for a GPU's counts has no time to lose.
"""

from typing import Any

import torch
from torch import Tensor

_library = torch.library.Library("deepep_moe", "FRAGMENT")
_PLAIN = (Tensor, torch.nn.Parameter)
_eager: dict[str, tuple[Any, type[torch.autograd.Function] | None]] = {}


def define(schema: str) -> None:
    """Define the operator `deepep_moe::<schema>`."""
    _library.define(schema)


def register_operator(name: str, implementation: Any, fake: Any, save: Any = None, backward: Any = None) -> None:
    """Make `implementation` that of the defined operator `name`. `save` and `backward` are its gradient, if it has one."""
    # After a break of a graph Dynamo looks at every Python function that is called, those that an operator calls too.
    _library.impl(name, torch._disable_dynamo(implementation), "CompositeExplicitAutograd")
    torch.library.register_fake(f"deepep_moe::{name}", fake, lib=_library)
    if backward is not None:
        torch.library.register_autograd(f"deepep_moe::{name}", backward, setup_context=save, lib=_library)


def register(name: str, implementation: Any, fake: Any, save: Any = None, backward: Any = None) -> None:
    """As `register_operator`, and let `call` serve it."""
    register_operator(name, implementation, fake, save, backward)
    if backward is None:
        _eager[name] = implementation, None
        return

    def forward(ctx: Any, *inputs: Any) -> Any:  # a setup_context of its own costs PyTorch a look at signatures at every call
        output = implementation(*inputs)
        save(ctx, inputs, output)
        return output

    methods = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    _eager[name] = implementation, type(name, (torch.autograd.Function,), methods)


def call(name: str, tensors: tuple[Tensor | None, ...], *arguments: Any) -> Any:
    """Call the operator `name` with `tensors`, which may need gradients or be of a class of their own, and further `arguments`."""
    if is_traced(tensors):
        return getattr(torch.ops.deepep_moe, name)(*tensors, *arguments)
    implementation, function = _eager[name]
    if function is not None and needs_gradients(tensors):
        return function.apply(*tensors, *arguments)
    return implementation(*tensors, *arguments)


def needs_gradients(tensors: tuple[Tensor | None, ...]) -> bool:
    return torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors)


def is_traced(tensors: tuple[Tensor | None, ...]) -> bool:
    """Does PyTorch trace or watch what is made of these?"""
    return is_compiled(tensors) or torch._C._len_torch_dispatch_stack() > 0  # Dynamo knows the first only


def is_compiled(tensors: tuple[Tensor | None, ...]) -> bool:
    """Are these traced, and not merely watched by a mode, as one rank's operations may be?"""
    if torch.compiler.is_compiling():
        return True
    for tensor in tensors:  # noqa: SIM110, as `any` takes four times as long
        if tensor is not None and type(tensor) not in _PLAIN:
            return True
    return False
