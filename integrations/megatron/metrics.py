"""Counts since the last report: rows of each expert, time of the exchange, calls over capacity, nodes per token.

`enable(metrics=True)` gathers it. Megatron-Core's own report of MoE losses, to TensorBoard and W&B, writes it too. Only training forwards
count: in training mode, with a backward to come, and once if they are recomputed. Evaluations and reference models do not.
"""

import collections
import itertools
import weakref
from typing import Any

import torch
import torch.distributed as dist

from deepep_moe.integrations.common.patches import Patches, Stock
from deepep_moe.nn.metrics import NUM_TOTALS, OVERLOADS, LayerMetrics, LayerReport
from deepep_moe.nn.overload import overloads
from deepep_moe.nn.writers import RoutingTrace, routing_trace


class Metrics:
    """The layers of this process that gather metrics."""

    def __init__(self) -> None:
        self._layers: weakref.WeakKeyDictionary[Any, tuple[int, LayerMetrics]] = weakref.WeakKeyDictionary()  # with the model's number
        self._num_models: collections.Counter[int] = collections.Counter()  # models that have trained a layer of this number
        self._trace: RoutingTrace | None = None

    def of(self, layer: Any) -> LayerMetrics:
        """Return what a MoELayer is to write to. Its first call here, which all ranks make in the same order, numbers its model: a second
        layer of one number is of another model. A model that is built again gets a new number."""
        if layer not in self._layers:
            number = layer.layer_number or 1
            self._num_models[number] += 1
            self._layers[layer] = self._num_models[number], LayerMetrics(len(layer.local_expert_indices))
        return self._layers[layer][1]

    def take(self) -> list[LayerReport]:
        """Return a report of every layer that has trained, by model and layer, and begin anew. Collective over all ranks of the job."""
        table, first_model, calls, groups = self._table()
        by_layer = overloads(calls, groups)
        dist.all_reduce(table)
        self._trace = self._trace or routing_trace()
        if self._trace is not None:
            self._trace.write(calls)  # last: if it fails on a rank, no peer waits
        reports = []
        places = itertools.product(*map(range, table.shape[:2]))
        for (model, layer), row, overload in zip(places, table.flatten(0, 1).tolist(), by_layer, strict=True):
            *rows, ms, num_timed, num_over, num_repeats, nodes, tokens, num_experts, num_ranks = row
            if any((*rows, num_timed, num_over)):
                counts = [int(count) for count in rows[: round(num_experts / num_ranks)]]
                per_token = nodes / tokens if tokens else 1.0
                totals = ms / max(num_timed, 1.0), int(num_over), int(num_repeats)
                reports.append(LayerReport(layer + 1, counts, *totals, per_token, first_model + model, **overload))
        return reports

    def _table(self) -> tuple[torch.Tensor, int, list[torch.Tensor], list[tuple[int, int]]]:
        """Return [num_models, num_layers, num_experts + totals + 2] of this rank, the number of the first model, and what `overloads` takes
        of each layer. The last two columns are the experts of the layer, and 1."""
        layers = list(self._layers.items())
        sizes = [[layer.layer_number or 1, layer.config.num_moe_experts, model, -model] for layer, (model, _) in layers]
        device = torch.device("cuda") if dist.get_backend() == "nccl" else torch.device("cpu")
        least = -(2**31)
        largest = torch.tensor([[0, 0, least, least], *sizes], dtype=torch.int64, device=device).amax(0)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)  # a pipeline stage may have no such layer
        num_layers, num_experts, last_model, first_model = largest.tolist()
        num_models = last_model + first_model + 1 if num_layers else 0
        table = torch.zeros(num_models, num_layers, num_experts + NUM_TOTALS + 2, dtype=torch.float64)
        calls, groups = [torch.zeros(0, 1)] * (num_models * num_layers), [(0, 1)] * (num_models * num_layers)
        for layer, (model, metrics) in layers:
            rows, totals, of_calls = metrics.take()
            row = table[model + first_model, (layer.layer_number or 1) - 1]
            place, group = (model + first_model) * num_layers + (layer.layer_number or 1) - 1, layer.token_dispatcher.tp_ep_group
            calls[place], groups[place] = of_calls, (dist.get_global_rank(group, 0), group.size())
            row[layer.local_expert_indices] += rows
            row[num_experts:] += torch.tensor([*totals, layer.config.num_moe_experts, 1.0], dtype=torch.float64)
        return table.to(device), -first_model, calls, groups

    def write(self, iteration: int, writer: Any, wandb_writer: Any) -> None:
        """Write the reports as scalars. Collective; writers are there on one rank. Names of a second model and of later ones have its
        number."""
        for report in self.take():
            prefix = f"deepep_moe/layer_{report.layer}" if report.model == 1 else f"deepep_moe/model_{report.model}/layer_{report.layer}"
            values = {"busiest_expert": report.busiest, "exchange_ms": report.exchange_ms, "over_capacity": report.num_over_capacity}
            values |= {"repeats": report.num_repeats, "nodes_per_token": report.nodes_per_token}
            values |= {name: getattr(report, name) for name in OVERLOADS}
            for name, value in values.items():
                if writer is not None:
                    writer.add_scalar(f"{prefix}/{name}", value, iteration)
                if wandb_writer:
                    wandb_writer.log({f"{prefix}/{name}": value}, iteration)


def serve_reports(patches: Patches, metrics: Metrics) -> None:
    """Let Megatron-Core's report of MoE losses write the metrics too. It is made on all ranks, in every step."""
    owner: Any
    try:
        from megatron.core.transformer.moe.moe_logging import MoEMetricsTracker
    except ImportError:  # before 0.18
        from megatron.core.transformer.moe import moe_utils

        owner, name, first = moe_utils, "track_moe_metrics", []
    else:
        owner, name, first = MoEMetricsTracker, "report", ["self"]

    @patches.around(owner, name)
    def report(stock: Stock, *args: Any, **kwargs: Any) -> object:
        result = stock(*args, **kwargs)
        arguments = dict(zip([*first, "loss_scale", "iteration", "writer", "wandb_writer"], args, strict=False)) | kwargs
        metrics.write(arguments["iteration"], arguments.get("writer"), arguments.get("wandb_writer"))
        return result
