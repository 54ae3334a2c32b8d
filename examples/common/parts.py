"""Find which optimizer and which norms a run has used, from the objects."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from report import Result
from torch import nn


@dataclass
class Run(Result):
    """A result that says which parts trained the model: `optimizer` and `norms`."""

    parts: dict[str, str] = field(default_factory=dict)


def parts_of(model: nn.Module, optimizer: Any) -> dict[str, str]:
    """Return the classes of the optimizers inside the wrappers of Megatron-Core and DeepSpeed, and those of the model's norms."""
    norms = {_name(module) for module in model.modules() if "Norm" in type(module).__name__}
    return {"optimizer": ", ".join(sorted(set(_optimizers(optimizer)))), "norms": ", ".join(sorted(norms))}


def line_of(parts: dict[str, str]) -> str:
    """Return a line for the terminal."""
    return "; ".join(f"{name}: {value}" for name, value in parts.items())


def _optimizers(optimizer: Any) -> Iterator[str]:
    chained = getattr(optimizer, "chained_optimizers", None)
    inner = chained if chained else [optimizer.optimizer] if getattr(optimizer, "optimizer", None) is not None else []
    for each in inner:
        yield from _optimizers(each)
    if not inner:
        yield _name(optimizer) + (" (fused)" if getattr(optimizer, "defaults", {}).get("fused") else "")


def _name(part: Any) -> str:
    return f"{type(part).__module__}.{type(part).__qualname__}"
