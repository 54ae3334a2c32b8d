"""Passes from a CUDA graph in the benchmarks of layers: on a fake of CUDA what is captured, on a GPU the bits."""

import argparse
import contextlib
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from benchmarks.layers import fp8, fp8_layers, megatron_steps
from benchmarks.layers.graphs import Graphed
from deepep_moe.testing import run_ranks


class FakeGraph:
    """A graph whose replay is only counted."""

    def __init__(self):
        self.num_replays = 0

    def replay(self):
        self.num_replays += 1


@pytest.fixture
def events(monkeypatch):
    """Replace CUDA by a fake that tells when a capture begins and ends."""
    seen = []

    @contextlib.contextmanager
    def graph(_, capture_error_mode):
        seen.append("begin")
        yield
        seen.append("end")

    @contextlib.contextmanager
    def stream(_):
        seen.append("side stream")
        yield
        seen.append("first stream")

    fakes = {
        "CUDAGraph": FakeGraph, "graph": graph, "stream": stream, "Stream": lambda: SimpleNamespace(wait_stream=lambda _: None),
        "current_stream": lambda: SimpleNamespace(wait_stream=lambda _: None), "synchronize": lambda *_: None,
        "memory_allocated": lambda: 100, "reset_peak_memory_stats": lambda: seen.append("reset"), "max_memory_allocated": lambda: 350,
    }  # fmt: skip
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    return seen


def layer_of(events, weight, *, fails=False):
    """A layer of three micro-batches that tells what it does."""

    def run(is_first):
        events.append("first" if is_first else "next")
        if fails and "begin" in events:
            raise RuntimeError("cannot be captured")
        return weight * 2

    return fp8_layers.Layer(
        run,
        torch.ones(2),
        {"weight": weight},
        backend="nvlink",
        which=lambda number: number % 3 == 0,
        release=lambda: events.append("drop"),
    )


def test_what_is_captured(events):
    """Run all micro-batches of a step; the first makes copies of the weights."""
    weight = torch.ones(2, requires_grad=True)
    graph = Graphed(layer_of(events, weight), 3)
    warm_up = ["drop", "side stream", "first", "next", "next", "first stream", "drop"]
    assert events == [*warm_up, "reset", "begin", "first", "next", "next", "end", "drop"]
    assert graph.peak_bytes == 250 and weight.grad is None, "the layer keeps nothing of the graph"
    results = graph.results()
    assert list(results) == ["output", "weight"] and graph._graph.num_replays == 1
    assert all(value.isnan().all() for value in results.values()), "only a replay writes them"


def test_a_replay_counts_as_its_passes(events, monkeypatch):
    """Two replays of three passes: 60 us by the clock and 6 us of the host are 10 us and 1 us a pass."""
    graph = Graphed(layer_of(events, torch.ones(2, requires_grad=True)), 3)
    clock = iter([0.0, 6e-6, 60e-6])
    monkeypatch.setattr(megatron_steps.time, "perf_counter", lambda: next(clock))
    monkeypatch.setattr(dist, "barrier", lambda: None)
    times = megatron_steps.time_step(graph, torch.device("cpu"), num_passes=6)
    assert graph._graph.num_replays == 2
    assert times.wall == pytest.approx(10.0) and times.host == pytest.approx(1.0) and times.kernels is None


def test_a_capture_that_fails_keeps_nothing(events):
    weight = torch.ones(2, requires_grad=True)
    layer = layer_of(events, weight, fails=True)
    with pytest.raises(RuntimeError, match="cannot be captured"):
        Graphed(layer, 3)
    assert events[-2:] == ["first", "drop"] and weight.grad is None and layer._output is None


@pytest.mark.parametrize("micro_batches, num_passes", ((1, 4), (3, 6), (4, 4), (8, 8)))
def test_chains_are_whole_steps(micro_batches, num_passes):
    assert fp8._chain_of(argparse.Namespace(micro_batches=micro_batches)) == num_passes


def graphs_of_layers(rank, num_ranks):
    torch.cuda.set_device(rank)
    device = torch.device("cuda", rank)
    options = argparse.Namespace(num_tokens=256, hidden=512, ffn_hidden=256, num_topk=2, num_experts=4, micro_batches=3, backend="nvlink")
    layers, wire = fp8_layers.make_layers(options, rank, num_ranks, device)
    measured = fp8.Measured("nvlink", "", "", "", wire, {}, 0)
    graphs = fp8._add_graphs(measured, layers, device, options.micro_batches)
    assert list(graphs) == list(fp8_layers.GRAPHS[:3]), measured.not_captured
    assert list(measured.not_captured) == [fp8_layers.GRAPHS[3]] and measured.num_different_from_eager == 0
    for _ in range(2):  # eager passes and replays take turns
        for step in (layers | graphs).values():
            times = megatron_steps.time_step(step, device, num_passes=3)
            assert 0 < times.host <= times.wall
    expected = layers[fp8_layers.EACH].results()
    for name in fp8_layers.GRAPHS[1:3]:
        for kind, value in graphs[name].results().items():
            assert torch.equal(value, expected[kind]), (name, kind)
        assert measured.peak_bytes[name] > 0
    kernels = megatron_steps.kernel_times(graphs[fp8_layers.GRAPHS[2]], 3)
    assert any("quantize_weights" in kernel for kernel in kernels), "copies are made in the graph"


@pytest.mark.parametrize("num_ranks", (pytest.param(1, marks=pytest.mark.gpu), pytest.param(2, marks=pytest.mark.multi_gpu(2))))
def test_layers_in_a_cuda_graph(num_ranks):
    run_ranks(graphs_of_layers, num_ranks)
