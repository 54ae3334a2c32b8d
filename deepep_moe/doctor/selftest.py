"""Dispatch and combine between ranks of this machine: are the bits right, and how fast is it?"""

import itertools
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from deepep_moe import Buffer, reference
from deepep_moe.testing import run_ranks

_NUM_TOPK, _EXPERTS_PER_RANK = 4, 4
_FEW_TOKENS = 32  # because the loops of the reference are slow
_SIZES = {"shm": (512, 2048), "nvlink": (4096, 7168)}  # tokens and hidden
_NUM_CALLS = 10
_DEADLINE_S = 30.0
_CASES = tuple(itertools.product((torch.bfloat16, torch.float32), ("rank", "expert")))


def _inputs(rank: int, num_ranks: int, num_tokens: int, hidden: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Return x, topk_idx and topk_weights of `rank`, the same whoever asks."""
    generator = torch.Generator().manual_seed(rank)
    topk_idx = torch.rand(num_tokens, _EXPERTS_PER_RANK * num_ranks, generator=generator).topk(_NUM_TOPK, dim=1).indices
    x = torch.randn(num_tokens, hidden, generator=generator).to(dtype)
    return x, topk_idx, torch.rand(topk_idx.shape, generator=generator)


def _is_right(rank: int, num_ranks: int, buffer: Buffer, device: torch.device, dtype: torch.dtype, layout: str) -> bool:
    """Return whether a dispatch and a combine of its rows have the reference's bits. Collective."""
    everyone = [_inputs(peer, num_ranks, _FEW_TOKENS, buffer.hidden, dtype) for peer in range(num_ranks)]
    xs, idxs, weights = (list(column) for column in zip(*everyone, strict=True))
    received = reference.dispatch(xs, idxs, weights, buffer.num_experts, layout=layout)
    by_row = layout == "expert"
    row_weights = [w for there in received if (w := there.recv_topk_weights) is not None] if by_row else None
    sums = reference.combine([there.recv_x for there in received], received, [len(x) for x in xs], row_weights)
    out = buffer.dispatch(*(tensor.to(device) for tensor in everyone[rank]), layout=layout)
    back = buffer.combine(out.recv_x, out.handle, out.recv_topk_weights if by_row else None)
    return torch.equal(out.recv_x.cpu(), received[rank].recv_x) and torch.equal(back.cpu(), sums[rank])


def _median_s(call: Callable[[], object], device: torch.device) -> float:
    """Return the median time of `call` on this rank, from a barrier to its end, in seconds. Collective."""
    times = []
    for _ in range(3 + _NUM_CALLS):
        dist.barrier()
        started = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - started)
    return statistics.median(times[3:])


def exchange(rank: int, num_ranks: int, backend: str) -> dict[str, Any]:
    """Return the cases whose bits differ, and GB/s of dispatch and combine: bytes of received rows by time. Collective."""
    device = torch.device("cuda", rank) if backend == "nvlink" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    num_tokens, hidden = _SIZES[backend]
    dist.barrier()  # so that a deadline does not count the start of processes
    sizes = num_tokens, hidden, _EXPERTS_PER_RANK * num_ranks, _NUM_TOPK
    buffer = Buffer(None, *sizes, backend=backend, timeout_s=_DEADLINE_S)
    wrong = [f"{dtype} {layout}" for dtype, layout in _CASES if not _is_right(rank, num_ranks, buffer, device, dtype, layout)]
    x, idx, weights = (tensor.to(device) for tensor in _inputs(rank, num_ranks, num_tokens, hidden, torch.bfloat16))
    out = buffer.dispatch(x, idx, weights, layout="rank")
    calls = {
        "dispatch": lambda: buffer.dispatch(x, idx, weights, layout="rank"),
        "combine": lambda: buffer.combine(out.recv_x, out.handle),
    }
    gbps = {op: out.recv_x.nbytes / _median_s(call, device) / 1e9 for op, call in calls.items()}
    buffer.destroy()
    return {"wrong": wrong} | gbps


def main(backend: str, num_ranks: int) -> None:
    """Print what the ranks have found as JSON: `wrong` (cases, with ranks), `dispatch` and `combine` (GB/s of the slowest rank)."""
    ranks = run_ranks(exchange, num_ranks, backend, timeout_s=90, start_method="spawn" if backend == "nvlink" else "forkserver")
    wrong = [f"{case} on rank {rank}" for rank, results in enumerate(ranks) for case in results["wrong"]]
    print(json.dumps({"wrong": wrong} | {op: min(results[op] for results in ranks) for op in ("dispatch", "combine")}))
