"""Train a small DeepSeek-V3 with Megatron-Core on CPU ranks or GPUs, its tokens moved by deepep_moe.

python examples/megatron/train.py                      # two ranks, a minute or two, writes runs/demo
python examples/megatron/train.py --compare alltoall   # then the same with Megatron-Core's own dispatcher; the curves must agree
python examples/megatron/train.py --device cuda        # on all GPUs of this machine
"""

import argparse
import dataclasses
import os
import sys
from pathlib import Path

import config
import torch
import worker

from deepep_moe.testing.launch import run_ranks

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "common"))

import data
import report

# Rounding apart, another dispatcher must not change training. One fp32 rounding of a loss near 5 is 5e-7.
_TOLERANCE = 1e-4


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    defaults = worker.Settings()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dispatcher", choices=config.DISPATCHERS, default=defaults.dispatcher)
    parser.add_argument("--compare", choices=config.DISPATCHERS, help="train again with this dispatcher and compare the loss curves")
    parser.add_argument("--device", choices=("cpu", "cuda"), default=defaults.device)
    parser.add_argument("--backend", default=defaults.backend, help="backend of deepep_moe: auto, shm, nvlink, collective, ...")
    parser.add_argument(
        "--gate",
        action=argparse.BooleanOptionalAction,
        help="deepep_moe routes too (default: without --compare: it rounds last bits in its own way, which training amplifies)",
    )
    parser.add_argument("--grouped-experts", action="store_true", help="deepep_moe runs the experts too, all of a layer at once")
    parser.add_argument("--num-ranks", type=int, help="default: 2 on the CPU, else all GPUs")
    parser.add_argument("--ep", type=int, help="expert-parallel size (default: all ranks, divided by --etp)")
    parser.add_argument("--tp", type=int, default=1, help="tensor-parallel size (with sequence parallelism)")
    parser.add_argument("--etp", type=int, default=1, help="tensor-parallel size inside experts")
    parser.add_argument("--steps", type=int, default=defaults.steps)
    parser.add_argument("--seed", type=int, default=defaults.seed)
    parser.add_argument("--lr", type=float, default=defaults.lr)
    parser.add_argument("--out", type=Path, default=Path("runs/demo"), help="folder for metrics.jsonl and the plots")
    arguments = parser.parse_args(argv)
    num_gpus = torch.cuda.device_count()
    if arguments.num_ranks is None:
        arguments.num_ranks = num_gpus if arguments.device == "cuda" else 2
    if arguments.device == "cuda" and not 0 < arguments.num_ranks <= num_gpus:
        parser.error(
            f"--device cuda needs a GPU for each of {max(1, arguments.num_ranks)} ranks, this machine has {num_gpus}; "
            "give --num-ranks, or --device cpu"
        )
    for name in ("num_ranks", "ep", "tp", "etp", "steps"):
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
    if config.TINY["num_moe_experts"] % arguments.ep:
        parser.error(f"--ep {arguments.ep} must divide the {config.TINY['num_moe_experts']} experts")
    if arguments.gate is None:
        arguments.gate = arguments.compare is None
    if arguments.compare == arguments.dispatcher:
        parser.error(f"--compare {arguments.compare} is the dispatcher of the first run; choose another")
    return arguments


def _run(settings: worker.Settings, num_ranks: int) -> report.Result:
    if settings.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # Megatron-Core would reach for a GPU it sees
    else:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # what cuBLAS needs to compute the same bits in every run
    # Generous: the limit is for ranks that hang, not for slow machines.
    timeout_s = 300.0 + 20.0 * settings.steps
    return run_ranks(worker.train, num_ranks, settings, timeout_s=timeout_s, start_method="spawn")[0]


def main(argv: list[str] | None = None) -> int:
    """Exit code: 0, or 1 where the compared curves differ by more than the tolerance."""
    arguments = _arguments(argv)
    fields = {field.name for field in dataclasses.fields(worker.Settings)}
    settings = worker.Settings(**{name: value for name, value in vars(arguments).items() if name in fields})
    entropy = data.unigram_entropy(data.load_corpus())
    runs = [settings] + ([dataclasses.replace(settings, dispatcher=arguments.compare)] if arguments.compare else [])
    results = [_run(run, arguments.num_ranks) for run in runs]

    arguments.out.mkdir(parents=True, exist_ok=True)
    report.write_metrics(results, arguments.out / "metrics.jsonl")
    report.plot_loss(results, entropy, arguments.out / "loss.png")
    report.plot_expert_load(results[0], arguments.out / "expert_load.png")
    print(report.table(results, entropy))
    print(f"wrote {arguments.out}/metrics.jsonl, loss.png, expert_load.png")
    if len(results) == 1:
        return 0
    difference = report.max_difference(results)
    verdict = "agree" if difference <= _TOLERANCE else "DIFFER"
    print(
        f"loss curves of {runs[0].dispatcher} and {runs[1].dispatcher} {verdict}: max |difference| {difference:.2e}, allowed {_TOLERANCE:g}"
    )
    return 0 if difference <= _TOLERANCE else 1


if __name__ == "__main__":
    sys.exit(main())
