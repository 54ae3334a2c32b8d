"""Makes `torch.compile` break a graph at the methods of this package, as it does at DeepEP's native functions."""

import functools
from types import FunctionType
from typing import Any, TypeVar

import torch
from torch._compile import _disable_dynamo

_Class = TypeVar("_Class", bound=type)
_eval_frame: Any = torch._C._dynamo.eval_frame
_CAN_MARK = hasattr(_eval_frame, "set_code_exec_strategy")
_PROTOCOLS = {"__init__", "__call__", "__enter__", "__exit__", "__getitem__", "__iter__", "__len__"}


def outside_graphs(cls: _Class) -> _Class:
    """Make a compiled function call the public methods of `cls`, and read its properties, between two graphs: they run as they do eagerly.

    A decorator of classes. Other methods that begin with an underscore stay as they are, as only methods of the class call them.
    """
    for name, member in list(vars(cls).items()):
        if not name.startswith("_") or name in _PROTOCOLS:
            setattr(cls, name, _outside(member))
            if isinstance(member, functools.cached_property):
                vars(cls)[name].__set_name__(cls, name)
    return cls


def outside_graph(function: Any) -> Any:
    """Make a compiled function call `function` between two graphs, with what it calls.

    The wrapper of `torch.compiler.disable` takes microseconds a call. PyTorch 2.13 can mark the function itself, which takes none.
    """
    if not _CAN_MARK:
        return _disable_dynamo(function)
    function._torchdynamo_disable = True  # it is not traced as a part of its caller
    skip = _eval_frame._FrameAction.SKIP
    _eval_frame.set_code_exec_strategy(function.__code__, _eval_frame._FrameExecStrategy(skip, skip))  # nor by itself
    return function


def _outside(member: object) -> Any:
    if isinstance(member, FunctionType):
        return outside_graph(member)
    if isinstance(member, staticmethod):
        return staticmethod(outside_graph(member.__func__))
    if isinstance(member, property):
        return property(outside_graph(member.fget), member.fset, member.fdel, member.__doc__)
    if isinstance(member, functools.cached_property):
        return functools.cached_property(outside_graph(member.func))
    return member
