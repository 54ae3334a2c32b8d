"""What MoE layers have done since the last report: rows of each expert, time of the exchange, calls over capacity, nodes per token.

`enable(metrics=True)` gathers it. Megatron-Core's own report of MoE losses, to TensorBoard and W&B, writes it too.
"""

import contextlib
import functools
import time
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from deepep_moe.exchange.buffer import Buffer
from deepep_moe.integrations.megatron.patches import Patches
from deepep_moe.ops.dense import nodes_per_token

_NUM_TOTALS = 5  # milliseconds, timed forwards, calls over capacity, nodes of all tokens, tokens


@dataclass(frozen=True)
class LayerReport:
    """One MoE layer since the last report, over all ranks."""

    layer: int
    """Megatron-Core's number of the layer, from 1."""
    rows_per_expert: list[int]
    """[num_experts] rows that experts got, padding included, in all forwards."""
    exchange_ms: float
    """Dispatch and combine of a forward, mean over ranks: on GPUs from entry to exit on the stream, on CPUs of the host. 0 where all
    were replayed from a CUDA graph, in which nothing is timed."""
    num_over_capacity: int
    """Forwards that ended with EPCapacityError, counted on each rank."""
    nodes_per_token: float = 1.0
    """Nodes that a token goes to, its own among them if it has an expert there; mean over tokens. 1 where there is one node."""

    @property
    def busiest(self) -> float:
        """Rows of the busiest expert, relative to an even share; 0 without rows."""
        total = sum(self.rows_per_expert)
        return max(self.rows_per_expert) * len(self.rows_per_expert) / total if total else 0.0


class LayerMetrics:
    """One layer of this rank since the last report."""

    def __init__(self, num_local_experts: int):
        self.num_over_capacity = 0
        self._num_local_experts = num_local_experts
        self._rows: torch.Tensor | None = None  # the same memory all along, for graphs that add to it
        self._nodes: torch.Tensor | None = None  # likewise: nodes of all tokens, and tokens
        self._ms, self._num_timed = 0.0, 0.0
        self._events: list[tuple[Any, Any]] = []  # around calls on a GPU that have not been looked at

    def count(self, rows_per_expert: torch.Tensor) -> None:
        """[num_local_experts] rows of a forward, wherever they are."""
        if self._rows is None:
            self._rows = torch.zeros(self._num_local_experts, dtype=torch.int64, device=rows_per_expert.device)
        self._rows += rows_per_expert

    def count_nodes(self, topk_idx: torch.Tensor, buffer: Buffer) -> None:
        """Count the nodes of the tokens of topk_idx [num_tokens, num_topk], whose experts are numbered as `buffer` numbers them."""
        num_nodes = buffer.num_ranks // buffer.ranks_per_node
        if num_nodes == 1:
            return
        if self._nodes is None:
            self._nodes = torch.zeros(2, dtype=torch.int64, device=topk_idx.device)
        self._nodes[0] += nodes_per_token(topk_idx, buffer.num_experts, num_nodes).sum()
        self._nodes[1] += topk_idx.shape[0]

    @contextlib.contextmanager
    def timed(self, device: torch.device) -> Iterator[None]:
        """Time one of the two calls of a forward. The host does not wait."""
        if device.type != "cuda":
            began = time.perf_counter()
            yield
            self._ms, self._num_timed = self._ms + 1e3 * (time.perf_counter() - began), self._num_timed + 0.5
            return
        if torch.cuda.is_current_stream_capturing():
            yield
            return
        events = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        events[0].record()
        yield
        events[1].record()
        self._events.append(events)

    def take(self) -> tuple[torch.Tensor, list[float]]:
        """Return the rows [num_local_experts] on the CPU and the totals, and begin anew. Calls that still run count in the next report."""
        while self._events and self._events[0][1].query():
            begin, end = self._events.pop(0)
            self._ms, self._num_timed = self._ms + begin.elapsed_time(end), self._num_timed + 0.5
        rows = torch.zeros(self._num_local_experts, dtype=torch.int64) if self._rows is None else self._rows.to("cpu", copy=True)
        nodes = [0.0, 0.0] if self._nodes is None else self._nodes.double().tolist()
        totals = [self._ms, self._num_timed, float(self.num_over_capacity), *nodes]
        for counts in (self._rows, self._nodes):
            if counts is not None:
                counts.zero_()
        self._ms, self._num_timed, self.num_over_capacity = 0.0, 0.0, 0
        return rows, totals


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
        table = torch.zeros(num_layers, num_experts + _NUM_TOTALS, dtype=torch.float64)
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
