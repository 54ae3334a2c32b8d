"""The benchmark of a layer with fp8 experts: its records, bytes and checks, on the CPU."""

import argparse
import json

import pytest
import torch
from bench_cases import RECORD_FIELDS, bench
from on_ranks import on_ranks

from benchmarks.layers import fp8, fp8_layers, megatron_steps
from benchmarks.layers.fp8 import Measured
from benchmarks.layers.fp8_layers import BF16, BF16_GRAPH, EACH, GRAPHS, SHARED, Wire, graph_of
from benchmarks.layers.passes import StepTimes
from deepep_moe.testing import run_ranks

SIZES = ["--num-tokens", "48", "--hidden", "128", "--ffn-hidden", "128", "--num-topk", "2", "--num-experts", "4", "--repeats", "1"]


def options_of(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    fp8.add_arguments(parser)
    return parser.parse_args(arguments, argparse.Namespace(bind=False, json=None))


def test_records(tmp_path):
    path = tmp_path / "fp8.json"
    done = bench("--device", "cpu", "--num-ranks", "2", *SIZES, "--micro-batches", "3", "--json", str(path), command="fp8")
    assert done.returncode == 0, done.stdout + done.stderr
    records = json.loads(path.read_text())
    assert [(each["op"], each["rival"]) for each in records] == [(f"fp8 layer {name}", BF16) for name in (EACH, SHARED)]
    for each in records:
        assert set(each) >= RECORD_FIELDS and each["num_ranks"] == 2 and each["wire"]["row_bytes"] == {"fp8": 132, "bf16": 256}
        assert 48 <= each["wire"]["rows"] <= 96 and each["host_us"] > 0 and each["kernel_us"] is None
        assert 0.01 < each["differences"]["output"] < 0.12 and each["rival_versions"].endswith("TransformerEngine needs a GPU")
    # Two bytes and the scales of two of the four experts' parameters.
    parameters = 2 * 3 * 128 * 128
    assert [each["kept_bytes"] for each in records] == [0, 2 * parameters + 8 * parameters // 128**2]
    assert [each["micro_batches"] for each in records] == [None, 3]
    rows = [line for line in done.stdout.splitlines() if "not captured: " in line]
    assert rows == [f"{name}: not captured: CUDA graphs need a GPU" for name in GRAPHS] and len(rows) == 3
    assert records[0]["not_captured"] == dict.fromkeys(GRAPHS, "CUDA graphs need a GPU")


def measured(names):
    times = {name: [StepTimes(100.0 * (i + 1), 50.0)] for i, name in enumerate(names)}
    return Measured(
        "nvlink", "a GPU", "versions", "TransformerEngine 2", Wire(1, 1, 2), {EACH: {"output": 0.05}}, 0, times,
        {name: {"a_kernel": 7.0, "another": 3.0} for name in names}, dict.fromkeys(names, 10**9), 5,
    )  # fmt: skip


def test_graphs_that_change_results(monkeypatch, tmp_path):
    first = measured((BF16, EACH, SHARED))
    first.num_different_from_eager = 2
    monkeypatch.setattr(fp8, "run_ranks", lambda *_, **__: [first])
    options = options_of("--device", "cpu")
    options.json = tmp_path / "fp8.json"
    with pytest.raises(SystemExit, match="^2 results differ between passes and their CUDA graphs$"):
        fp8.main(options)
    assert json.loads((tmp_path / "fp8.json").read_text())


def captures_on_rank_0_only(rank, num_ranks):
    class Fake:
        def __init__(self, layer, num_passes):
            if rank == 1:
                try:
                    raise ValueError("no room")
                finally:
                    raise RuntimeError("the capture is invalid")

    fp8.Graphed = Fake
    weight = torch.ones(3, requires_grad=True)
    layer = fp8_layers.Layer(lambda _: 2 * weight, torch.ones(3), {"weight": weight}, backend="nvlink")
    return fp8._capture(layer, torch.device("cuda"), 4)


def test_a_capture_that_fails_on_one_rank():
    """No rank replays then, as a replay would wait for its peers for ever."""
    why = "RuntimeError: the capture is invalid; before that: ValueError: no room"
    assert run_ranks(captures_on_rank_0_only, 2) == [(None, f"rank 1: {why}"), (None, why)]


def graphs_of_which_one_is_wrong(rank, num_ranks):
    class Fake:
        peak_bytes = 3

        def __init__(self, layer, num_passes):
            self.values = layer.results()
            if layer is layers[EACH]:
                self.values["weight"] = self.values["weight"] + 1

        def results(self):
            return self.values

    fp8.Graphed = Fake
    weight = torch.ones(3, requires_grad=True)
    layers = {
        name: fp8_layers.Layer(lambda _: 2 * weight, torch.ones(3), {"weight": weight}, backend="nvlink") for name in (BF16, EACH, SHARED)
    }
    measures = measured(())
    names = list(fp8._add_graphs(measures, layers, torch.device("cuda"), 4))
    return names, measures.not_captured, measures.num_different_from_eager, measures.peak_bytes


def test_graphs_are_compared_with_eager_passes():
    names = [BF16_GRAPH, graph_of(EACH), graph_of(SHARED)]
    expected = names, {}, 1, dict.fromkeys(names, 3)
    assert run_ranks(graphs_of_which_one_is_wrong, 1) == [expected]


def test_micro_batches_by_hand():
    """The first of each three passes is a first micro-batch; a release restarts the count."""
    seen, weight = [], torch.ones(1, requires_grad=True)

    def run(is_first):
        seen.append(is_first)
        return weight * 2

    layer = fp8_layers.Layer(run, torch.ones(1), {"weight": weight}, backend="shm", which=lambda number: number % 3 == 0)
    for _ in range(4):
        layer.forward()
    layer.release()
    layer.forward()
    assert seen == [True, False, False, True, True]


@pytest.mark.parametrize(
    ("arguments", "message"),
    (
        ("--num-experts 3 --num-ranks 2", "--num-experts 3 must be a multiple of --num-ranks 2"),
        ("--num-topk 33", r"each of --num-topk \[33\] 1 to the experts"),
        ("--micro-batches 0", "--micro-batches 0 must be at least 1"),
        ("--device cuda", "--device cuda needs a GPU for each of 1 ranks, this machine has 0"),
    ),
)
def test_refusals(arguments, message, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(ValueError, match=message):
        fp8.resolve(options_of("--device", "cpu", *arguments.split()))


@pytest.mark.parametrize("micro_batches, num_passes", ((1, 4), (3, 6), (4, 4), (8, 8)))
def test_chains_are_whole_steps(micro_batches, num_passes):
    assert fp8._chain_of(argparse.Namespace(micro_batches=micro_batches)) == num_passes


@pytest.mark.parametrize("num_ranks", (pytest.param(1, marks=pytest.mark.gpu), pytest.param(2, marks=pytest.mark.multi_gpu(2))))
@on_ranks()
def test_layers_in_a_cuda_graph(rank, num_ranks):
    torch.cuda.set_device(rank)
    device = torch.device("cuda", rank)
    options = argparse.Namespace(num_tokens=256, hidden=512, ffn_hidden=256, num_topk=2, num_experts=4, micro_batches=3, backend="nvlink")
    layers, wire, _ = fp8_layers.make_layers(options, rank, num_ranks, device)
    measured = fp8.Measured("nvlink", "", "", "", wire, {}, 0)
    graphs = fp8._add_graphs(measured, layers, device, options.micro_batches)
    assert list(graphs) == list(fp8_layers.GRAPHS), measured.not_captured
    assert measured.not_captured == {} and measured.num_different_from_eager == 0
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
