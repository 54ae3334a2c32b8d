"""Names of DeepEP that concern no exchange of tokens. They are there so that their use says what is missing."""

from collections.abc import Callable
from typing import NoReturn


def refuse(name: str) -> NoReturn:
    """Raise NotImplementedError for `name` of deep_ep."""
    raise NotImplementedError(f"deep_ep.{name} is not served: deepep_moe moves tokens between experts only; use DeepEP itself for it")


def refused(class_name: str, name: str) -> Callable[..., NoReturn]:
    """Return a static method that raises NotImplementedError whatever it is given."""

    def method(*_: object, **__: object) -> NoReturn:
        refuse(f"{class_name}.{name}")

    method.__name__, method.__doc__ = name, "Raise NotImplementedError."
    return staticmethod(method)


class _Refused:
    def __init__(self, *_: object, **__: object) -> None:
        refuse(type(self).__name__)


class EngramBuffer(_Refused):
    """Raises NotImplementedError when it is made."""


class PPBuffer(_Refused):
    """Raises NotImplementedError when it is made."""


class BucketBuffer(_Refused):
    """Raises NotImplementedError when it is made."""
