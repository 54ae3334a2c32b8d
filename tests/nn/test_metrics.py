"""Metrics of MoE layers and the files that they go to."""

import copy
import gc
import glob
import json
import sys
import threading
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from on_ranks import on_ranks
from torch.utils.checkpoint import checkpoint

from deepep_moe.nn import EventFile, GroupedExperts, JsonLines, Metrics, MoELayer, Router, SwiGLU, writers
from deepep_moe.nn.metrics import LayerMetrics, metrics_of
from deepep_moe.nn.overload import NUM_CALLS, _by_layer, overloads
from deepep_moe.nn.writers import RoutingTrace


class Writer:
    """Keeps what TensorBoard's writer would get."""

    def __init__(self):
        self.scalars = []

    def add_scalar(self, name, value, step):
        self.scalars.append((name, value, step))


def layers(num_ranks: int) -> torch.nn.Sequential:
    """One layer with a shared expert and experts one by one, and one with grouped experts alone. All tokens choose the experts 0 and 1."""
    listed = []
    for experts in ([SwiGLU(16, 8) for _ in range(4 // num_ranks)], GroupedExperts(4 // num_ranks, 16, 8)):
        router = Router(16, 4, 2, expert_bias=True)
        router.expert_bias.copy_(torch.tensor([2.0, 1.0, -5.0, -5.0]))
        shared = SwiGLU(16, 8) if isinstance(experts, list) else None
        listed.append(MoELayer(router, experts, shared, num_max_tokens_per_rank=8))
    return torch.nn.Sequential(*listed)


@on_ranks((1, 2))
def test_reports_of_layers(rank, num_ranks):
    model, writer = layers(num_ranks), Writer()
    metrics = Metrics(model, [writer])
    for num_tokens in (8 - rank, 3):
        model(torch.randn(num_tokens, 16)).sum().backward()
    first = metrics.take()
    model(torch.randn(5, 16))
    scalars = metrics.write(7, {"loss": 2.0})
    assert writer.scalars == [(name, value, 7) for name, value in scalars.items()]
    nothing = metrics.take()
    tokens = sum(8 - rank + 3 for rank in range(num_ranks))
    assert [(report.layer, report.rows_per_expert, report.busiest) for report in first] == [
        (n, [tokens, tokens, 0, 0], 2.0) for n in (1, 2)
    ]
    assert all(report.exchange_ms > 0 for report in first)
    of_layer = ("busiest_expert", "exchange_ms", "rows", "repeats", "rank_overload", "max_rank_overload", "max_vio")
    names = [f"deepep_moe/layer_{n}/{name}" for n in (1, 2) for name in of_layer]
    assert list(scalars) == ["loss", *names] and scalars["loss"] == 2.0
    assert scalars["deepep_moe/layer_2/rows"] == 2 * 5 * num_ranks and scalars["deepep_moe/layer_1/busiest_expert"] == 2.0
    assert [(report.rows_per_expert, report.exchange_ms) for report in nothing] == [([0] * 4, 0.0)] * 2
    everywhere = [None] * num_ranks
    dist.all_gather_object(everywhere, first)
    assert everywhere == [first] * num_ranks, "every rank has the sums of all"


def test_evaluations_count_for_a_model_that_serves_only():
    model, x = layers(1), torch.randn(3, 16)
    metrics = Metrics(model)
    served = Metrics(model.eval())
    sums = []
    for is_training, has_gradient in ((False, True), (True, False), (True, True)):
        model.train(is_training)
        with torch.set_grad_enabled(has_gradient):
            model(x)
        sums.append([sum(metrics.take()[0].rows_per_expert), sum(served.take()[0].rows_per_expert)])
    assert sums == [[0, 6], [0, 6], [6, 6]]

    # A model that serves, in and out of inference mode.
    metrics = Metrics(model.eval())
    for _ in range(2):
        with torch.inference_mode():
            model(x)
        with torch.no_grad():
            model(x)
        assert [report.rows_per_expert for report in metrics.take()] == [[6, 6, 0, 0]] * 2


@pytest.mark.parametrize("use_reentrant", (True, False))
def test_a_checkpoint_counts_a_forward_once(use_reentrant):
    model, x = layers(1), torch.randn(3, 16, requires_grad=True)
    metrics = Metrics(model)
    checkpoint(model, x, use_reentrant=use_reentrant).sum().backward()
    assert [report.rows_per_expert for report in metrics.take()] == [[3, 3, 0, 0]] * 2


def test_a_copy_of_a_layer_counts_anew():
    metrics, event = LayerMetrics(2, serves=True), threading.Lock()  # an event of a GPU cannot be copied either
    metrics.count(torch.tensor([1, 2]))
    metrics._events.append((event, event))
    copied = copy.deepcopy(metrics)
    assert copied.counts(torch.nn.Linear(2, 2).eval()) and copied.take()[0].tolist() == [0, 0]


def test_dropped_metrics_follow_no_more():
    model = layers(1)
    kept, dropped = Metrics(model), Metrics(model)
    own, other = (counted.metrics for counted in (kept._layers[0], dropped._layers[0]))
    assert {*metrics_of(model[0])} == {own, other}
    del dropped, other
    gc.collect()
    assert metrics_of(model[0]) == [own]


def test_what_cannot_be_followed():
    with pytest.raises(ValueError, match="^Linear has no MoE layer of deepep_moe; pass a model that has one$"):
        Metrics(torch.nn.Linear(2, 2))
    with pytest.raises(TypeError, match=r"has neither add_scalar \(TensorBoard\) nor log \(Weights & Biases\)"):
        Metrics(torch.nn.Linear(2, 2), [print])


# ---- files ----


def test_history_of_a_run(tmp_path):
    file = JsonLines(tmp_path / "run" / "history.jsonl")
    file.log({"loss": 2.5}, step=3)
    file.log({"loss": 2.0, "a/b": 1.0}, step=4)
    lines = [json.loads(line) for line in file.path.read_text().splitlines()]
    assert all(line.pop("_timestamp") > 1e9 for line in lines)
    assert lines == [{"_step": 3, "loss": 2.5}, {"_step": 4, "loss": 2.0, "a/b": 1.0}]


def test_events_without_tensorboard(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ImportError, match="EventFile needs the package tensorboard .*; pip install tensorboard, or use JsonLines"):
        EventFile(tmp_path)


def test_tensorboard_reads_events(tmp_path):
    loader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    writer = EventFile(tmp_path)
    for step in range(3):
        writer.add_scalar("loss", 1.0 / (1 + step), step)
    events = loader.EventAccumulator(str(tmp_path)).Reload()
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [(0, 1.0), (1, 0.5), (2, pytest.approx(1 / 3))]


# ---- overload of ranks and experts in single forwards, and the routing trace from which it can be computed again ----


def one_layer(calls: list[list[list[int]]]) -> dict[str, float]:
    """The overload of one group, whose rows are calls[rank][call][local expert]."""
    rows = torch.tensor(calls)
    num_ranks, num_calls, num_local = rows.shape
    sizes = torch.tensor([0, num_ranks, num_ranks * num_local]).expand(num_ranks, -1)
    return _by_layer(torch.cat([sizes, rows.sum(2), rows.amax(2)], 1).unsqueeze(1), num_calls)[0]


def test_without_rows_there_is_no_overload():
    assert one_layer([[[0, 0]], [[0, 0]]]) == {} and overloads([torch.zeros(0, 4)], [(0, 1)]) == [{}] and overloads([], []) == []


@on_ranks(4)
def test_groups_count_apart(rank: int) -> None:
    """Ranks 0 and 2 are a group, 1 and 3 another. In one all rows go to the first rank, in the other half of them. Each rank has the first
    or the second layer only."""
    rows = {0: [4, 4], 2: [0, 0], 1: [1, 1], 3: [1, 1]}[rank]
    counts, group = torch.tensor([rows]), (rank % 2, 2)
    none = torch.zeros(0, 1)
    expected = {
        0: {"rank_overload": 2.0, "max_rank_overload": 2.0, "rank_overload_of_sum": 2.0, "max_vio": 1.0},
        1: {"rank_overload": 1.0, "max_rank_overload": 1.0, "rank_overload_of_sum": 1.0, "max_vio": 0.0},
    }
    assert overloads([counts, none] if rank % 2 == 0 else [none, counts], [group, group]) == [expected[0], expected[1]]
    both = {"rank_overload": 10 / 6, "max_rank_overload": 2.0, "rank_overload_of_sum": 10 / 6, "max_vio": 5 / 3 - 1}
    assert overloads([counts], [group]) == [pytest.approx(both)]


@on_ranks(2)
def test_unequal_numbers_of_layers(rank: int) -> None:
    with pytest.raises(ValueError, match="^ranks count 1 to 2 MoE layers; give Metrics as many layers on every rank of the job$"):
        overloads([torch.ones(1, 2)] * (1 + rank), [(rank, 1)] * (1 + rank))


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_any_rows(data: st.DataObject) -> None:
    num_ranks, num_calls, num_local = (data.draw(st.integers(1, 4)) for _ in range(3))
    rows = data.draw(st.lists(st.integers(0, 50), min_size=num_ranks * num_calls * num_local, max_size=num_ranks * num_calls * num_local))
    calls = np.array(rows).reshape(num_ranks, num_calls, num_local)
    values = one_layer(calls.tolist())
    if not calls.any():
        assert values == {}
        return
    most = mean = most_expert = largest = 0.0
    for call in range(num_calls):
        of_ranks = [int(sum(calls[rank, call])) for rank in range(num_ranks)]
        most, mean = most + max(of_ranks), mean + sum(of_ranks) / num_ranks
        most_expert += max(int(of) for rank in range(num_ranks) for of in calls[rank, call])
        if sum(of_ranks):
            largest = max(largest, max(of_ranks) * num_ranks / sum(of_ranks))
    of_sum = max(int(calls[rank].sum()) for rank in range(num_ranks)) / mean
    expected = {"rank_overload": most / mean, "max_rank_overload": largest, "rank_overload_of_sum": of_sum}
    assert values == pytest.approx(expected | {"max_vio": most_expert / (mean / num_local) - 1})
    assert 1 - 1e-9 <= values["rank_overload_of_sum"] <= values["rank_overload"] + 1e-9 <= values["max_rank_overload"] + 2e-9


def test_the_latest_forwards_are_kept():
    metrics = LayerMetrics(2)
    for num_calls in (3, NUM_CALLS, NUM_CALLS + 5, 0, 2 * NUM_CALLS):
        for call in range(num_calls):
            metrics.count(torch.tensor([call, 1]))
        rows, _, calls = metrics.take()
        kept = range(max(num_calls - NUM_CALLS, 0), num_calls)
        assert rows.tolist() == [sum(range(num_calls)), num_calls] and calls.tolist() == [[call, 1] for call in kept]


@on_ranks(2)
def test_overload_and_trace_of_layers(rank: int, tmp_path: Path) -> None:
    """All tokens go to rank 0, then all to rank 1. The trace of both ranks has the rows."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DEEPEP_MOE_TRACE", str(tmp_path / "trace"))
        model = torch.nn.Sequential(*(MoELayer(Router(16, 4, 2, expert_bias=True), GroupedExperts(2, 16, 8)) for _ in range(2)))
        metrics = Metrics(model)
    for layer in model:
        layer.router.expert_bias.copy_(torch.tensor([9.0, 9.0, 0.0, 0.0]))
    model(torch.randn(3, 16))
    scalars = metrics.write(0)
    assert [scalars[f"deepep_moe/layer_2/{name}"] for name in ("rank_overload", "max_rank_overload", "max_vio")] == [2.0, 2.0, 1.0]
    for bias in ([9.0, 9.0, 0.0, 0.0], [0.0, 0.0, 9.0, 9.0]):
        model[1].router.expert_bias.copy_(torch.tensor(bias))
        model(torch.randn(3, 16))
    reports = metrics.take()
    assert [(report.rank_overload, report.rank_overload_of_sum, report.max_vio) for report in reports] == [(2.0, 2.0, 1.0), (2.0, 1.0, 1.0)]
    assert metrics.take()[0].rank_overload == 0.0
    dist.barrier()
    counts = np.stack([np.load(name) for name in sorted(glob.glob(f"{tmp_path}/trace/*.npy"))], 2)  # calls, layers, ranks, experts
    assert counts.dtype == np.int32 and counts.shape == (3, 2, 2, 2)
    assert counts[:, 0].tolist() == [[[6, 6], [0, 0]]] * 3 and counts[:, 1].tolist() == [[[6, 6], [0, 0]]] * 2 + [[[0, 0], [6, 6]]]
    of_ranks = counts[1:].sum(3)
    assert (of_ranks.max(2).sum(0) / of_ranks.mean(2).sum(0)).tolist() == [report.rank_overload for report in reports]


def test_a_trace_grows_and_layers_of_other_sizes_get_another_file(tmp_path):
    trace = RoutingTrace(tmp_path / "new", 3)
    trace.write([torch.tensor([[1, 2]]), torch.zeros(0, 5)])
    trace.write([])
    trace.write([torch.tensor([[3, 4], [5, 6]])])
    assert np.load(tmp_path / "new" / "rank00003.npy").tolist() == [[[1, 2]], [[3, 4]], [[5, 6]]]
    trace.write([torch.tensor([[7, 8]]), torch.tensor([[9], [10]])])
    assert np.load(tmp_path / "new" / "rank00003-2.npy").tolist() == [[[7, 8], [9, 0]], [[0, 0], [10, 0]]]
    RoutingTrace(tmp_path / "new", 3).write([torch.tensor([[1, 1]])])
    trace.write([torch.tensor([[2, 3]]), torch.tensor([[4]])])
    assert np.load(tmp_path / "new" / "rank00003-3.npy").tolist() == [[[1, 1]]], "a second trace has files of its own"
    assert np.load(tmp_path / "new" / "rank00003-2.npy").tolist() == [[[7, 8], [9, 0]], [[0, 0], [10, 0]], [[2, 3], [4, 0]]]
    writers._num_files.clear()
    RoutingTrace(tmp_path / "new", 3).write([torch.tensor([[1]])])
    assert np.load(tmp_path / "new" / "rank00003.npy").tolist() == [[[1]]], "a new run begins its file anew"


def test_a_trace_whose_job_ends_in_a_write_can_be_read(tmp_path, monkeypatch):
    trace = RoutingTrace(tmp_path, 0)
    trace.write([torch.tensor([[1, 2]])])
    with monkeypatch.context() as patch, pytest.raises(OSError, match="no space"):
        patch.setattr(writers, "_header", mock.Mock(side_effect=OSError("no space")))
        trace.write([torch.tensor([[3, 4], [5, 6]])])
    assert np.load(trace.path).tolist() == [[[1, 2]]]
    trace.write([torch.tensor([[7, 8]])])
    assert np.load(trace.path).tolist() == [[[1, 2]], [[7, 8]]]
