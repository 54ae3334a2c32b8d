"""What MoE layers have done since the last report: rows of each expert, time of the exchange, calls over capacity, nodes per token.

`enable(metrics=True)` gathers it. Megatron-Core's own report of MoE losses, to TensorBoard and W&B, writes it too.
"""

import functools
import weakref
from typing import Any

import torch
import torch.distributed as dist

from deepep_moe.integrations.megatron.patches import Patches
from deepep_moe.nn.metrics import NUM_TOTALS, LayerMetrics, LayerReport


class Metrics:
    """The layers of this process that gather metrics."""

    def __init__(self) -> None:
        self._layers: weakref.WeakSet[Any] = weakref.WeakSet()

    def follow(self, layer: Any) -> LayerMetrics:
        """Return what a MoELayer is to write to, whose dispatcher has it as `metrics`."""
        self._layers.add(layer)
        return LayerMetrics(len(layer.local_expert_indices))

    def take(self) -> list[LayerReport]:
        """Return a report of every layer with a dispatcher of ours, in order, and begin anew. Collective over all ranks of the job."""
        table = self._table()
        dist.all_reduce(table)
        reports = []
        for index, (*rows, ms, num_timed, num_over, nodes, tokens) in enumerate(table.tolist()):
            if any((*rows, num_timed, num_over)):
                per_token = nodes / tokens if tokens else 1.0
                reports.append(LayerReport(index + 1, [int(count) for count in rows], ms / max(num_timed, 1.0), int(num_over), per_token))
        return reports

    def _table(self) -> torch.Tensor:
        """[num_layers, num_experts + totals] of this rank."""
        configs = [layer.config for layer in self._layers]
        sizes = [max((getattr(config, name) for config in configs), default=0) for name in ("num_layers", "num_moe_experts")]
        device = torch.device("cuda") if dist.get_backend() == "nccl" else torch.device("cpu")
        largest = torch.tensor(sizes, dtype=torch.int64, device=device)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)  # a pipeline stage may have no such layer
        num_layers, num_experts = largest.tolist()
        table = torch.zeros(num_layers, num_experts + NUM_TOTALS, dtype=torch.float64)
        for layer in self._layers:
            rows, totals = layer.token_dispatcher.metrics.take()
            row = table[(layer.layer_number or 1) - 1]
            row[layer.local_expert_indices] += rows
            row[num_experts:] += torch.tensor(totals, dtype=torch.float64)
        return table.to(device)

    def write(self, iteration: int, writer: Any, wandb_writer: Any) -> None:
        """Write the reports as scalars. Collective; writers are there on one rank."""
        for report in self.take():
            values = {"busiest_expert": report.busiest, "exchange_ms": report.exchange_ms, "over_capacity": report.num_over_capacity}
            values["nodes_per_token"] = report.nodes_per_token
            for name, value in values.items():
                if writer is not None:
                    writer.add_scalar(f"deepep_moe/layer_{report.layer}/{name}", value, iteration)
                if wandb_writer:
                    wandb_writer.log({f"deepep_moe/layer_{report.layer}/{name}": value}, iteration)


def serve_reports(patches: Patches, metrics: Metrics) -> None:
    """Let Megatron-Core's report of MoE losses write the metrics too. It is made on all ranks, in every step."""
    owner, name = _report()
    stock = getattr(owner, name)

    @functools.wraps(stock)
    def report(*args: Any, **kwargs: Any) -> Any:
        result = stock(*args, **kwargs)
        given = dict(zip(("self", *_ARGUMENTS) if name == "report" else _ARGUMENTS, args, strict=False)) | kwargs
        metrics.write(given["iteration"], given.get("writer"), given.get("wandb_writer"))
        return result

    patches.set(owner, name, report)


_ARGUMENTS = ("loss_scale", "iteration", "writer", "wandb_writer")


def _report() -> tuple[Any, str]:
    try:
        from megatron.core.transformer.moe.moe_logging import MoEMetricsTracker
    except ImportError:  # before 0.18
        from megatron.core.transformer.moe import moe_utils

        return moe_utils, "track_moe_metrics"
    return MoEMetricsTracker, "report"
