"""PyTorch operators of this library: how they are defined, called and differentiated, and who else takes part in a call.

Only calls that somebody watches go through PyTorch's dispatcher, which tells tracers, transforms and modes. The others go past it: to an
autograd function where a gradient is wanted, else straight to the implementation. A host that waits for a GPU's counts has no time to lose.
"""

import contextlib
import functools
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import CodeType
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor
from torch._C import _TorchDispatchModeKey as ModeKey
from torch._compile import _disable_dynamo
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.utils._python_dispatch import _disable_current_modes

Context = Any
"""The context of an autograd function, which takes attributes of any name."""
Inputs = tuple[Any, ...]
"""The arguments of an operator."""
if TYPE_CHECKING:

    class Function(torch.autograd.Function):
        """`torch.autograd.Function`, whose `apply` PyTorch gives no types."""

        @classmethod
        def apply(cls, *inputs: object) -> Any: ...
else:
    Function = torch.autograd.Function
_Implementation = Callable[..., object]
_Function = TypeVar("_Function", bound=Callable[..., Any])
_library = torch.library.Library("deepep_moe", "FRAGMENT")
_PLAIN = (Tensor, torch.nn.Parameter)
_eval_frame: Any = torch._C._dynamo.eval_frame
_CAN_MARK = hasattr(_eval_frame, "set_code_exec_strategy")
_codes: dict[CodeType, CodeType] = {}
_eager: dict[str, tuple[_Implementation, type[Function] | None]] = {}


def untraced(function: _Function) -> _Function:
    """Let a compiled function call `function` between two graphs, with what it calls: all of it runs as it does eagerly. With
    `fullgraph=True` PyTorch raises an error that names it.

    A newer PyTorch (2.11) can mark the function itself. On others eager calls take 0.15 us longer, and by `torch.compiler.disable`
    microseconds.
    """
    if _CAN_MARK:
        marked: Any = function
        marked._torchdynamo_disable = True  # it is not traced as a part of its caller
        skip = _eval_frame._FrameAction.SKIP
        _eval_frame.set_code_exec_strategy(marked.__code__, _eval_frame._FrameExecStrategy(skip, skip))  # nor by itself
        return function
    apart = _disable_dynamo(function)

    def call(*args: object, **kwargs: object) -> object:
        return (apart if torch.compiler.is_compiling() else function)(*args, **kwargs)

    # Dynamo counts compilations for each code object, and compiles what calls a new one again.
    call.__code__ = _codes.setdefault(function.__code__, call.__code__.replace(co_name=function.__name__))
    return functools.update_wrapper(call, function)  # type: ignore[return-value]


def register_operator(schema: str, implementation: _Implementation, fake: _Implementation, *gradient: _Implementation) -> str:
    """Define the operator `deepep_moe::<schema>`, and return its name. gradient: what saves for the backward, and the backward, if it has
    one."""
    name: str = _library.define(schema)
    # After a break of a graph Dynamo looks at every Python function that is called, those that an operator calls too.
    _library.impl(name, _disable_dynamo(implementation), "CompositeExplicitAutograd")
    torch.library.register_fake(f"deepep_moe::{name}", fake, lib=_library)
    if gradient:
        save, backward = gradient
        torch.library.register_autograd(f"deepep_moe::{name}", backward, setup_context=save, lib=_library)
    return name


def register(schema: str, implementation: _Implementation, fake: _Implementation, *gradient: _Implementation) -> None:
    """Register the operator as `register_operator` does, and let `call` serve it."""
    name = register_operator(schema, implementation, fake, *gradient)
    if not gradient:
        _eager[name] = implementation, None
        return
    save, backward = gradient

    def forward(ctx: Context, *inputs: object) -> object:  # a setup_context of its own costs PyTorch a look at signatures at every call
        output = implementation(*inputs)
        save(ctx, inputs, output)
        return output

    methods = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    _eager[name] = implementation, type(name, (torch.autograd.Function,), methods)


def call(name: str, tensors: tuple[Tensor | None, ...], *arguments: object) -> Any:
    """Call the operator `name` with `tensors`, which may need gradients or be of a class of their own, and further `arguments`.

    Raises NotImplementedError for tangents of forward-mode AD, and TypeError under torch.func.grad and the like: no operator has rules for
    them.
    """
    if is_watched(tensors):
        if not torch.compiler.is_compiling():
            refuse_tangents(name, tensors)
            _refuse_gradient_transforms(name)
        return getattr(torch.ops.deepep_moe, name)(*tensors, *arguments)
    implementation, function = _eager[name]
    if function is not None and needs_gradients(tensors):
        return function.apply(*tensors, *arguments)
    return implementation(*tensors, *arguments)


def needs_gradients(tensors: Sequence[Tensor | None]) -> bool:
    return torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors)


# ---- who takes part ----


def is_watched(tensors: Sequence[Tensor | None]) -> bool:
    """Does PyTorch trace, watch or transform what is made of these? (`is_watched` and `is_on` of csrc/torch ask the same.)"""
    if is_compiled(tensors):
        return True  # Dynamo knows none of the following
    return _somebody_looks() or (forward_ad._current_level >= 0 and any(map(has_tangent, tensors)))


def is_compiled(tensors: Sequence[Tensor | None]) -> bool:
    """Are these traced, and not merely watched by a mode, as one rank's operations may be?"""
    if torch.compiler.is_compiling():
        return True
    for tensor in tensors:  # noqa: SIM110, as `any` takes four times as long
        if tensor is not None and type(tensor) not in _PLAIN:
            return True
    return False


def _somebody_looks() -> bool:
    """Does a mode, tracer or transform see what PyTorch does now, whatever the tensors?"""
    if torch._C._len_torch_dispatch_stack() > 0 or _is_included(_TRANSFORMS | _TRACERS):
        return True
    return torch._C._is_torch_function_mode_enabled() and watches_functions()


def watches_functions() -> bool:
    """Does a mode watch PyTorch's functions? (The default device is such a mode too, and watches nothing that has a device.)"""
    modes = torch.overrides._get_current_function_mode_stack()
    return any(not isinstance(mode, torch.utils._device.DeviceContext) for mode in modes)


def has_tangent(tensor: object) -> bool:
    """Is it a dual tensor of forward-mode AD?"""
    return forward_ad._current_level >= 0 and isinstance(tensor, Tensor) and forward_ad.unpack_dual(tensor).tangent is not None


def _set_of(*names: str) -> int:
    keys = (torch._C.DispatchKeySet(torch._C._dispatch_key_parse(name)) for name in names)
    return functools.reduce(operator.or_, (key.raw_repr() for key in keys))


_TRANSFORMS = _set_of("FuncTorchDynamicLayerFrontMode", "FuncTorchDynamicLayerBackMode", "VmapMode")
"""torch.func, and the vmap of `is_grads_batched`."""
_TRACERS = _set_of("Tracer", "PreDispatch")
"""torch.jit.trace, and `make_fx(..., pre_dispatch=True)`."""
_RECORDERS = (ModeKey.PROXY, ModeKey.FAKE)
"""Modes that record operators, or their shapes."""


def _is_included(keys: int) -> bool:
    included: int = torch._C._dispatch_tls_local_include_set().raw_repr()
    return bool(included & keys)


def is_dry_run() -> bool:
    """Are shapes all that is computed now?"""
    return torch.compiler.is_compiling() or torch._C._get_dispatch_mode(ModeKey.FAKE) is not None


def _not_transformed(what: str) -> str:
    return f"{what} cannot be transformed by torch.func (grad, vmap, jvp) or is_grads_batched; use torch.autograd.grad or backward"


def _refuse_gradient_transforms(what: str) -> None:
    """Raise TypeError under a transform other than torch.func.vmap, for which PyTorch has a rule of its own."""
    if _is_included(_TRANSFORMS):
        transforms = torch._C._functorch.get_interpreter_stack()
        if not transforms or any(transform.key() != torch._C._functorch.TransformType.Vmap for transform in transforms):
            raise TypeError(_not_transformed(what))


def refuse_tangents(what: str, tensors: Sequence[object] | Mapping[str, object]) -> None:
    """Raise NotImplementedError for a tensor with a tangent, which would be lost. tensors: by name, if they have names."""
    if torch.compiler.is_compiling() or forward_ad._current_level < 0:
        return
    named = tensors.items() if isinstance(tensors, Mapping) else (("a tensor", tensor) for tensor in tensors)
    for name, tensor in named:
        if has_tangent(tensor):
            raise NotImplementedError(
                f"{name} given to {what} has a tangent of forward-mode AD, which has no rule there; use backward or torch.autograd.grad, "
                "or pass torch.autograd.forward_ad.unpack_dual(...).primal of it"
            )


def refuse_transforms(what: str, tensors: Sequence[object] | Mapping[str, object]) -> None:
    """Raise TypeError under a transform of torch.func, NotImplementedError for tangents. tensors: as `refuse_tangents` takes them."""
    if torch.compiler.is_compiling():
        return
    if _is_included(_TRANSFORMS):
        raise TypeError(_not_transformed(what))
    refuse_tangents(what, tensors)


def refuse_watchers(what: str, tensors: Sequence[object] | Mapping[str, object], *, is_operator: bool = True) -> None:
    """Refuse what `refuse_transforms` refuses, and tracers that would record the results of this call instead of the call. Those are
    torch.jit.trace and, unless `is_operator`, make_fx and FakeTensorMode. Raises NotImplementedError for them."""
    refuse_transforms(what, tensors)
    if torch.compiler.is_compiling():
        return
    is_recorded = not is_operator and (_is_included(_TRACERS) or any(torch._C._get_dispatch_mode(key) is not None for key in _RECORDERS))
    if is_recorded or torch._C._get_tracing_state() is not None:
        raise NotImplementedError(f"{what} cannot be recorded in a graph, which would repeat the results of this call; leave it outside")


def unwatched() -> contextlib.AbstractContextManager[None]:
    """Hide what runs in this context from modes, tracers and transforms, as inside of an operator."""
    return _hidden() if _somebody_looks() else _NOBODY


_NOBODY = contextlib.nullcontext()


@contextlib.contextmanager
def _hidden() -> Iterator[None]:
    with contextlib.ExitStack() as hidden:
        hidden.enter_context(torch._C.DisableTorchFunction())
        hidden.enter_context(_disable_current_modes())
        hidden.enter_context(temporarily_clear_interpreter_stack())
        if (tracing := torch._C._get_tracing_state()) is not None:
            set_tracing_state: Callable[[object], None] = torch._C._set_tracing_state  # type: ignore[attr-defined]
            set_tracing_state(None)
            hidden.callback(set_tracing_state, tracing)
        yield
