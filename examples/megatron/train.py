"""Train a small DeepSeek-V3 with Megatron-Core on CPU ranks or GPUs, its tokens moved by deepep_moe.

python examples/megatron/train.py                      # two ranks, a minute or two, writes runs/demo
python examples/megatron/train.py --compare alltoall   # then the same with Megatron-Core's own dispatcher; the curves must agree
python examples/megatron/train.py --sweep              # with each option of ours in turn: one table
python examples/megatron/train.py --device cuda        # on all GPUs of this machine, in bf16, each step from a CUDA graph
torchrun --nnodes 2 ... examples/megatron/train.py --device cuda    # on those of several (README.md)
"""

import argparse
import dataclasses
import importlib.util
import os
import sys
from pathlib import Path

import config
import numpy as np
import torch
import worker

from deepep_moe.integrations.megatron.options import EXPERTS
from deepep_moe.topology.binding import add_bind
from deepep_moe.tune.records import cpu_name

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "common"))

import data
import launch
import pages
import parts
import report

# Rounding apart, another dispatcher must not change training. One fp32 rounding of a loss near 5 is 5e-7. In bf16 a last bit soon changes
# which experts some tokens go to, and training makes another run of that; so the first ten steps are compared.
_COMPARED = {"fp32": (None, 1e-4), "bf16": (10, 1e-2)}  # steps, and by how much their losses may differ


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    defaults = worker.Settings()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dispatcher", choices=config.DISPATCHERS, default=defaults.dispatcher)
    parser.add_argument("--compare", choices=config.DISPATCHERS, help="train again with this dispatcher and compare the loss curves")
    parser.add_argument("--device", choices=("cpu", "cuda"), default=defaults.device)
    parser.add_argument(
        "--model", choices=("tiny", "small"), default=defaults.model, help="small: layers of real width, for a GPU of 80 GB"
    )
    parser.add_argument("--dtype", choices=tuple(config.DTYPES), help="of weights and activations (default: fp32 on CPUs, bf16 on GPUs)")
    parser.add_argument("--backend", default=defaults.backend, help="backend of deepep_moe: auto, shm, nvlink, collective, ...")
    parser.add_argument("--ranks-per-node", type=int, help="consecutive ranks that are a node, such as 1 (default: those of a host)")
    parser.add_argument(
        "--gate",
        action=argparse.BooleanOptionalAction,
        help="deepep_moe routes too (default: without --compare: it rounds last bits in its own way, which training amplifies)",
    )
    switch = {"action": argparse.BooleanOptionalAction}
    on_gpus = "(default: on GPUs in bf16)"
    parser.add_argument(
        "--experts",
        choices=EXPERTS,
        help="own: deepep_moe's, all of a layer at once (default: own on GPUs in bf16, else auto)",
    )
    parser.add_argument("--fp8-experts", action="store_true", help="rows travel and are multiplied as fp8 (with --experts own, in bf16)")
    parser.add_argument("--sync-free", **switch, help=f"the host waits for nothing in MoE layers (with --experts own) {on_gpus}")
    parser.add_argument("--cuda-graph", **switch, help=f"a step's forward and backward from a CUDA graph (with --sync-free) {on_gpus}")
    parser.add_argument("--recv-capacity-factor", type=float, help="with --sync-free, room for that many times an even share of all rows")
    parser.add_argument("--shared-overlap", action="store_true", help="the shared expert runs beside dispatch and combine")
    parser.add_argument("--shared-width", type=int, help="columns inside the shared expert, another number than the model's")
    parser.add_argument("--expert-width", type=int, help="columns inside each expert; --fp8-experts needs a multiple of 128 (tiny has 96)")
    parser.add_argument("--max-sms", type=int, help="on GPUs, the most SMs that a call takes, so that others run beside it (default: all)")
    parser.add_argument("--recompute", action="store_true", help="MoE layers run again in the backward, along their handles")
    parser.add_argument("--interleave", action="store_true", help="1F1B: a micro batch's forward beside the backward of the one before")
    parser.add_argument("--micro-batches", type=int, default=None, help="parts of a step's sequences (default: 1, with --interleave 2)")
    parser.add_argument("--sweep", action="store_true", help="train with each of these options in turn, and with alltoall; one table")
    parser.add_argument("--tensorboard", metavar="FOLDER", help="write Megatron-Core's scalars of MoE layers, and ours, there")
    parser.add_argument("--timeline", action="store_true", help="profile two more steps at the end and draw what ran when")
    parser.add_argument("--num-ranks", type=int, help="default: 2 on the CPU, else all GPUs; a launcher's ranks")
    parser.add_argument(
        "--share-gpus",
        action="store_true",
        dest="shares_gpus",
        help="ranks share the GPUs there are; other sums go over gloo, and are slow",
    )
    parser.add_argument("--ep", type=int, help="expert-parallel size (default: all ranks, divided by --etp)")
    parser.add_argument("--tp", type=int, default=1, help="tensor-parallel size (with sequence parallelism)")
    parser.add_argument("--etp", type=int, default=1, help="tensor-parallel size inside experts")
    parser.add_argument("--steps", type=int, default=defaults.steps)
    parser.add_argument("--seed", type=int, default=defaults.seed)
    parser.add_argument("--lr", type=float, help="default: 3e-3, with --model small 3e-4")
    parser.add_argument("--report-interval", type=int, help="steps between two reports of MoE layers (default: 1, on GPUs 10)")
    parser.add_argument("--out", type=Path, default=Path("runs/demo"), help="folder for metrics.jsonl and the plots")
    add_bind(parser)
    arguments = parser.parse_args(argv)
    _fill_in(arguments)
    launch.settle_ranks(parser, arguments)
    for name in ("num_ranks", "ep", "tp", "etp", "steps", "report_interval", "shared_width", "expert_width", "ranks_per_node"):
        value = getattr(arguments, name)
        if value is not None and value < 1:
            parser.error(f"--{name.replace('_', '-')} must be positive, got {value}")
    if arguments.ep is None:
        arguments.ep = max(1, arguments.num_ranks // arguments.etp)
    if arguments.num_ranks % arguments.tp or arguments.num_ranks % (arguments.ep * arguments.etp):
        parser.error(
            f"--num-ranks {arguments.num_ranks} must be a multiple of --tp {arguments.tp} and of "
            f"--ep {arguments.ep} x --etp {arguments.etp}"
        )
    num_experts = config.NUMBERS[arguments.model]["num_moe_experts"]
    if num_experts % arguments.ep:
        parser.error(f"--ep {arguments.ep} must divide the {num_experts} experts")
    if arguments.gate is None:
        arguments.gate = arguments.compare is None and not arguments.sweep
    _check_options(parser, arguments)
    if arguments.compare == arguments.dispatcher:
        parser.error(f"--compare {arguments.compare} is the dispatcher of the first run; choose another")
    return arguments


def _fill_in(arguments: argparse.Namespace) -> None:
    """Set the options whose defaults depend on others."""
    for name, value in config.TRAINING[arguments.model].items():
        if getattr(arguments, name, None) is None:
            setattr(arguments, name, value)
    if arguments.report_interval is None:
        arguments.report_interval = 10 if arguments.device == "cuda" else 1
    arguments.dtype = arguments.dtype or ("bf16" if arguments.device == "cuda" else "fp32")
    is_fast = arguments.device == "cuda" and arguments.dtype == "bf16" and arguments.dispatcher == "deepep_moe" and not arguments.sweep
    if arguments.experts is None:
        arguments.experts = "own" if is_fast else "auto"
    if arguments.sync_free is None:
        arguments.sync_free = is_fast and arguments.experts == "own"
    if arguments.cuda_graph is None:
        arguments.cuda_graph = is_fast and arguments.sync_free and not arguments.interleave and not arguments.shares_gpus
    if arguments.micro_batches is None:
        arguments.micro_batches = 2 if arguments.interleave or arguments.sweep else 1


def _check_options(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    num_sequences = arguments.num_sequences
    if arguments.micro_batches < 1 or num_sequences % arguments.micro_batches:
        parser.error(f"--micro-batches {arguments.micro_batches} must divide the {num_sequences} sequences of a step")
    if arguments.sync_free and arguments.experts != "own":
        parser.error("--sync-free needs --experts own: other experts read their counts on the host")
    if arguments.fp8_experts and not (arguments.experts == "own" and arguments.dtype == "bf16"):
        parser.error("--fp8-experts needs --experts own and --dtype bf16: their products take fp8 rows made of bf16 ones")
    if arguments.cuda_graph and (arguments.device != "cuda" or not arguments.sync_free or arguments.interleave):
        parser.error(
            "--cuda-graph needs --device cuda and --sync-free, and excludes --interleave: a graph holds one schedule without waits"
        )
    if arguments.cuda_graph and arguments.shares_gpus:
        parser.error("--cuda-graph excludes --share-gpus: no graph holds sums over gloo")
    for name in ("shared_overlap", "recompute"):
        if arguments.interleave and getattr(arguments, name):
            parser.error(f"--interleave and --{name.replace('_', '-')} exclude each other in Megatron-Core")
    if arguments.sweep and arguments.compare:
        parser.error("--sweep compares with alltoall itself; leave out --compare")
    if arguments.tensorboard and importlib.util.find_spec("tensorboard") is None:
        parser.error("--tensorboard needs the package tensorboard; pip install tensorboard")


def _plain(settings: worker.Settings, dispatcher: str) -> worker.Settings:
    """The same training by one of Megatron-Core's dispatchers, without options of ours. Shared experts stay beside the calls where that
    dispatcher can: it changes the order in which gradients are added."""
    overlaps = settings.shared_overlap and dispatcher == "alltoall"
    without = dict.fromkeys(("fp8_experts", "sync_free", "interleave", "cuda_graph"), False)
    return dataclasses.replace(settings, dispatcher=dispatcher, experts="framework", shared_overlap=overlaps, **without)


def _sweep(settings: worker.Settings) -> list[worker.Settings]:
    """alltoall, ours, and ours with one more option each time; then both with shared experts beside the calls."""
    plain = dataclasses.replace(settings, dispatcher="deepep_moe", experts="framework")
    grouped = dataclasses.replace(plain, experts="own")
    free = dataclasses.replace(grouped, sync_free=True)
    shared = dataclasses.replace(free, shared_overlap=True)
    options = [plain, grouped, free, dataclasses.replace(free, interleave=True), dataclasses.replace(free, recompute=True)]
    if settings.device == "cuda":
        options.append(dataclasses.replace(free, cuda_graph=True))
    return [_plain(plain, "alltoall"), *options, _plain(shared, "alltoall"), shared]


def run_all(runs: list[worker.Settings], arguments: argparse.Namespace) -> list[parts.Run]:
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # the profiler of the ranks prints no line for each of its stages
    if arguments.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # Megatron-Core would reach for a GPU it sees
    elif any(run.exact for run in runs):
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # what cuBLAS needs to compute the same bits in every run
    # Generous: the limit is for ranks that hang, not for slow machines.
    timeout_s = 300.0 + 20.0 * len(runs) * arguments.steps
    return launch.all_runs(worker.train, arguments.num_ranks, runs, timeout_s, device=arguments.device, bind=arguments.bind)


def settings_of(argv: list[str] | None) -> tuple[argparse.Namespace, worker.Settings]:
    """The command line's arguments, and what they say of a run."""
    arguments = _arguments(argv)
    fields = {field.name for field in dataclasses.fields(worker.Settings)}
    return arguments, worker.Settings(**{name: value for name, value in vars(arguments).items() if name in fields})


def main(argv: list[str] | None = None) -> int:
    """Exit code: 0, or 1 where the compared curves differ by more than the tolerance."""
    arguments, settings = settings_of(argv)
    entropy = data.unigram_entropy(data.load_corpus())
    runs = [settings] + ([_plain(settings, arguments.compare)] if arguments.compare else [])
    if arguments.sweep:
        runs = _sweep(settings)
    arguments.out.mkdir(parents=True, exist_ok=True)
    if launch.is_reporting():
        names = ", ".join(run.name for run in runs)
        print(f"training on {arguments.num_ranks} ranks, {arguments.steps} steps for each dispatcher: {names}", flush=True)
    with launch.joined(arguments.device, bind=arguments.bind):
        results = run_all(runs, arguments)
    return _report(arguments, runs, results, entropy) if launch.is_reporting() else 0


def _report(arguments: argparse.Namespace, runs: list[worker.Settings], results: list[parts.Run], entropy: float) -> int:
    """Write the files and print the tables. Return the exit code."""
    for result in results:  # a node that holds a part of an expert gets as many tokens as another one with that expert
        result.num_nodes = min(arguments.ep, launch.num_nodes(arguments.ep * arguments.etp, arguments.ranks_per_node))
    report.write_metrics(results, arguments.out / "metrics.jsonl")
    about = {"hardware": torch.cuda.get_device_name() if arguments.device == "cuda" else cpu_name(), "torch": torch.__version__}
    names = ("model", "dtype", "num_ranks", "ep", "micro_batches", "shared_width", "max_sms")
    about |= {name: value for name in names if (value := getattr(arguments, name)) is not None} | results[0].parts
    about |= launch.order(len(results), arguments.device)
    report.write_summary(results, arguments.out / "summary.json", op="example step", **about)
    for result in (result for result in results if result.timeline is not None):
        print(f"{result.name}: {np.median(result.tokens_per_s):,.0f} tokens/s; {result.timeline}")
    print(report.comparison(results) if arguments.sweep else report.table(results, entropy))
    print(parts.line_of(results[0].parts))
    print(f"wrote {arguments.out}/metrics.jsonl, summary.json")
    title = "A small DeepSeek-V3 trained with Megatron-Core"
    print(pages.write(title, results, entropy, arguments.out, {name: str(value) for name, value in about.items()}))
    if len(results) == 1:
        return 0
    num_steps, tolerance = _COMPARED[arguments.dtype]
    difference = max(report.differences(results, num_steps)) if arguments.sweep else report.max_difference(results, num_steps)
    verdict = "agree" if difference <= tolerance else "DIFFER"
    names = "alltoall and all runs of deepep_moe" if arguments.sweep else f"{runs[0].dispatcher} and {runs[1].dispatcher}"
    steps = f" in the first {num_steps} steps" if num_steps else ""
    print(f"loss curves of {names} {verdict}{steps}: max |difference| {difference:.2e}, allowed {tolerance:g}")
    return 0 if difference <= tolerance else 1


if __name__ == "__main__":
    sys.exit(main())
