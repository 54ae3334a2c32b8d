"""Train a small DeepSeek-V3 with DeepSpeed on CPU ranks or GPUs, with its MoE layers swapped and with its own, and exchange checkpoints.

python examples/deepspeed/train.py                     # two ranks, ZeRO-2, EP 2, a few minutes, writes runs/demo-deepspeed
python examples/deepspeed/train.py --no-compare        # the swapped layers only
python examples/deepspeed/train.py --device cuda       # on all GPUs of this machine
torchrun --nnodes 2 ... examples/deepspeed/train.py --device cuda --no-compare      # on those of several (README.md)
"""

import argparse
import dataclasses
import os
import sys
from pathlib import Path

import model
import numpy as np
import torch
import worker

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "common"))

import data
import launch
import pages
import parts
import report

from deepep_moe.topology.binding import add_bind
from deepep_moe.tune.records import cpu_name

# Bits of sums over rows differ where DeepSpeed pads, and routing amplifies a last bit: README.md says how far curves part.
_TOLERANCE = 0.03


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    defaults = worker.Settings()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compare", action=argparse.BooleanOptionalAction, default=True, help="train again with DeepSpeed's own layers")
    parser.add_argument("--device", choices=("cpu", "cuda"), default=defaults.device)
    parser.add_argument("--backend", default=defaults.backend, help="backend of deepep_moe: auto, shm, nvlink, collective, ...")
    parser.add_argument("--ranks-per-node", type=int, help="consecutive ranks that are a node, such as 1 (default: those of a host)")
    parser.add_argument("--exact", action=argparse.BooleanOptionalAction, default=defaults.exact, help="mode of deepep_moe")
    parser.add_argument(
        "--grouped-experts", action="store_true", default=None, help="run the experts of a rank at once instead of one by one"
    )
    parser.add_argument(
        "--fused-adam",
        action="store_true",
        help="DeepSpeed's FusedAdam instead of PyTorch's AdamW; DeepSpeed builds it, with nvcc and ninja",
    )
    parser.add_argument("--zero", type=int, choices=(0, 1, 2), default=defaults.zero, help="stage of ZeRO")
    parser.add_argument("--num-ranks", type=int, help="default: 2 on the CPU, else all GPUs; a launcher's ranks")
    parser.add_argument("--ep", type=int, help="expert-parallel size (default: all ranks)")
    parser.add_argument("--steps", type=int, default=defaults.steps)
    parser.add_argument("--seed", type=int, default=defaults.seed)
    parser.add_argument("--lr", type=float, default=defaults.lr)
    parser.add_argument("--out", type=Path, default=Path("runs/demo-deepspeed"), help="folder for metrics.jsonl, plots and checkpoints")
    add_bind(parser)
    arguments = parser.parse_args(argv)
    if arguments.fused_adam and arguments.device == "cpu":
        parser.error("--fused-adam needs --device cuda, as DeepSpeed's FusedAdam runs on GPUs only; leave it out")
    launch.settle_ranks(parser, arguments)
    if launch.is_launched() and arguments.compare:
        parser.error("a rank that a launcher has started serves one run, as DeepSpeed keeps its groups; give --no-compare")
    arguments.ep = arguments.num_ranks if arguments.ep is None else arguments.ep
    for name in ("num_ranks", "ep", "steps", "ranks_per_node"):
        if getattr(arguments, name) is not None and getattr(arguments, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be positive, got {getattr(arguments, name)}")
    if arguments.num_ranks % arguments.ep or model.Sizes().num_experts % arguments.ep:
        parser.error(f"--ep {arguments.ep} must divide --num-ranks {arguments.num_ranks} and the {model.Sizes().num_experts} experts")
    return arguments


def _cross(runs: list[worker.Settings], num_ranks: int, *, bind: bool) -> dict[tuple[str, str], float]:
    """Return the loss on the same text, by the run that saved and the run that loads."""
    losses = {}
    for saved in runs:
        for loads in runs:
            settings = dataclasses.replace(loads, checkpoint=saved.checkpoint)
            losses[saved.dispatcher, loads.dispatcher] = launch.on_ranks(worker.evaluate, num_ranks, settings, timeout_s=600, bind=bind)
    return losses


def _check_curves(results: list[report.Result]) -> bool:
    """Say how far the curves are apart. True where their ends agree."""
    ends = [float(np.mean(result.losses[-10:])) for result in results]
    agree = abs(ends[0] - ends[1]) <= _TOLERANCE
    verdict = "agree" if agree else "DIFFER"
    comparison = f"{verdict}: {report.agreement(results)}; last 10 steps {ends[0]:.4f} and {ends[1]:.4f}"
    print(f"loss curves of {results[0].name} and {results[1].name} {comparison}")
    return agree


def _check_checkpoints(losses: dict[tuple[str, str], float]) -> bool:
    """Say what both make of each checkpoint. True where both compute the same loss."""
    agree = True
    for (saved, loads), loss in losses.items():
        same = abs(loss - losses[saved, saved]) <= 1e-5
        agree = agree and same
        print(f"checkpoint saved by {saved:<10} loaded by {loads:<10} loss {loss:.6f}{'' if same else '  DIFFERS'}")
    return agree


def main(argv: list[str] | None = None) -> int:
    """Exit code: 0, or 1 where compared curves or checkpoints differ."""
    arguments = _arguments(argv)
    fields = {field.name for field in dataclasses.fields(worker.Settings)}
    settings = worker.Settings(**{name: value for name, value in vars(arguments).items() if name in fields})
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # the profiler of the ranks prints no line for each of its stages
    if settings.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # DeepSpeed would take a GPU it sees
    names = [worker.OURS] + ([worker.DEEPSPEED] if arguments.compare else [])
    runs = [dataclasses.replace(settings, dispatcher=name, checkpoint=str(arguments.out / "checkpoints" / name)) for name in names]
    # Generous: the limit is for ranks that hang, not for slow machines.
    timeout_s = 300.0 + 20.0 * len(runs) * settings.steps
    with launch.joined(arguments.device, bind=arguments.bind):
        results = launch.all_runs(worker.train, arguments.num_ranks, runs, timeout_s, device=arguments.device, bind=arguments.bind)
    return _report(arguments, runs, results) if launch.is_reporting() else 0


def _report(arguments: argparse.Namespace, runs: list[worker.Settings], results: list[parts.Run]) -> int:
    """Write the files and print the tables. Return the exit code."""
    for result in results:
        result.num_nodes = launch.num_nodes(arguments.ep, arguments.ranks_per_node)
    entropy = data.unigram_entropy(data.load_corpus())
    arguments.out.mkdir(parents=True, exist_ok=True)
    report.write_metrics(results, arguments.out / "metrics.jsonl")
    print(report.table(results, entropy))
    print(parts.line_of(results[0].parts))
    print(f"wrote {arguments.out}/metrics.jsonl, checkpoints")
    print(_write_page(arguments, results, entropy))
    if not arguments.compare:
        return 0
    agree = [_check_curves(results), _check_checkpoints(_cross(runs, arguments.num_ranks, bind=arguments.bind))]
    return 0 if all(agree) else 1


def _write_page(arguments: argparse.Namespace, results: list[parts.Run], entropy: float) -> str:
    hardware = torch.cuda.get_device_name() if arguments.device == "cuda" else cpu_name()
    about = {"hardware": hardware, "torch": torch.__version__, "ranks": str(arguments.num_ranks), "ZeRO": str(arguments.zero)}
    about |= results[0].parts | launch.order(len(results), arguments.device)
    return pages.write("A small DeepSeek-V3 trained with DeepSpeed", results, entropy, arguments.out, about)


if __name__ == "__main__":
    sys.exit(main())
