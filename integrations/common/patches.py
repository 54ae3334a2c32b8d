"""Replace symbols of other libraries, or attributes of their objects, and put them back."""

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

Stock = Callable[..., Any]
"""A function that was replaced."""
_MISSING = object()


class Patches:
    """Keeps the symbols that were replaced, in order, and their old values."""

    def __init__(self) -> None:
        self._saved: list[tuple[object, str, object, object]] = []

    def set(self, owner: object, name: str, value: object) -> None:
        """Replace or create `owner.name`, and remember what to restore."""
        self._saved.append((owner, name, _own(owner, name), value))
        setattr(owner, name, value)

    def around(self, owner: object, name: str) -> Callable[[Callable[..., object]], None]:
        """Decorate a function that takes the place of `owner.name`. It gets that one first, before the arguments of the call."""
        stock: Stock = getattr(owner, name)
        is_static = isinstance(owner, type) and isinstance(inspect.getattr_static(owner, name), staticmethod | classmethod)

        def replace(function: Callable[..., object]) -> None:
            @functools.wraps(stock)
            def replacement(*args: object, **kwargs: object) -> object:
                return function(stock, *args, **kwargs)

            self.set(owner, name, staticmethod(replacement) if is_static else replacement)

        return replace

    def restore(self) -> None:
        """Undo all replacements, the newest first, except those that somebody else has replaced since."""
        while self._saved:
            owner, name, value, ours = self._saved.pop()
            if _own(owner, name) is not ours:
                continue
            if value is _MISSING:
                delattr(owner, name)
            else:
                setattr(owner, name, value)


def _own(owner: object, name: str) -> object:
    """Return what `owner` itself, not a base of it, has under this name."""
    return vars(owner).get(name, _MISSING) if hasattr(owner, "__dict__") else getattr(owner, name)  # without one it has slots


@contextlib.contextmanager
def meanwhile(owner: object, **values: object) -> Iterator[None]:
    """Let the attributes of `owner`, which it has, have these values. They bypass `__setattr__`, which takes longer for modules."""
    attributes = owner.__dict__
    saved = {name: getattr(owner, name) for name in values}
    attributes.update(values)
    try:
        yield
    finally:
        attributes.update(saved)
