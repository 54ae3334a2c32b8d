"""Measures MoE layers: rows and overload, time of the exchange, nodes of a token. For the console, TensorBoard and Weights & Biases."""

import contextlib
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from deepep_moe.exchange.buffer import Buffer
from deepep_moe.nn.overload import NUM_CALLS, overloads
from deepep_moe.nn.writers import EventFile, JsonLines, rank_in_job, routing_trace
from deepep_moe.ops.lanes import nodes_per_token

__all__ = ["EventFile", "JsonLines", "LayerMetrics", "LayerReport", "Metrics"]
OVERLOADS = ("rank_overload", "max_rank_overload", "max_vio")  # fields of a report that are written as scalars
NUM_TOTALS = 6  # of a layer: milliseconds, timed forwards, calls over capacity, repeats, nodes of all tokens, tokens


@dataclass(frozen=True)
class LayerReport:
    """One MoE layer since the last report, over all ranks."""

    layer: int
    """The layer's number in the model, from 1. Under Megatron-Core: Megatron's layer number."""
    rows_per_expert: list[int]
    """[num_experts]: rows that each expert received in all counted forwards, padding included (not with copies of experts)."""
    exchange_ms: float
    """Milliseconds of dispatch and combine in a forward, mean over ranks. Measured on the stream on GPUs, on the host on CPUs. 0 if all
    forwards were replays of a CUDA graph, which are not timed."""
    num_over_capacity: int
    """Forwards that ended with EPCapacityError, counted on each rank."""
    num_repeats: int = 0
    """Forwards whose experts ran twice, counted on each rank: more rows came than the host had predicted. On GPUs only."""
    nodes_per_token: float = 1.0
    """Nodes that a token goes to, mean over tokens. Its own node counts only if it has an expert there. 1 on a single node."""
    model: int = 1
    """The layer's model, from 1; under Megatron-Core in the order in which models first train in this process."""
    rank_overload: float = 0.0
    """Rows of the busiest rank of each forward over an even share (max / mean), both summed over forwards; 1 is balanced, 0 without rows.
    The busiest rank sets the time of the experts, so balancing could divide that by no more than this.

    This and the next three count rows as `rows_per_expert`, of the latest 128 forwards, by expert-parallel group."""
    max_rank_overload: float = 0.0
    """The largest max / mean of ranks in a single forward: the room for rows that no forward would have exceeded."""
    rank_overload_of_sum: float = 0.0
    """max / mean of ranks where rows are first summed over forwards. It is the part of `rank_overload` that a better placement of
    experts could remove. The rest changes from forward to forward, and only a plan for each forward removes it."""
    max_vio: float = 0.0
    """MaxVio (arXiv 2408.15664): rows of the busiest expert of each forward over the mean of experts, less 1, summed as `rank_overload`."""

    @property
    def busiest(self) -> float:
        """Return the rows of the busiest expert, relative to an even share; 0 without rows."""
        total = sum(self.rows_per_expert)
        return max(self.rows_per_expert) * len(self.rows_per_expert) / total if total else 0.0


class LayerMetrics:
    """One layer of this rank since the last report. `serves`: all its forwards count, else those that train."""

    def __init__(self, num_local_experts: int, serves: bool = False):
        self.num_over_capacity = self.num_repeats = 0
        self._num_local_experts, self._serves = num_local_experts, serves
        # [NUM_CALLS + 2, num_local_experts]: rows of the latest forwards by turns, then of all, then the number of forwards. The addresses
        # of this and of `_nodes` must not change, because CUDA graphs write to them.
        self._rows: torch.Tensor | None = None
        self._nodes: torch.Tensor | None = None  # [nodes of all tokens, tokens]
        self._ms, self._num_timed = 0.0, 0.0
        self._events: list[tuple[Any, Any]] = []  # before and after GPU calls whose times were not read yet

    def __reduce__(self) -> Any:
        """Let a copy of a layer count anew: events of GPUs cannot be copied."""
        return LayerMetrics, (self._num_local_experts, self._serves)

    def counts(self, layer: nn.Module) -> bool:
        """Return whether the present forward of `layer` counts. One that a checkpoint runs again in the backward does once: the first time
        if it had gradients then, else the second."""
        if self._serves:
            return True
        runs_again = torch._C._current_graph_task_id() != -1 and torch._C._autograd._top_saved_tensors_default_hooks(False) is not None
        return layer.training and torch.is_grad_enabled() and not runs_again

    def count(self, rows_per_expert: torch.Tensor) -> None:
        """Add the rows of a forward, on any device. rows_per_expert: [num_local_experts], or more, of which the others are left out."""
        rows_per_expert = rows_per_expert[: self._num_local_experts]
        if self._rows is None:
            with torch.inference_mode(False):  # a model that serves may leave and enter this mode
                self._rows = torch.zeros(NUM_CALLS + 2, self._num_local_experts, dtype=torch.int64, device=rows_per_expert.device)
        latest, of_all, number = self._rows[:NUM_CALLS], self._rows[NUM_CALLS], self._rows[NUM_CALLS + 1]
        latest.index_copy_(0, number[:1] % NUM_CALLS, rows_per_expert[None].to(latest))
        of_all += rows_per_expert
        number += 1

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

    def take(self) -> tuple[torch.Tensor, list[float], torch.Tensor]:
        """Return the rows [num_local_experts] on the CPU, the totals and the rows [num_calls, num_local_experts] of the latest forwards,
        and begin anew. Exchanges that still run are timed in the next report."""
        while self._events and self._events[0][1].query():
            begin, end = self._events.pop(0)
            self._ms, self._num_timed = self._ms + begin.elapsed_time(end), self._num_timed + 0.5
        rows = torch.zeros(NUM_CALLS + 2, self._num_local_experts, dtype=torch.int64)
        if self._rows is not None:
            rows.copy_(self._rows)
            self._rows[NUM_CALLS:].zero_()
        nodes = [0.0, 0.0] if self._nodes is None else self._nodes.double().tolist()
        totals = [self._ms, self._num_timed, float(self.num_over_capacity), float(self.num_repeats), *nodes]
        if self._nodes is not None:
            self._nodes.zero_()
        self._ms, self._num_timed, self.num_over_capacity, self.num_repeats = 0.0, 0.0, 0, 0
        num_calls = int(rows[-1, 0])
        return rows[NUM_CALLS], totals, rows[:NUM_CALLS].roll(-num_calls, 0)[max(NUM_CALLS - num_calls, 0) :]


class Metrics:
    """Observes the MoE layers of a model, and writes their load and times since the last report as scalars.

    Training forwards count: those in training mode with gradients enabled, and once where a checkpoint runs them again. Evaluation does
    not. If a layer is in eval mode when this object is made, as in a model that serves, all its forwards count.

    A layer is a `MoELayer`, a layer of `deepep_moe.integrations.huggingface.spread_experts`, or one that
    `deepep_moe.integrations.deepspeed` has swapped: of AutoEP, and under `wall_clock_breakdown`, without the time of its exchange.

    Args:
        model: the model whose layers are observed from now on, on every rank.
        writers: objects with `add_scalar(name, value, step)` or `log(values, step=step)`. TensorBoard's writer and `EventFile` have the
            former, a run of Weights & Biases and `JsonLines` the latter. Pass them on one rank only.

    Raises:
        TypeError: a writer has neither method.
        ValueError: the model has no such layer, or one of DeepSpeed before `deepspeed.initialize`.
    """

    def __init__(self, model: nn.Module, writers: Sequence[Any] = ()):
        for writer in writers:
            if not hasattr(writer, "add_scalar") and not hasattr(writer, "log"):
                raise TypeError(f"{writer!r} has neither add_scalar (TensorBoard) nor log (Weights & Biases); pass such a writer")
        layers = [layer for module in model.modules() if (layer := _follow(module)) is not None]
        if not layers:
            raise ValueError(f"{type(model).__name__} has no MoE layer of deepep_moe; pass a model that has one")
        self.writers, self._trace = list(writers), routing_trace()
        self._layers = layers

    def take(self) -> list[LayerReport]:
        """Return a report of every layer, in the order of the model, and reset the values. Collective over all ranks of the job.

        Raises:
            ValueError: ranks have unequal numbers of layers, as stages of a pipeline may. All raise it.
        """
        num_experts = max(layer.num_experts for layer in self._layers)
        table = torch.zeros(len(self._layers), num_experts + NUM_TOTALS, dtype=torch.float64)
        calls = []
        for row, layer in zip(table, self._layers, strict=True):
            rows, totals, of_calls = layer.metrics.take()
            row[layer.rank * len(rows) : (layer.rank + 1) * len(rows)] = rows.double()
            row[num_experts:] = torch.tensor(totals, dtype=torch.float64)
            calls.append(of_calls)
        by_layer = overloads(calls, [(layer.first_rank, layer.num_ranks) for layer in self._layers])
        if dist.is_available() and dist.is_initialized():
            table = table.to("cuda") if dist.get_backend() == "nccl" else table
            dist.all_reduce(table)
        if self._trace is not None:
            self._trace.write(calls)  # last: if it fails on a rank, no peer waits
        reports = []
        for number, (layer, row, overload) in enumerate(zip(self._layers, table.tolist(), by_layer, strict=True), start=1):
            *rows, ms, num_timed, num_over, num_repeats, _, _ = row
            counts = [int(count) for count in rows[: layer.num_experts]]
            reports.append(LayerReport(number, counts, ms / max(num_timed, 1.0), int(num_over), int(num_repeats), **overload))
        return reports

    def write(self, step: int, values: dict[str, float] | None = None) -> dict[str, float]:
        """Return the scalars of all layers and `values`, and give them to the writers. Collective over all ranks.

        Names are `deepep_moe/layer_<number>/` and `busiest_expert` (rows of the busiest expert over an even share), `exchange_ms` (of a
        forward), `rows`, `repeats`, or those of OVERLOADS.
        """
        scalars = dict(values or {})
        for report in self.take():
            name = f"deepep_moe/layer_{report.layer}"
            scalars |= {f"{name}/busiest_expert": report.busiest, f"{name}/exchange_ms": report.exchange_ms}
            scalars |= {f"{name}/rows": float(sum(report.rows_per_expert)), f"{name}/repeats": float(report.num_repeats)}
            scalars |= {f"{name}/{of}": getattr(report, of) for of in OVERLOADS}
        for writer in self.writers:
            if hasattr(writer, "add_scalar"):
                for name, value in scalars.items():
                    writer.add_scalar(name, value, step)
            else:
                writer.log(scalars, step=step)
        return scalars


class _Counted:
    """A layer and its place in its expert-parallel group of `num_ranks` ranks, of which the first is `first_rank` of the job."""

    def __init__(self, layer: nn.Module, group: "dist.ProcessGroup | None", num_ranks: int, num_local_experts: int):
        self.num_ranks, self.num_experts = num_ranks, num_ranks * num_local_experts
        self.metrics = LayerMetrics(num_local_experts, serves=not layer.training)
        self.rank, self.first_rank = 0, rank_in_job()
        if num_ranks > 1:
            self.rank, self.first_rank = dist.get_rank(group), dist.get_global_rank(group or dist.group.WORLD, 0)  # type: ignore[arg-type]


_followers: "weakref.WeakKeyDictionary[nn.Module, weakref.WeakSet[LayerMetrics]]" = weakref.WeakKeyDictionary()
"""What each layer of ours adds to, while its `Metrics` lives. A copy of a layer is followed by none."""


def _follow(module: Any) -> _Counted | None:
    """Return a layer of ours, which is counted from now on, or None."""
    if not hasattr(type(module), "deepep_moe_is_counted"):  # not of the object: a wrapper may pass on what its module has
        return None
    if isinstance(buffer := getattr(module, "buffer", None), Buffer):
        counted = _Counted(module, buffer._group, buffer.num_ranks, buffer.num_local_experts)
    elif module.ep_group is None and module.ep_size > 1:
        raise ValueError(f"a {type(module).__name__} has no expert-parallel group yet; make Metrics after deepspeed.initialize")
    else:
        counted = _Counted(module, module.ep_group, module.ep_size, module.num_local_experts)
    _followers.setdefault(module, weakref.WeakSet()).add(counted.metrics)
    return counted


def metrics_of(layer: Any) -> list[LayerMetrics]:
    """Return what the present forward of a layer adds to: nothing without `Metrics`, and where it does not count."""
    return [metrics for metrics in _followers.get(layer, ()) if metrics.counts(layer)]


def timed(layer: Any, rows: Tensor) -> contextlib.ExitStack:
    """Time one of the two calls of a layer's forward, from now to the end of the context that is returned, on the device of its rows."""
    times = contextlib.ExitStack()
    for metrics in metrics_of(layer):
        times.enter_context(metrics.timed(rows.device))
    return times


def count_rows(layer: Any, rows_per_expert: Callable[[], Tensor]) -> None:
    """Count the rows that the experts of this rank got in a layer's forward."""
    for metrics in metrics_of(layer):
        metrics.count(rows_per_expert())


def count_repeat(layer: Any) -> None:
    """Count that the experts of a layer's forward run twice."""
    for metrics in metrics_of(layer):
        metrics.num_repeats += 1
