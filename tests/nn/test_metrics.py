"""Metrics of MoE layers and the files that they go to."""

import copy
import json
import sys
import threading

import pytest
import torch
import torch.distributed as dist
from on_ranks import on_ranks
from torch.utils.checkpoint import checkpoint

from deepep_moe.nn import EventFile, GroupedExperts, JsonLines, Metrics, MoELayer, Router, SwiGLU
from deepep_moe.nn.metrics import LayerMetrics


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


@pytest.mark.parametrize("use_reentrant", (True, False))
def test_a_checkpoint_counts_a_forward_once(use_reentrant):
    model, x = layers(1), torch.randn(3, 16, requires_grad=True)
    metrics = Metrics(model)
    checkpoint(model, x, use_reentrant=use_reentrant).sum().backward()
    assert [report.rows_per_expert for report in metrics.take()] == [[3, 3, 0, 0]] * 2


def test_serving_in_and_out_of_inference_mode():
    model, x = layers(1).eval(), torch.randn(3, 16)
    metrics = Metrics(model)
    for _ in range(2):
        with torch.inference_mode():
            model(x)
        with torch.no_grad():
            model(x)
        assert [report.rows_per_expert for report in metrics.take()] == [[6, 6, 0, 0]] * 2


def test_a_copy_of_a_layer_counts_anew():
    metrics, event = LayerMetrics(2, serves=True), threading.Lock()  # an event of a GPU cannot be copied either
    metrics.count(torch.tensor([1, 2]))
    metrics._events.append((event, event))
    copied = copy.deepcopy(metrics)
    assert copied.counts(torch.nn.Linear(2, 2).eval()) and copied.take()[0].tolist() == [0, 0]


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
