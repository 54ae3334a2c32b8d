"""Makes `torch.compile` break a graph at the methods of this package, as it does at DeepEP's native functions."""

import functools
from types import FunctionType
from typing import Any, TypeVar

from deepep_moe.library import untraced

_Class = TypeVar("_Class", bound=type)
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


def _outside(member: object) -> Any:
    if isinstance(member, FunctionType):
        return untraced(member)
    if isinstance(member, staticmethod):
        return staticmethod(untraced(member.__func__))
    if isinstance(member, property):
        return property(member.fget and untraced(member.fget), member.fset, member.fdel, member.__doc__)
    if isinstance(member, functools.cached_property):
        return functools.cached_property(untraced(member.func))
    return member
