"""Benchmark of a training step: `pretrain_gpt.py` of Megatron-LM as it is, with one dispatcher after the other, by turns.

The first argument is a checkout of Megatron-LM (core_v0.19.0 was run). Megatron-Core, TransformerEngine and deepep_moe must be installed.
The model is one like DeepSeek-V2-Lite: MLA, 64 experts of width 1408, a shared expert, sequences of 4096, bf16, the distributed optimizer.

Runs are: `alltoall` and `allgather`, with TransformerEngine's experts and all fused operations; `flag`, ours by the flag alone;
`framework`, the same with TransformerEngine's experts; `deepep`, Megatron-Core's code for DeepEP on the drop-in. Those that end in
`_graphs` replay CUDA graphs of attention, dense layers and routers; `flag_captured` replays the whole MoE layer too, by `--sync-free`.

Times are Megatron-LM's "elapsed time per iteration" without the first six iterations and the last four. The profiler warms up in two of
these and traces two: "kernels" is the time in which GPU 0 was busy in one of them. Speed-ups are against the best baseline of the round,
which has graphs only where the run has them.
"""

import argparse
import gzip
import json
import os
import re
import shlex
import shutil
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.common.records import record, write_json
from benchmarks.common.report import number, show_table

_WARMUP, _TRACED = 6, 2
_NOT_TIMED = 2 * _TRACED  # iterations at the end: the profiler slows down as many as it traces before it traces
_TE = "--moe-grouped-gemm --moe-permute-fusion --moe-router-fusion"
_OURS = "-m deepep_moe.integrations.megatron"
_CAPTURED = "--cuda-graph-impl transformer_engine --cuda-graph-modules attn mlp"
_GRAPHS = f"{_CAPTURED} moe_router"
_BACKEND = "--moe-grouped-gemm --moe-flex-dispatcher-backend deepep_moe"
BASELINES = ("alltoall", "allgather", "alltoall_graphs", "allgather_graphs")
RUNS = {  # what starts the script, and arguments of the script
    "alltoall": ("", f"{_TE} --moe-token-dispatcher-type alltoall"),
    "allgather": ("", f"{_TE} --moe-token-dispatcher-type allgather"),
    "alltoall_graphs": ("", f"{_TE} --moe-token-dispatcher-type alltoall {_GRAPHS}"),
    "allgather_graphs": ("", f"{_TE} --moe-token-dispatcher-type allgather {_GRAPHS}"),
    "flag": (_OURS, _BACKEND),
    "flag_graphs": (_OURS, f"{_BACKEND} {_GRAPHS}"),
    "flag_captured": (f"{_OURS} --sync-free", f"{_BACKEND} {_CAPTURED} moe"),
    "framework": (f"{_OURS} --experts framework", f"{_BACKEND} --moe-permute-fusion"),
    "deepep": ("-m deepep_moe.compat.run", f"{_TE} --moe-token-dispatcher-type flex --moe-flex-dispatcher-backend deepep"),
}
_MODEL = """--use-mcore-models --transformer-impl transformer_engine --num-attention-heads 16 --ffn-hidden-size 10944 --seq-length 4096
--max-position-embeddings 4096 --swiglu --normalization RMSNorm --disable-bias-linear --position-embedding-type rope
--untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0 --multi-latent-attention --kv-lora-rank 512
--qk-head-dim 128 --qk-pos-emb-head-dim 64 --v-head-dim 128 --num-experts 64 --moe-ffn-hidden-size 1408
--moe-shared-expert-intermediate-size 2816 --moe-router-score-function sigmoid --moe-router-enable-expert-bias
--moe-router-bias-update-rate 1e-3 --moe-router-num-groups 8 --moe-router-group-topk 4 --moe-router-topk-scaling-factor 2.5
--moe-router-dtype fp32 --moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 1e-4"""
_TRAINING = """--tensor-model-parallel-size 1 --pipeline-model-parallel-size 1 --lr 1e-4 --min-lr 1e-5 --lr-decay-style constant
--weight-decay 0.1 --clip-grad 1.0 --bf16 --mock-data --tokenizer-type NullTokenizer --vocab-size 32000 --log-interval 1 --eval-iters 0
--eval-interval 1000 --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --seed 1234 --log-throughput
--profile --use-pytorch-profiler --profile-ranks 0"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("megatron_lm", type=Path, help="folder of a checkout of Megatron-LM")
    parser.add_argument("--runs", nargs="+", choices=RUNS, default=["alltoall", "allgather", "flag"])
    sizes = {"rounds": 2, "iterations": 20, "num-layers": 8, "hidden": 2048, "num-topk": 8, "micro-batch-size": 2, "global-batch-size": 8}
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default, help=f"default {default}")
    parser.add_argument("--num-ranks", type=int, help="ranks, all of them expert-parallel (default: all GPUs)")
    parser.add_argument("--extra", default="--no-gradient-accumulation-fusion", help='more arguments of the script (default "%(default)s")')
    parser.add_argument("--logs", type=Path, default=Path("runs/trainer"), help="folder for logs and traces (default %(default)s)")
    parser.add_argument("--limit", type=int, default=600, help="seconds of a run (default %(default)s)")


def main(options: argparse.Namespace) -> None:
    """Print a line for each run, and write records. Exit with the runs that failed."""
    options.num_ranks = options.num_ranks or torch.cuda.device_count()
    if not (options.megatron_lm / "pretrain_gpt.py").exists() or options.num_ranks < 1:
        sys.exit(
            f"{options.megatron_lm} has no pretrain_gpt.py, or there are no ranks; give a checkout of Megatron-LM, on a host with GPUs"
        )
    if options.iterations <= _WARMUP + _NOT_TIMED:
        sys.exit(f"--iterations is {options.iterations}, but the first {_WARMUP} and the last {_NOT_TIMED} are not timed")
    records: list[dict[str, Any]] = []
    failures: list[str] = []
    for turn in range(1, options.rounds + 1):
        steps: dict[str, dict[str, Any]] = {}
        for name in options.runs:
            try:
                steps[name] = measured(name, turn, options)
            except RuntimeError as error:
                failures.append(str(error))
        records += _records(steps, turn, options)
    columns = {
        "run": lambda r: f"{r['op']}, round {r['round']}", "median ms": number("us_median", 0, 1e-3), "least": number("us_least", 0, 1e-3),
        "kernels ms": number("us_kernels", 0, 1e-3), "GB": number("peak_bytes", 1, 1e-9), "baseline": number("rival_us", 0, 1e-3),
        "speed-up": number("ratio", 2, unit="x"), "losses": lambda r: " ".join(r["losses"]),
    }  # fmt: skip
    show_table(columns, records)
    write_json(options.json, records)
    if failures:
        sys.exit("\n".join(failures))


def figures_of(log: str, trace: Path) -> dict[str, Any]:
    """Return the figures of a step, from a log of Megatron-LM and a trace of `_TRACED` steps: `us`, and fields of its record."""
    us = [1e3 * float(ms) for ms in re.findall(r"elapsed time per iteration \(ms\): ([\d.]+)", log)][_WARMUP:-_NOT_TIMED]
    losses = re.findall(r"lm loss: ([\d.E+-]+)", log)
    return {
        "us": us, "us_least": min(us), "us_kernels": _busy_us(trace) / _TRACED,
        "peak_bytes": 1e6 * max(map(float, re.findall(r"max allocated: ([\d.]+)", log)), default=0.0),
        "losses": [f"{float(loss):.4f}" for loss in (*losses[:1], *losses[-1:])],
    }  # fmt: skip


def measured(name: str, turn: int, options: argparse.Namespace) -> dict[str, Any]:
    """Train once. Raises RuntimeError, which names the log, if that fails."""
    folder = (options.logs / f"{name}-{turn}").resolve()
    shutil.rmtree(folder, ignore_errors=True)  # no run reads the trace of an earlier one
    tensorboard = folder / "tensorboard"  # Megatron-LM puts its traces beside it
    tensorboard.mkdir(parents=True, exist_ok=True)
    launcher, dispatcher = RUNS[name]
    sizes = {
        "num-layers": options.num_layers, "moe-layer-freq": f"([0]+[1]*{options.num_layers - 1})", "hidden-size": options.hidden,
        "moe-router-topk": options.num_topk, "expert-model-parallel-size": options.num_ranks, "train-iters": options.iterations,
        "micro-batch-size": options.micro_batch_size, "global-batch-size": options.global_batch_size,
        "profile-step-start": options.iterations - _TRACED, "profile-step-end": options.iterations, "tensorboard-dir": tensorboard,
    }  # fmt: skip
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(options.num_ranks)]
    command += [*launcher.split(), "pretrain_gpt.py", *_MODEL.split(), *_TRAINING.split(), *dispatcher.split(), *shlex.split(options.extra)]
    command += [str(part) for size, value in sizes.items() for part in (f"--{size}", value)]
    path = os.pathsep.join([str(options.megatron_lm.resolve()), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"} | os.environ | {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}
    with (folder / "log.txt").open("w") as log:
        try:
            done = subprocess.run(
                command, cwd=options.megatron_lm, env=environment, stdout=log, stderr=subprocess.STDOUT, timeout=options.limit
            )
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"{name} took more than {options.limit} s; see {folder}/log.txt") from None
    traces = sorted(folder.rglob("*.json*"), key=lambda file: file.stat().st_mtime)
    if done.returncode or not traces:
        raise RuntimeError(f"{name} ended with {done.returncode} and {len(traces)} traces; see {folder}/log.txt")
    return figures_of((folder / "log.txt").read_text(errors="replace"), traces[-1])


def _busy_us(trace: Path) -> float:
    """Return how long a kernel or copy ran, in a Chrome trace of PyTorch's profiler. Those that run side by side count once."""
    with gzip.open(trace) if trace.suffix == ".gz" else trace.open("rb") as file:
        events = json.load(file)["traceEvents"]
    busy, until = 0.0, float("-inf")
    for begin, us in sorted((e["ts"], e["dur"]) for e in events if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")):
        busy += max(0.0, begin + us - max(begin, until))
        until = max(until, begin + us)
    return busy


def _records(steps: dict[str, dict[str, Any]], turn: int, options: argparse.Namespace) -> Sequence[dict[str, Any]]:
    def best_for(run: str) -> str | None:
        has_graphs = _CAPTURED in RUNS[run][1]
        rivals = [name for name in BASELINES if name in steps and (has_graphs or _CAPTURED not in RUNS[name][1])]
        return min(rivals, key=lambda name: statistics.median(steps[name]["us"]), default=None)

    tokens = options.global_batch_size * 4096 // options.num_ranks
    settings = {"num_ranks": options.num_ranks, "num_tokens": tokens, "hidden": options.hidden, "num_topk": options.num_topk}
    settings |= {"num_experts": 64, "dtype": "bfloat16"}
    hardware = {"hardware": f"{options.num_ranks} x {torch.cuda.get_device_name()}"} if torch.cuda.is_available() else {}
    return [
        record(
            f"trainer {name}", settings, step["us"], 0, baseline=best, baseline_times=steps[best]["us"] if best else [], round=turn,
            **{field: value for field, value in step.items() if field != "us"}, **hardware,
        )
        for name, step in steps.items()
        for best in [best_for(name)]
    ]  # fmt: skip
