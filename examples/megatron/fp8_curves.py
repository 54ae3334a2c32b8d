"""Train with experts in bf16 and in fp8, from several seeds, and compare the loss curves.

python examples/megatron/fp8_curves.py --device cuda --num-ranks 1 --json runs/fp8.json
python examples/megatron/fp8_curves.py --device cuda --num-ranks 2 --share-gpus --backend nvlink ...    # two ranks on one GPU
python examples/megatron/fp8_curves.py --nudged ...    # and bf16 with a learning rate a millionth larger: what chance alone does

Other options are those of train.py, for all runs. The loss at the end is the mean over the last steps. It must be as near to that of bf16
as --tolerance says, and every loss must be finite; else the exit code is 1.
"""

import argparse
import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import train
import worker

import deepep_moe
from deepep_moe.tune.records import commit, cpu_name

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "common"))

import launch

_NUDGED = "bf16, nudged"
_DEFAULTS = ["--experts", "own", "--dtype", "bf16", "--expert-width", "128", "--lr", "1e-3", "--steps", "300", "--gate"]


def _arguments(argv: list[str] | None) -> tuple[argparse.Namespace, argparse.Namespace, worker.Settings]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--window", type=int, default=30, help="steps whose mean loss is compared, at the end and all along")
    parser.add_argument("--tolerance", type=float, default=0.005, help="relative difference of the loss at the end")
    parser.add_argument("--json", type=Path, default=Path("runs/fp8_curves.json"))
    parser.add_argument("--nudged", action="store_true", help="train a third time, in bf16 with a learning rate a millionth larger")
    flags, others = parser.parse_known_args(argv)
    arguments, settings = train.settings_of([*_DEFAULTS, *others])
    if not 0 < flags.window <= settings.steps:
        parser.error(f"--window {flags.window} must be positive, and at most the {settings.steps} steps")
    return flags, arguments, settings


def _means(losses: list[float], window: int) -> list[float]:
    """The mean of each window, the last one at the end."""
    rest = losses[len(losses) % window :]
    return np.mean(np.reshape(rest, (-1, window)), 1).tolist()


def compare(exact: list[float], ours: list[float], window: int) -> dict[str, Any]:
    """Compare two curves: relative differences at the end and in the worst window, and whether all losses are finite."""
    pairs = [(a, b) for a, b in zip(_means(exact, window), _means(ours, window), strict=True)]
    differences = [(b - a) / a for a, b in pairs]
    return {
        "bf16_at_end": pairs[-1][0],
        "fp8_at_end": pairs[-1][1],
        "difference_at_end": differences[-1],
        "largest_difference": max(differences, key=abs),
        "all_finite": bool(np.isfinite(ours).all()),
    }


def _train(flags: argparse.Namespace, arguments: argparse.Namespace, settings: worker.Settings, record: dict[str, Any]) -> None:
    """Train each from each seed, and write the record whenever a run is done."""
    for seed in flags.seeds:
        curves = {}
        experts = {"bf16": {"fp8_experts": False}, "fp8": {"fp8_experts": True}}
        if flags.nudged:
            experts[_NUDGED] = {"fp8_experts": False, "lr": settings.lr * (1 + 1e-6)}
        for name, changes in experts.items():
            [result] = train.run_all([dataclasses.replace(settings, seed=seed, **changes)], arguments)
            if launch.is_reporting():
                curves[name] = result.losses
                record["runs"].append({"seed": seed, "experts": name, "seconds": result.seconds, "losses": result.losses})
                _write(flags, record)
        if launch.is_reporting():
            comparison = compare(curves["bf16"], curves["fp8"], flags.window)
            if flags.nudged:
                comparison["nudged_at_end"] = compare(curves["bf16"], curves[_NUDGED], flags.window)["difference_at_end"]
            record["compared"].append({"seed": seed} | comparison)
            record["is_near"] = all(each["all_finite"] and abs(each["difference_at_end"]) <= flags.tolerance for each in record["compared"])
            _write(flags, record)


def _write(flags: argparse.Namespace, record: dict[str, Any]) -> None:
    flags.json.parent.mkdir(parents=True, exist_ok=True)
    flags.json.write_text(json.dumps(record, indent=1) + "\n")


def _new_record(flags: argparse.Namespace, arguments: argparse.Namespace, settings: worker.Settings) -> dict[str, Any]:
    names = ("model", "expert_width", "steps", "lr", "ep", "micro_batches", "cuda_graph", "shares_gpus")
    return {
        "op": "loss curves of fp8 and bf16 experts",
        "hardware": torch.cuda.get_device_name() if arguments.device == "cuda" else cpu_name(),
        "versions": {"deepep_moe": deepep_moe.__version__, "commit": commit(), "torch": torch.__version__},
        "num_ranks": arguments.num_ranks,
        **{name: getattr(settings, name) for name in names},
        "seeds": flags.seeds,
        "window": flags.window,
        "tolerance": flags.tolerance,
        "is_near": False,
        "compared": [],
        "runs": [],
    }


def main(argv: list[str] | None = None) -> int:
    """Exit code: 0, or 1 where a curve of fp8 is not near that of bf16."""
    flags, arguments, settings = _arguments(argv)
    record = _new_record(flags, arguments, settings)
    with launch.joined(arguments.device, bind=arguments.bind):
        _train(flags, arguments, settings, record)
    if not launch.is_reporting():
        return 0
    print(f"{'seed':>6}{'bf16':>10}{'fp8':>10}{'at the end':>12}{'at most':>10}")
    for each in record["compared"]:
        losses = f"{each['bf16_at_end']:10.4f}{each['fp8_at_end']:10.4f}"
        chance = f"   nudged bf16 {each['nudged_at_end']:.2%}" if flags.nudged else ""
        print(f"{each['seed']:6}{losses}{each['difference_at_end']:12.2%}{each['largest_difference']:10.2%}{chance}")
    print(f"loss curves are {'near' if record['is_near'] else 'NOT near'} each other; wrote {flags.json}")
    return 0 if record["is_near"] else 1


if __name__ == "__main__":
    sys.exit(main())
