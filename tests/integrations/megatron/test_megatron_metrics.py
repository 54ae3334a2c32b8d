"""Reports of layers: rows of each expert, time of the exchange, calls over capacity; also through Megatron-Core's own report."""

import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from megatron_cases import HIDDEN, NO_GROUPS, NUM_EXPERTS, RECOMPUTED, SYNC_FREE, layer_of, model_parallel, on_megatron
from on_ranks import on_ranks

from deepep_moe.errors import EPCapacityError
from deepep_moe.integrations.megatron import recover, take_metrics
from deepep_moe.integrations.megatron.metrics import LayerReport

pytest.importorskip("megatron.core")

TOPK = 4


def numbered(sizes: dict[str, int], number: int = 1, **changes: Any) -> Any:
    layer = layer_of(sizes, **(NO_GROUPS | {"num_layers": 3} | changes))
    layer.set_layer_number(number)
    return layer


def one_sided(layer: Any, first: int) -> None:
    """Let every token go to the experts first to first + 3."""
    layer.router.expert_bias.zero_()
    layer.router.expert_bias[first : first + TOPK] = 100.0


@on_megatron(2, metrics=True)
def test_rows_of_each_expert(rank: int, num_ranks: int, sizes: dict[str, int], tmp_path: Path) -> None:
    """In the reports, and in the routing trace, where each rank has its experts' rows of each forward in its file."""
    first, third = numbered(sizes), numbered(sizes, 3)
    one_sided(first, 0)
    one_sided(third, 4)
    for num_tokens in (3, 5 + rank):
        first(torch.randn(num_tokens, 1, HIDDEN))
    third(torch.randn(2, 1, HIDDEN))
    began = time.perf_counter()
    with mock.patch.dict(os.environ, {"DEEPEP_MOE_TRACE": str(tmp_path)}):
        reports = take_metrics()
    assert time.perf_counter() - began < 5
    tokens = num_ranks * 8 + sum(range(num_ranks))
    assert [report.layer for report in reports] == [1, 3]
    assert [report.rows_per_expert for report in reports] == [[tokens] * 4 + [0] * 4, [0] * 4 + [2 * num_ranks] * 4]
    assert [report.busiest for report in reports] == [2.0, 2.0]
    assert all(report.num_over_capacity == 0 and 0 < report.exchange_ms < 1000 for report in reports)
    assert take_metrics() == []
    calls = [[[6] * 4, [0] * 4], [[11] * 4, [0] * 4]] if rank == 0 else [[[0] * 4, [4] * 4], [[0] * 4] * 2]
    assert np.load(tmp_path / f"rank{rank:05}.npy").tolist() == calls


@on_ranks(4)
def test_nodes_per_token(rank: int, num_ranks: int) -> None:
    """Two experts a rank: experts 0 to 3 are on ranks 0 and 1, experts 1 to 4 on ranks 0 to 2."""
    for ranks_per_node, expected in ((4, 1.0), (2, (6 * 1 + 2 * 2) / 8), (1, (6 * 2 + 2 * 3) / 8)):
        with model_parallel(ep=num_ranks, metrics=True, ranks_per_node=ranks_per_node) as sizes:
            layer = numbered(sizes)
            for first, num_tokens in ((0, 6), (1, 2)):
                one_sided(layer, first)
                layer(torch.randn(num_tokens, 1, HIDDEN))
            assert layer.token_dispatcher.buffer.ranks_per_node == ranks_per_node
            (report,) = take_metrics()
            assert report.nodes_per_token == expected, ranks_per_node


@on_megatron(2, metrics=True)
def test_time_of_the_exchange(rank: int, num_ranks: int, sizes: dict[str, int]) -> None:
    """The mean over ranks and forwards of what dispatch and combine take."""
    layer = numbered(sizes)
    layer(torch.randn(3, 1, HIDDEN))
    take_metrics()
    stock = layer.token_dispatcher.buffer.combine

    def combine(*args: Any, **kwargs: Any) -> Any:
        time.sleep(1.0)
        return stock(*args, **kwargs)

    layer.token_dispatcher.buffer.combine = combine
    for _ in range(2):
        dist.barrier()
        layer(torch.randn(3, 1, HIDDEN))
    (report,) = take_metrics()
    assert 1000 <= report.exchange_ms < 1900, report


def rows() -> list[tuple[int, int, int]]:
    """(model, layer, rows of all experts) of each report."""
    return [(report.model, report.layer, sum(report.rows_per_expert)) for report in take_metrics()]


@on_megatron(2, metrics=True, expert_alignment=16)
def test_only_training_counts_and_each_model_apart(rank: int, num_ranks: int, sizes: dict[str, int]) -> None:
    """An actor trains, and so does a critic, which has fewer experts and recomputes. A reference and evaluations do not. Each rank's three
    tokens go to four experts, whose rows are padded to 16."""
    x, each = torch.randn(3, 1, HIDDEN, requires_grad=True), 16 * TOPK
    actor, reference = numbered(sizes, 2), numbered(sizes, 2)
    few = {"num_moe_experts": 4, "moe_router_load_balancing_type": "none"}
    critic = numbered(sizes, 7, **few, **RECOMPUTED)  # more than num_layers
    second_critic = numbered(sizes, 2)
    for layer in (actor, reference, second_critic):
        one_sided(layer, 4)

    def not_training() -> None:
        with torch.no_grad():
            for layer in (reference, actor, critic):
                layer(x)
        actor.eval()(x)
        actor.train()

    not_training()
    assert rows() == []
    actor(x)[0].sum().backward()
    not_training()
    assert rows() == [(1, 2, each)]
    for layer in (actor, critic, second_critic):
        layer(x)[0].sum().backward()
    not_training()
    reports = take_metrics()
    assert [(report.model, report.layer, len(report.rows_per_expert)) for report in reports] == [(1, 2, 8), (1, 7, 4), (2, 2, 8)]
    assert all(sum(report.rows_per_expert) == each and report.exchange_ms > 0 for report in reports)
    assert reports[1].busiest == 1.0, "all tokens go to all of its experts"
    second_critic(x)[0].sum().backward()
    assert rows() == [(2, 2, each)]


@on_megatron(2, metrics=True, **SYNC_FREE, recv_capacity_factor=1.0, num_max_tokens_per_rank=4)
def test_calls_over_capacity(rank: int, num_ranks: int, sizes: dict[str, int]) -> None:
    layer = numbered(sizes)
    one_sided(layer, 0)
    with pytest.raises(EPCapacityError):
        layer(torch.randn(4, 1, HIDDEN))
    recover()
    (report,) = take_metrics()
    assert report == LayerReport(1, [0] * NUM_EXPERTS, report.exchange_ms, num_ranks)


@on_megatron(2, metrics=True)
def test_report_of_megatron_core(rank: int, num_ranks: int, sizes: dict[str, int]) -> None:
    """Megatron-LM calls the report on all ranks; the last one has a writer."""
    layer = numbered(sizes, 2)
    one_sided(layer, 2)
    layer(torch.randn(3, 1, HIDDEN))
    scalars: dict[str, tuple[float, int]] = {}
    add_scalar = lambda name, value, iteration: scalars.update({name: (float(value), iteration)})  # noqa: E731
    writer = SimpleNamespace(add_scalar=add_scalar) if rank == num_ranks - 1 else None
    how = {"force_initialize": True, "track_names": [], "num_layers": 3}
    try:
        from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker
    except ImportError:
        from megatron.core.transformer.moe import moe_utils

        moe_utils.track_moe_metrics(1.0, 7, writer, **how)
    else:
        get_moe_metrics_tracker().report(1.0, 7, writer, **how)
    if writer is not None:
        ours = {name.removeprefix("deepep_moe/layer_2/"): value for name, value in scalars.items() if name.startswith("deepep_moe/")}
        overloads = {"rank_overload", "max_rank_overload", "max_vio"}
        assert set(ours) == {"busiest_expert", "exchange_ms", "over_capacity", "repeats", "nodes_per_token"} | overloads
        assert (
            ours["busiest_expert"] == (2.0, 7)
            and ours["repeats"] == (0, 7)
            and ours["nodes_per_token"] == (1.0, 7)
            and ours["exchange_ms"][0] > 0
        )
