"""Dispatch and combine between ranks of this machine: are the bits right?"""

import itertools
import sys

import torch
import torch.distributed as dist
from torch import Tensor

from deepep_moe import Buffer, reference
from deepep_moe.testing import run_ranks

_NUM_TOKENS, _HIDDEN, _NUM_TOPK, _EXPERTS_PER_RANK = 32, 7168, 4, 4  # few tokens, because the loops of the reference are slow
_DEADLINE_S = 30.0
_CASES = tuple(itertools.product((torch.bfloat16, torch.float32), ("rank", "expert")))


def _inputs(rank: int, num_ranks: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Return x, topk_idx and topk_weights of `rank`, the same whoever asks."""
    generator = torch.Generator().manual_seed(rank)
    topk_idx = torch.rand(_NUM_TOKENS, _EXPERTS_PER_RANK * num_ranks, generator=generator).topk(_NUM_TOPK, dim=1).indices
    x = torch.randn(_NUM_TOKENS, _HIDDEN, generator=generator).to(dtype)
    return x, topk_idx, torch.rand(topk_idx.shape, generator=generator)


def _is_right(rank: int, num_ranks: int, buffer: Buffer, device: torch.device, dtype: torch.dtype, layout: str) -> bool:
    """Return whether a dispatch and a combine of its rows have the reference's bits. Collective."""
    everyone = [_inputs(peer, num_ranks, dtype) for peer in range(num_ranks)]
    xs, idxs, weights = (list(column) for column in zip(*everyone, strict=True))
    received = reference.dispatch(xs, idxs, weights, buffer.num_experts, layout=layout)
    by_row = layout == "expert"
    row_weights = [w for there in received if (w := there.recv_topk_weights) is not None] if by_row else None
    sums = reference.combine([there.recv_x for there in received], received, [len(x) for x in xs], row_weights)
    out = buffer.dispatch(*(tensor.to(device) for tensor in everyone[rank]), layout=layout)
    back = buffer.combine(out.recv_x, out.handle, out.recv_topk_weights if by_row else None)
    return torch.equal(out.recv_x.cpu(), received[rank].recv_x) and torch.equal(back.cpu(), sums[rank])


def exchange(rank: int, num_ranks: int, backend: str) -> list[str]:
    """Return the cases whose bits differ. Collective."""
    device = torch.device("cuda", rank) if backend == "nvlink" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.barrier()  # so that a deadline does not count the start of processes
    sizes = _NUM_TOKENS, _HIDDEN, _EXPERTS_PER_RANK * num_ranks, _NUM_TOPK
    buffer = Buffer(None, *sizes, backend=backend, timeout_s=_DEADLINE_S)
    wrong = [f"{dtype} {layout}" for dtype, layout in _CASES if not _is_right(rank, num_ranks, buffer, device, dtype, layout)]
    buffer.destroy()
    return wrong


def main(backend: str, num_ranks: int) -> None:
    """Run the ranks. Ends the program with the cases whose bits differ, where there are some."""
    ranks = run_ranks(exchange, num_ranks, backend, timeout_s=90, start_method="spawn" if backend == "nvlink" else "forkserver")
    if wrong := [f"{case} on rank {rank}" for rank, cases in enumerate(ranks) for case in cases]:
        sys.exit(f"results differ from deepep_moe.reference: {', '.join(wrong[:4])}")
