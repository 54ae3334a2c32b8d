"""Attributes that have other values for a while."""

import contextlib
from collections.abc import Iterator


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
