"""The benchmark of a layer with fp8 experts: its records, bytes and checks, on the CPU."""

import argparse
import json

import pytest
import torch
from bench_cases import RECORD_FIELDS, bench

from benchmarks.layers import fp8, fp8_layers
from benchmarks.layers.fp8 import Measured
from benchmarks.layers.fp8_layers import BF16, BF16_GRAPH, EACH, GRAPHS, KEPT, SHARED, Wire, graph_of
from benchmarks.layers.passes import StepTimes, draw_inputs
from deepep_moe.testing import run_ranks

SIZES = ["--num-tokens", "48", "--hidden", "128", "--ffn-hidden", "128", "--num-topk", "2", "--num-experts", "4", "--repeats", "1"]


def options_of(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    fp8.add_arguments(parser)
    return parser.parse_args(arguments, argparse.Namespace(bind=False, json=None))


def test_bytes_by_hand():
    """A row of 7168 columns has 56 scales of 4 bytes."""
    wire = Wire(num_rows=3, fp8_bytes=7168 + 4 * 56, bf16_bytes=2 * 7168)
    assert wire.ratio == pytest.approx(0.515625)
    found = wire.of_record()
    assert found["dispatch_bytes"] == found["combine_gradient_bytes"] == {"fp8": 3 * 7392, "bf16": 3 * 14336}


def test_records(tmp_path):
    path = tmp_path / "fp8.json"
    done = bench("--device", "cpu", "--num-ranks", "2", *SIZES, "--micro-batches", "3", "--json", str(path), command="fp8")
    assert done.returncode == 0, done.stdout + done.stderr
    records = json.loads(path.read_text())
    assert [(each["op"], each["rival"]) for each in records] == [(f"fp8 layer {name}", BF16) for name in (EACH, SHARED, KEPT)]
    for each in records:
        assert set(each) >= RECORD_FIELDS and each["num_ranks"] == 2 and each["wire"]["row_bytes"] == {"fp8": 132, "bf16": 256}
        assert 48 <= each["wire"]["rows"] <= 96 and each["host_us"] > 0 and each["kernel_us"] is None
        assert 0.01 < each["differences"]["output"] < 0.12 and each["rival_versions"].endswith("TransformerEngine needs a GPU")
    # Two bytes and the scales of two of the four experts' parameters.
    parameters = 2 * 3 * 128 * 128
    assert [each["kept_bytes"] for each in records] == [0, *[2 * parameters + 8 * parameters // 128**2] * 2]
    assert [each["micro_batches"] for each in records] == [None, 3, None]
    rows = [line for line in done.stdout.splitlines() if "not captured: " in line]
    assert len(rows) == len(GRAPHS) == 4, "each layer that has no graph has a row"
    for name, row in zip(GRAPHS, rows, strict=True):
        why = "copies made outside of a graph serve no forward" if name == graph_of(KEPT) else "CUDA graphs need a GPU"
        assert row.startswith(name) and why in row and why in records[0]["not_captured"][name]


def measured(names):
    times = {name: [StepTimes(100.0 * (i + 1), 50.0, None)] for i, name in enumerate(names)}
    return Measured(
        "nvlink", "a GPU", "versions", "TransformerEngine 2", Wire(1, 1, 2), {EACH: {"output": 0.05}}, 0, times,
        {name: {"a_kernel": 7.0, "another": 3.0} for name in names}, dict.fromkeys(names, 10**9), 5,
    )  # fmt: skip


def test_table_and_records(capsys):
    """Ours in fp8, and each graph, is compared with ours in bf16, eager and graphed, and with each layer of TransformerEngine."""
    options = argparse.Namespace(num_tokens=1, hidden=128, num_topk=1, num_experts=1, ffn_hidden=128, micro_batches=4, kernels=1)
    captured = BF16_GRAPH, graph_of(EACH), graph_of(SHARED)
    theirs = fp8_layers.TE_BF16, fp8_layers.TE_EACH, fp8_layers.TE_SHARED, fp8_layers.TE_PADDED
    first = measured((BF16, EACH, SHARED, KEPT, *captured, *theirs))  # 100 us, 200 us, ..., 1100 us
    first.not_captured[graph_of(KEPT)] = "no kernel"
    records = fp8.records_of([first], options)
    fp8.show([first], records, options)
    shown = capsys.readouterr().out
    assert "a_kernel" in shown and "another" not in shown and "0.5000x" in shown
    lines = shown.splitlines()
    rows = [line for line in lines if line.startswith(f"fp8 layer {BF16_GRAPH}  ")]
    assert rows[0].split()[-1 - len(BF16.split())] == "0.20x"
    assert f"{graph_of(KEPT)}: not captured: no kernel" in lines
    assert any(line.startswith("CUDA graphs of 4 forwards and backwards") for line in lines)
    found = {(each["op"].removeprefix("fp8 layer "), each["rival"]): each for each in records}
    assert len(records) == len(found) == 6 * 6 - 1 and {name for name, _ in found} == {EACH, SHARED, KEPT, *captured}
    of_graph, of_bf16, eager = found[graph_of(SHARED), BF16_GRAPH], found[BF16_GRAPH, BF16], found[SHARED, fp8_layers.TE_SHARED]
    assert (of_graph["ratio"], of_graph["host_us"], of_graph["kernel_us"]) == (pytest.approx(5 / 7), 50.0, 10.0)
    assert of_graph["micro_batches"] == of_graph["graph_passes"] == of_graph["rival_graph_passes"] == 4 and of_graph["kept_bytes"] == 5
    assert of_bf16["dtype"] == "bfloat16" and of_bf16["differences"] is None and of_bf16["bytes_moved"] == 1 * (2 + 2) * 2
    assert of_bf16["graph_passes"] == 4 and of_bf16["rival_graph_passes"] is None and of_bf16["kept_bytes"] == 0
    assert of_bf16["not_captured"] == {graph_of(KEPT): "no kernel"}
    assert eager["graph_passes"] is None and eager["ratio"] == pytest.approx(10 / 3)


def test_graphs_that_change_results(monkeypatch, tmp_path):
    first = measured((BF16, EACH, SHARED, KEPT))
    first.num_different_from_eager = 2
    monkeypatch.setattr(fp8, "run_ranks", lambda *_, **__: [first])
    options = options_of("--device", "cpu", "--kernels", "0")
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
            self.found = layer.results()
            if layer is layers[EACH]:
                self.found["weight"] = self.found["weight"] + 1

        def results(self):
            return self.found

    fp8.Graphed = Fake
    weight = torch.ones(3, requires_grad=True)
    why = {KEPT: "copies are outside"}
    layers = {
        name: fp8_layers.Layer(lambda _: 2 * weight, torch.ones(3), {"weight": weight}, backend="nvlink", why_no_graph=why.get(name, ""))
        for name in (BF16, EACH, SHARED, KEPT)
    }
    found = measured(())
    names = list(fp8._add_graphs(found, layers, torch.device("cuda"), 4))
    return names, found.not_captured, found.num_different_from_eager, found.peak_bytes


def test_graphs_are_compared_with_eager_passes():
    names = [BF16_GRAPH, graph_of(EACH), graph_of(SHARED)]
    expected = names, {graph_of(KEPT): "copies are outside"}, 1, dict.fromkeys(names, 3)
    assert run_ranks(graphs_of_which_one_is_wrong, 1) == [expected]


@pytest.mark.parametrize(
    "fails, fused, told",
    (
        ((), [True], "SwiGLU fused"),
        ((fp8_layers.TE_PADDED,), [True], "SwiGLU fused; alltoall, TE fp8, router pads failed with RuntimeError: no such kernel"),
        ((fp8_layers.TE_EACH,), [True, False], "SwiGLU not fused; alltoall, TE fp8 failed with RuntimeError: no such kernel"),
    ),
)
def test_rivals_are_fused_where_they_can_be(fails, fused, told, monkeypatch):
    """The layer whose router pads may fail by itself."""
    weight, tries = torch.ones(3, requires_grad=True), []

    def make(*_, fuses):
        def run(name):
            if fuses and name in fails:
                raise RuntimeError("no such kernel")
            return 2 * weight

        tries.append(fuses)
        names = fp8_layers.TE_BF16, fp8_layers.TE_EACH, fp8_layers.TE_PADDED
        return {
            name: fp8_layers.Layer(lambda _, name=name: run(name), torch.ones(3), {"weight": weight}, backend="alltoall") for name in names
        }

    monkeypatch.setattr(fp8_layers, "_make_rivals", make)
    monkeypatch.setattr(torch.compiler, "set_stance", lambda stance: None)
    found, how = fp8_layers.make_rivals(None, 0, 1, torch.device("cpu"))
    assert tries == fused and how == told
    assert len(found) == (2 if fails == (fp8_layers.TE_PADDED,) else 3), "a layer that fails is left out"


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
    ("arguments", "told"),
    (
        ("--num-experts 3 --num-ranks 2", "--num-experts 3 must be a multiple of --num-ranks 2"),
        ("--num-topk 33", r"each of --num-topk \[33\] 1 to the experts"),
        ("--micro-batches 0", "--micro-batches 0 must be at least 1"),
        ("--device cuda", "--device cuda needs a GPU for each of 1 ranks, this machine has 0"),
    ),
)
def test_refusals(arguments, told, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(SystemExit, match=told):
        fp8.main(options_of("--device", "cpu", *arguments.split()))


def test_inputs_are_no_routers_weights():
    """Layers are drawn from small seeds. A row of x that equals a router's row gets a probability of 1, and 0 for all other experts."""
    for rank in range(8):
        x, cotangent = draw_inputs(rank, (4, 8), torch.device("cpu"), torch.float32)
        assert x.requires_grad and not cotangent.requires_grad and not torch.equal(x, cotangent)
        for seed in range(64):
            drawn = torch.randn(4, 8, generator=torch.Generator().manual_seed(seed))
            assert not torch.equal(drawn, x) and not torch.equal(drawn, cotangent)
