"""Decode with double-batch overlap: two micro-batches through a stack of MoE layers, one after the other and alternating.

python examples/overlap/decode.py                 # two ranks on the CPU, writes runs/demo-overlap/report.html
python examples/overlap/decode.py --device cuda   # a rank on each GPU of this machine
python examples/overlap/decode.py --device cuda --num-ranks 4 --ranks-per-node 2 --share-gpus   # two virtual nodes on one GPU

On GPUs rows travel while the SMs compute. On the CPU the sender copies the rows itself, so only waits for other ranks are hidden. Each
rank has more work in one micro-batch, and its peers have more in the other.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path

import draw
import torch
import torch.distributed as dist
from model import HEAD_SIZE, Decoder, Sizes
from tqdm import trange

from deepep_moe import LowLatencyBuffer
from deepep_moe.nn import Span, Timeline, overlapped
from deepep_moe.testing import run_ranks
from deepep_moe.topology.binding import add_bind
from deepep_moe.tune.records import cpu_name

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "common"))

import launch
from page import Page, Picture, Table

CPU = Sizes(num_layers=3, hidden=512, intermediate=256, num_experts=16, num_topk=4, num_tokens=64, context=256)
GPU = Sizes(num_layers=4, hidden=7168, intermediate=1024, num_experts=32, num_topk=8, num_tokens=64, context=1024)
HELP = {
    "num_layers": "layers of attention, router, experts and a shared expert",
    "hidden": f"columns of a token, a multiple of {HEAD_SIZE}",
    "intermediate": "columns inside an expert",
    "num_experts": "of all ranks together",
    "num_topk": "experts a token chooses",
    "num_tokens": "sequences of the first micro-batch on even and of the second on odd ranks, a token each; the others have half as many",
    "context": "tokens that every sequence has in its cache",
}
Run = Callable[[Timeline], list[torch.Tensor]]


@dataclass
class Measured:
    """One way to run. `seconds` of each repeat: of the slowest rank; `spans`: of the repeat in the middle, on a GPU of the last one."""

    seconds: list[float]
    spans: list[Span]
    outputs: list[torch.Tensor]


def num_tokens_of(sizes: Sizes, rank: int, batch: int) -> int:
    return sizes.num_tokens if rank % 2 == batch else sizes.num_tokens // 2


def runs_of(
    sizes: Sizes, rank: int, num_ranks: int, device: torch.device, backend: str, ranks_per_node: int | None
) -> dict[str, Run]:  # fmt: skip
    """The two ways to decode the same two micro-batches."""
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    with device:
        model = Decoder(sizes, rank, num_ranks).to(dtype)
    buffer = LowLatencyBuffer(
        None, sizes.num_tokens, sizes.hidden, sizes.num_experts, sizes.num_topk, backend=backend, ranks_per_node=ranks_per_node
    )
    num_tokens = [num_tokens_of(sizes, rank, batch) for batch in range(2)]
    xs = [torch.randn(number, sizes.hidden).to(device, dtype) for number in num_tokens]
    caches = [torch.randn(2, number, sizes.context, HEAD_SIZE).to(device, dtype) for number in num_tokens]

    def one_by_one(timeline: Timeline) -> list[torch.Tensor]:
        outputs = []
        for batch, (x, cache) in enumerate(zip(xs, caches, strict=True)):
            timeline.batch = batch
            outputs += overlapped(model(buffer, x, cache, timeline))
        return outputs

    def by_turns(timeline: Timeline) -> list[torch.Tensor]:
        return overlapped(*(model(buffer, x, cache, timeline) for x, cache in zip(xs, caches, strict=True)), timeline=timeline)

    return {"one after the other": one_by_one, "overlapped": by_turns}


def prepare(run: Run, device: torch.device, in_graph: bool) -> Callable[[], tuple[list[torch.Tensor], Timeline]]:
    """Return a function that makes a run. With `in_graph` it replays a CUDA graph, since Python's launches take longer than kernels."""
    run(Timeline(device))
    if not in_graph:

        def step() -> tuple[list[torch.Tensor], Timeline]:
            timeline = Timeline(device)
            outputs = run(timeline)
            if device.type == "cuda":
                torch.cuda.synchronize()
            return outputs, timeline

        return step
    torch.cuda.synchronize()
    graph, timeline = torch.cuda.CUDAGraph(), Timeline(device)
    with torch.cuda.graph(graph):
        outputs = run(timeline)

    def replay() -> tuple[list[torch.Tensor], Timeline]:
        graph.replay()
        torch.cuda.synchronize()
        return outputs, timeline

    return replay


def measure(runs: dict[str, Run], device: torch.device, repeats: int, *, in_graph: bool, progress: bool) -> dict[str, Measured]:
    """Time all runs in turn, `repeats` times, so that each meets the same state of the machine."""
    steps = {name: prepare(run, device, in_graph) for name, run in runs.items()}
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    passes: dict[str, list[tuple[list[torch.Tensor], Timeline]]] = {name: [] for name in runs}
    for _ in trange(repeats, desc="decode", unit="pass", disable=not progress, mininterval=0.5):
        for name, step in steps.items():
            dist.barrier()
            begin = time.perf_counter()
            passes[name].append(step())
            seconds[name].append(time.perf_counter() - begin)
    measured = {}
    for name in runs:
        slowest = torch.tensor(seconds[name])
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        outputs, timeline = passes[name][int(slowest.argsort()[repeats // 2])]
        measured[name] = Measured(slowest.tolist(), timeline.spans(), [output.clone() for output in outputs])
    return measured


def decode(
    rank: int, num_ranks: int, sizes: Sizes, device_type: str, repeats: int, ranks_per_node: int | None = None, shares_gpus: bool = False
) -> dict[str, tuple[float, list[Span]]]:
    """One rank, as `decode_on` has it."""
    if device_type == "cpu":
        return decode_on(torch.device("cpu"), "shm", rank, num_ranks, sizes, repeats, None, in_graph=False)
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    backend = "nvlink" if ranks_per_node in (None, num_ranks) else "nvshmem"
    return decode_on(device, backend, rank, num_ranks, sizes, repeats, ranks_per_node, in_graph=not shares_gpus)


@torch.inference_mode()
def decode_on(
    device: torch.device, backend: str, rank: int, num_ranks: int, sizes: Sizes, repeats: int, ranks_per_node: int | None, *, in_graph: bool
) -> dict[str, tuple[float, list[Span]]]:
    """One rank (a gloo process group is there): the median of the seconds and the timeline of each way, which must agree to the bit."""
    runs = runs_of(sizes, rank, num_ranks, device, backend, ranks_per_node)
    measured = measure(runs, device, repeats, in_graph=in_graph, progress=rank == 0)
    first, second = measured.values()
    for ours, theirs in zip(first.outputs, second.outputs, strict=True):
        if not torch.equal(ours, theirs):
            difference = (ours - theirs).abs().max().item()
            raise AssertionError(f"rank {rank}: outputs differ by up to {difference:g}; they must be equal to the bit")
    return {name: (statistics.median(result.seconds), result.spans) for name, result in measured.items()}


def arguments_of(argv: list[str] | None) -> tuple[argparse.Namespace, Sizes]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--num-ranks", type=int, help="default: 2 on the CPU, else all GPUs")
    parser.add_argument("--ranks-per-node", type=int, help="GPUs of a virtual node, between which rows go by NVSHMEM (default: all)")
    parser.add_argument(
        "--share-gpus", action="store_true", dest="shares_gpus",
        help="ranks share the GPUs there are, and run without a CUDA graph: it shows that results agree, not how fast they are",
    )  # fmt: skip
    parser.add_argument("--repeats", type=int, default=20, help="passes to measure, of each way (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=Path("runs/demo-overlap"), help="folder for timeline.png (default: %(default)s)")
    add_bind(parser)
    for field in fields(Sizes):
        small, large = getattr(CPU, field.name), getattr(GPU, field.name)
        parser.add_argument(
            f"--{field.name.replace('_', '-')}", type=int, help=f"{HELP[field.name]} (default: {small} on the CPU, {large} on GPUs)"
        )
    arguments = parser.parse_args(argv)
    defaults = CPU if arguments.device == "cpu" else GPU
    sizes_given = {field.name: getattr(arguments, field.name) for field in fields(Sizes)}
    sizes = Sizes(**{name: getattr(defaults, name) if value is None else value for name, value in sizes_given.items()})
    if launch.is_launched():
        parser.error("a launcher has started this process as one of several ranks; run it with plain python, it starts its ranks itself")
    if arguments.shares_gpus and arguments.device != "cuda":
        parser.error(f"--share-gpus with --device {arguments.device}; give --device cuda")
    launch.settle_ranks(parser, arguments)
    num_ranks = arguments.num_ranks
    if min(*vars(sizes).values(), num_ranks, arguments.repeats) < 1 or sizes.hidden % HEAD_SIZE or sizes.num_experts % num_ranks:
        parser.error(
            f"all numbers must be positive, --hidden a multiple of {HEAD_SIZE}, --num-experts a multiple of --num-ranks {num_ranks}"
        )
    per_node = arguments.ranks_per_node
    if per_node is not None and (arguments.device == "cpu" or per_node < 1 or num_ranks % per_node):
        parser.error(f"--ranks-per-node {per_node} must divide --num-ranks {num_ranks}, and needs --device cuda")
    if sizes.num_topk > sizes.num_experts:
        parser.error(f"--num-topk {sizes.num_topk} must be at most --num-experts {sizes.num_experts}")
    return arguments, sizes


def summary_of(arguments: argparse.Namespace, results: dict[str, tuple[float, list[Span]]]) -> str:
    """Return the summary of a run. Ranks that share a GPU take turns on it, so the summary then does not call either way faster."""
    (one_by_one, _), (by_turns, _) = results.values()
    times = f"Two micro-batches took {1e3 * one_by_one:.2f} ms one after the other, and {1e3 * by_turns:.2f} ms by turns"
    if arguments.shares_gpus:
        return f"{times}. The outputs are equal to the bit. Ranks shared GPUs, so times say nothing."
    return f"{times}, {one_by_one / by_turns:.2f}x as fast (medians of {arguments.repeats}). The outputs are equal to the bit."


def about(arguments: argparse.Namespace, sizes: Sizes) -> dict[str, str]:
    """Return the hardware, versions and sizes of the run."""
    hardware = torch.cuda.get_device_name() if arguments.device == "cuda" else cpu_name()
    num_ranks, per_node = arguments.num_ranks, arguments.ranks_per_node or arguments.num_ranks
    ranks = {"ranks": num_ranks, "ranks_per_node": per_node, "share_gpus": "yes" if arguments.shares_gpus else "no"}
    return {name: str(value) for name, value in ({"hardware": hardware, "torch": torch.__version__} | ranks | vars(sizes)).items()}


def main(argv: list[str] | None = None) -> None:
    arguments, sizes = arguments_of(argv)
    measured = sizes, arguments.device, arguments.repeats, arguments.ranks_per_node, arguments.shares_gpus
    results = run_ranks(decode, arguments.num_ranks, *measured, timeout_s=600, start_method="spawn", bind=arguments.bind)[0]
    num_tokens = sum(num_tokens_of(sizes, rank, batch) for rank in range(arguments.num_ranks) for batch in range(2))
    print(f"\nrank 0 of {arguments.num_ranks}, two micro-batches through {sizes.num_layers} layers:\n")
    timelines = {name: spans for name, (_, spans) in results.items()}
    print(draw.text(timelines), "\n")
    for name, (seconds, _) in results.items():
        print(f"{name:<20} {1e3 * seconds:8.2f} ms {num_tokens / seconds:12,.0f} tokens/s")
    arguments.out.mkdir(parents=True, exist_ok=True)
    draw.plot(timelines, f"Double-batch overlap, rank 0 of {arguments.num_ranks} ({arguments.device})", arguments.out / "timeline.png")
    print(f"wrote {arguments.out}/timeline.png")
    rows: list[list[str | float | None]] = [[name, 1e3 * seconds, num_tokens / seconds] for name, (seconds, _) in results.items()]
    summary = summary_of(arguments, results)
    pictures = [Picture.of_file("What rank 0 did when", arguments.out / "timeline.png")]
    columns = ["way", "both micro-batches, ms", "tokens/s"]
    page = Page("Decoding with double-batch overlap", summary, about(arguments, sizes), [Table("Ways", columns, rows)], pictures)
    page.write(arguments.out / "report.html")
    print(summary)


if __name__ == "__main__":
    main()
