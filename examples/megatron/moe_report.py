"""Megatron-Core's own report of MoE losses, with what deepep_moe adds to it, for metrics.jsonl and TensorBoard."""

from typing import Any


class Scalars:
    """Takes the place of a TensorBoard writer: keeps the scalars of a step, and hands them on to `writer` if there is one."""

    def __init__(self, writer: Any = None):
        self._writer = writer
        self._scalars: dict[str, float] = {}

    def add_scalar(self, name: str, value: Any, iteration: int) -> None:
        self._scalars[name] = float(value)
        if self._writer is not None:
            self._writer.add_scalar(name, float(value), iteration)

    def take(self) -> dict[str, float]:
        scalars, self._scalars = self._scalars, {}
        return scalars


def report(scalars: Scalars | None, iteration: int, config: Any, num_steps: int = 1) -> None:
    """Write a report of the last `num_steps` steps, losses as their means. Collective, with `scalars` on one rank."""
    how = {"num_layers": config.num_layers, "moe_layer_freq": config.moe_layer_freq}
    try:
        from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker
    except ImportError:  # before 0.18
        from megatron.core.transformer.moe import moe_utils

        moe_utils.track_moe_metrics(1.0 / num_steps, iteration, scalars, **how)
    else:
        get_moe_metrics_tracker().report(1.0 / num_steps, iteration, scalars, **how)
