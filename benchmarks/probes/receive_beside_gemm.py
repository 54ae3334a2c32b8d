"""What does a receiving kernel cost the matrix product beside it, if it waits for the network from the start?

python benchmarks/probes/receive_beside_gemm.py --json runs/receive_beside_gemm.json      # under MPS, as `python -m deepep_moe.bench nodes`

A rank sends a low-latency dispatch, multiplies, and has its rows placed in one of two ways:

  hook        the receiving kernel runs behind the product
  persistent  it is enqueued ahead of the product on another stream, on so many blocks, and waits there for what the network brings

"product" is the time of the matrix product, "total" that of all three, of the slowest rank of each round. All ranks do it at once, on one
GPU that they share, so a rank's product also has the others' beside it; "alone" has no dispatch at all.
"""

import argparse
import statistics
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from deepep_moe import LowLatencyBuffer
from deepep_moe.bench.common.records import record, write_json
from deepep_moe.bench.common.timing import WARMUP, slowest
from deepep_moe.bench.common.workload import Shape, make_inputs
from deepep_moe.bench.low_latency.nodes import Gate
from deepep_moe.testing import run_ranks

NUM_RANKS, RANKS_PER_NODE = 4, 2
NUM_TOKENS, HIDDEN, NUM_EXPERTS, NUM_TOPK = 128, 7168, 256, 8
BLOCKS = (2, 4, 8, 16, 32)  # of the kernel that waits: fewer than the GPU has room for, as the kernel that plays a network needs some


class Rank:
    """One rank's buffer, product and streams."""

    def __init__(self, rank: int, options: argparse.Namespace):
        self.device = torch.device("cuda", 0)
        shape = Shape(NUM_RANKS, HIDDEN, NUM_EXPERTS, NUM_TOPK, 1, RANKS_PER_NODE)
        self.given = make_inputs(shape, NUM_TOKENS, rank, self.device)
        sizes = NUM_TOKENS, HIDDEN, NUM_EXPERTS, NUM_TOPK
        self.buffer = LowLatencyBuffer(None, *sizes, backend="nvshmem", ranks_per_node=RANKS_PER_NODE, timeout_s=10)
        self.gate = Gate(rank, NUM_RANKS, self.device)
        self.native: Any = self.buffer._backend._native
        self.all_blocks = self.native.num_blocks
        if self.all_blocks <= max(BLOCKS):
            least = f"at least {max(BLOCKS) // 2 + 1} SMs"
            raise ValueError(f"kernels have {self.all_blocks} blocks at most, and {max(BLOCKS)} may wait; give a rank {least} under MPS")
        self.side = torch.cuda.Stream(self.device)
        self.a = torch.randn(options.rows, HIDDEN, device=self.device, dtype=torch.bfloat16)
        self.b = torch.randn(HIDDEN, options.columns, device=self.device, dtype=torch.bfloat16)
        self.out = self.a @ self.b
        self.dispatch(None)()
        torch.cuda.synchronize()
        dist.barrier()
        self.native.play_network(options.network_gbps)

    def dispatch(self, blocks: int | None, persistent: bool = False) -> Any:
        """Return what receives, once it has been enqueued if it is `persistent`."""
        out = self.buffer.dispatch(self.given.x, self.given.topk_idx, self.given.topk_weights, fp8=True, return_hook=True)
        if not persistent:
            return out.hook
        main = torch.cuda.current_stream()
        self.side.wait_stream(main)
        self.native.num_blocks = blocks
        with torch.cuda.stream(self.side):
            out.hook()
        self.native.num_blocks = self.all_blocks
        return lambda: main.wait_stream(self.side)

    def round(self, way: str, blocks: int | None) -> tuple[float, float]:
        """The product's and all microseconds."""
        begin, before, behind, end = (torch.cuda.Event(enable_timing=True) for _ in range(4))
        self.gate.open(-1)
        begin.record()
        receive = self.dispatch(blocks, way == "persistent") if way != "alone" else lambda: None
        before.record()
        torch.mm(self.a, self.b, out=self.out)
        behind.record()
        receive()
        end.record()
        end.synchronize()
        return 1e3 * before.elapsed_time(behind), 1e3 * begin.elapsed_time(end)


def measure(rank: int, num_ranks: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Records of each way."""
    own, records = Rank(rank, options), []
    ways = [("alone", None), ("hook", None), *(("persistent", blocks) for blocks in BLOCKS)]
    found: dict[tuple[str, int | None], list[tuple[float, float]]] = {way: [] for way in ways}
    for nth in range(WARMUP + options.repeats):
        for way in ways:
            times = own.round(*way)
            if nth >= WARMUP:
                found[way].append(times)
    for (way, blocks), times in found.items():
        product, total = (slowest(list(each)) for each in zip(*times, strict=True))
        settings = {"backend": "nvshmem", "num_ranks": num_ranks, "dtype": "float8_e4m3fn", "layout": "expert", "num_tokens": NUM_TOKENS}
        settings |= {"hidden": HIDDEN, "num_topk": NUM_TOPK, "num_experts": NUM_EXPERTS}
        more = {"way": way, "blocks": blocks, "us_product": statistics.median(product)}
        more |= {"ranks_per_node": RANKS_PER_NODE, "network_gbps": options.network_gbps, "product": [options.rows, HIDDEN, options.columns]}
        more |= {"hardware": f"{num_ranks} ranks on 1 x {torch.cuda.get_device_name()}"}
        more |= {"sms_of_a_rank": torch.cuda.get_device_properties(own.device).multi_processor_count}
        records.append(record("dispatch beside a product", settings, total, 0, baseline=None, baseline_times=[], **more))
    own.gate.buffer.destroy()
    own.buffer.destroy()
    return records


def main() -> int:
    """Print a line of each way."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=512)
    parser.add_argument("--columns", type=int, default=4096)
    parser.add_argument("--network-gbps", type=float, default=50.0)
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--json", type=Path, default=Path("runs/receive_beside_gemm.json"))
    options = parser.parse_args()
    records = run_ranks(measure, NUM_RANKS, options, timeout_s=300)[0]
    for r in records:
        print(f"{r['way']:12}{r['blocks'] or '':>5}{r['us_product']:10.1f} us product{r['us_median']:10.1f} us total")
    given = [f"--{name.replace('_', '-')} {value}" for name, value in vars(options).items() if name != "json"]
    write_json(options.json, [r | {"command": " ".join(["python benchmarks/probes/receive_beside_gemm.py", *given])} for r in records])
    return 0


if __name__ == "__main__":
    sys.exit(main())
