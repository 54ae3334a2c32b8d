"""Names of DeepEP that concern no exchange of tokens. They are there so that their use says what is missing."""

from collections.abc import Callable
from typing import Any, NoReturn

_INSTEAD = "deepep_moe moves tokens between experts only; use DeepEP itself for it"


def refuse(name: str, instead: str = _INSTEAD) -> NoReturn:
    """Raise NotImplementedError for `name` of deep_ep."""
    raise NotImplementedError(f"deep_ep.{name} is not served: {instead}")


def refused(class_name: str, name: str, instead: str = _INSTEAD) -> Callable[..., NoReturn]:
    """Return a static method that raises NotImplementedError whatever it is given."""

    def method(*_: object, **__: object) -> NoReturn:
        refuse(f"{class_name}.{name}", instead)

    method.__name__, method.__doc__ = name, "Raise NotImplementedError."
    return staticmethod(method)


def _refused_class(name: str) -> Any:
    def construct(*_: object, **__: object) -> NoReturn:
        refuse(name)

    return type(name, (), {"__init__": construct, "__doc__": "Raises NotImplementedError when it is made.", "__module__": __name__})


EngramBuffer, PPBuffer, BucketBuffer = map(_refused_class, ("EngramBuffer", "PPBuffer", "BucketBuffer"))
