"""The training example: it learns, both dispatchers learn the same, and it leaves the files it promises."""

import argparse
import importlib.util
import json

import pytest
from example_page import read_training
from megatron_cases import enabled
from scripts import ROOT, modules_of, run_python

from deepep_moe.nn.metrics import OVERLOADS
from deepep_moe.testing.launch import run_ranks

pytest.importorskip("megatron.core")
pytest.importorskip("matplotlib")

EXAMPLE = ROOT / "examples" / "megatron"
STEPS = 30


@pytest.mark.multi_gpu(2)
def test_example_on_gpus(tmp_path):
    options = "--device cuda --num-ranks 2 --steps 8 --compare alltoall"
    output = run_python(EXAMPLE / "train.py", *options.split(), "--out", tmp_path).stdout
    assert "nvlink" in output and "loss curves of deepep_moe and alltoall agree" in output


@pytest.mark.slow
def test_training_falls_below_unigram_entropy_and_equals_alltoall(tmp_path):
    output = run_python(EXAMPLE / "train.py", "--steps", STEPS, "--compare", "alltoall", "--timeline", "--out", tmp_path).stdout
    assert "loss curves of deepep_moe and alltoall agree" in output
    (entropy,) = {float(line.split()[-1]) for line in output.splitlines() if line.startswith("unigram entropy")}

    records, page, (ours, theirs) = read_training(tmp_path, "alltoall", STEPS)
    keys = {"step", "loss", "tokens_per_s", "dispatcher", "load", "scalars"}
    assert all(set(record) == keys and record["tokens_per_s"] > 0 for record in records)
    for record in records:
        assert [sum(load) for load in record["load"]] == [2 * 8 * 128 * 2] * 3  # ranks x sequences x length x top-2, of each MoE layer
        names = ("busiest_expert", "exchange_ms", "over_capacity", "repeats", "nodes_per_token", *OVERLOADS)
        of_layers = {f"deepep_moe/layer_{n}/{name}" for n in (2, 3, 4) for name in names}
        assert set(record["scalars"]) == {"seq_load_balancing_loss"} | (of_layers if record["dispatcher"] == "deepep_moe" else set())
    for layer, load in enumerate(records[0]["load"], start=2):
        assert records[0]["scalars"][f"deepep_moe/layer_{layer}/busiest_expert"] == pytest.approx(max(load) * len(load) / sum(load))
    assert sum(record["loss"] for record in records[STEPS - 5 : STEPS]) / 5 < entropy - 0.2
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert [(run["run"], run["num_steps"]) for run in summary] == [("deepep_moe", STEPS), ("alltoall", STEPS)]
    assert all(run["tokens_per_s_median"] > 0 and run["loss_last_10"] < 4 for run in summary)
    assert (ours["run"], theirs["run"], ours["steps"]) == ("deepep_moe", "alltoall", STEPS)
    assert len(page.pictures) == 4 and page.summary in output and "all steps are equal to the bit" in page.summary


def test_fp8_curves_need_more_steps_than_their_window():
    run_python(EXAMPLE / "fp8_curves.py", "--steps", 5, "--num-ranks", 1, code=2)


def _losses(rank: int, num_ranks: int, runs: list[dict]) -> list[list[float]]:
    (worker,) = modules_of(EXAMPLE, "worker")
    results = [worker.train(rank, num_ranks, worker.Settings(num_sequences=2, progress=False, **changes)) for changes in runs]
    return [result.losses if result else [] for result in results]


OURS = {"dispatcher": "deepep_moe", "experts": "own", "sync_free": True}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shared", "options"),
    [(False, {"interleave": True}), (True, {"shared_overlap": True, "recompute": True})],
    ids=("1F1B", "shared experts beside the calls, recomputed"),
)
def test_losses_with_every_option(shared, options):
    """Every bit is that of alltoall. Shared experts beside the calls change the order in which Megatron-Core adds gradients, so they are
    compared with alltoall that has them there too.

    30 steps have 360 backwards of grouped experts, and experts without a row in most of them. Where a gradient is scaled by 1.05, from the
    first step on or from the 26th, the loss after it has other bits.
    """
    if options.get("interleave") and not importlib.util.find_spec("megatron.core.models.common.model_chunk_schedule_plan"):
        pytest.skip("megatron-core before 0.14 has no such schedule")
    common = {"steps": 30, "gate": False, "seq_length": 32, "micro_batches": 2}
    runs = [common | {"dispatcher": "alltoall", "shared_overlap": shared}, common | OURS | options]
    theirs, ours = run_ranks(_losses, 2, runs, timeout_s=800)[0]
    assert ours == theirs
    assert sum(ours[-10:]) / 10 < 0.6 * ours[0]


def _graph_worker(rank: int, num_ranks: int, cuda_graph: bool) -> list[float]:
    (worker,) = modules_of(EXAMPLE, "worker")
    options = {"dtype": "bf16", "device": "cuda", "ep": 1, "cuda_graph": cuda_graph, "micro_batches": 2}
    result = worker.train(rank, num_ranks, worker.Settings(steps=8, progress=False, **OURS, **options))
    assert [sum(load) for load in result.load[-1]] == [8 * 128 * 2] * 3
    for scalars in result.scalars:
        assert scalars["seq_load_balancing_loss"] > 0 and scalars["deepep_moe/layer_2/busiest_expert"] >= 1
    return result.losses


@pytest.mark.gpu
def test_steps_from_a_graph():
    """Three steps without, five from the graph: the same training but for the order in which atomics add."""
    replayed, eager = (run_ranks(_graph_worker, 1, cuda_graph, timeout_s=200)[0] for cuda_graph in (True, False))
    assert replayed == pytest.approx(eager, rel=2e-2)
    assert replayed[-1] < replayed[0]


def test_readme_has_the_command_line_of_the_full_model():
    (config,) = modules_of(EXAMPLE, "config")
    assert config.pretrain_gpt_command() in (EXAMPLE / "README.md").read_text()
    arguments = config.pretrain_gpt_arguments()
    for flag, value in (("--num-experts", "256"), ("--moe-layer-freq", "([0]*3+[1]*58)"), ("--moe-flex-dispatcher-backend", "deepep_moe")):
        assert arguments[arguments.index(flag) + 1] == value
    assert all(arguments.count(flag) == 1 for flag in arguments if flag.startswith("--"))


def test_megatron_lm_parses_that_command_line():
    # Megatron-LM's training package comes with megatron-core from 0.17; the test of the choices in test_megatron_plugin.py needs none.
    training = pytest.importorskip("megatron.training.arguments", exc_type=ImportError)
    (config,) = modules_of(EXAMPLE, "config")
    with enabled():
        parser = training.add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
        parsed = parser.parse_args(config.pretrain_gpt_arguments())
    assert parsed.moe_flex_dispatcher_backend == "deepep_moe"
    assert (parsed.num_experts, parsed.moe_router_topk, sum(parsed.moe_layer_freq)) == (256, 8, 58)


def test_figures_of_a_timeline():
    """Two streams by hand: a dispatch of 4 ms with a product beside 3 of them, a combine alone, and a gap."""
    _, timeline = modules_of(EXAMPLE, "worker", "timeline")
    dispatch, combine = ("void deepep_moe::(anonymous namespace)::" + name for name in ("dispatch<deepep_moe::BulkRing>", "combine<1>"))
    kernels = [
        timeline.Kernel(dispatch, 7, 0.0, 4.0),
        timeline.Kernel("nvjet_sm90", 8, 1.0, 2.5),
        timeline.Kernel("elementwise", 8, 2.0, 4.0),
        timeline.Kernel(combine, 7, 6.0, 8.0),
    ]
    seen = timeline.Timeline(kernels, num_steps=2, num_waits=0)
    assert [kernel.kind for kernel in kernels] == ["dispatch", "products", "other", "combine"]
    assert (seen.exchange_ms, seen.hidden(), seen.busy) == (3.0, 0.5, 0.75)
    figures = {"gpu_busy": 0.75, "exchange_ms": 3.0, "exchange_hidden": 0.5, "host_waits": 0}
    assert seen.figures() == figures | {"dispatch_hidden": 0.75, "combine_hidden": 0.0}
    nothing = timeline.Timeline(kernels[1:3], num_steps=1, num_waits=0)
    assert (nothing.exchange_ms, nothing.hidden()) == (0.0, 0.0)
