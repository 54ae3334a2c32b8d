"""Dispatch and combine on all ranks, compared with deepep_moe.reference bit for bit."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from ranks import Rank, block
from torch import Tensor

from deepep_moe import Buffer, reference

HIDDEN, NUM_TOPK, EXPERTS_PER_RANK = 256, 4, 4
PATTERNS = ("uniform", "masked lanes", "one rank", "one rank without tokens")


@dataclass(frozen=True)
class Case:
    """One call of all ranks."""

    pattern: str
    dtype: torch.dtype
    layout: str

    @property
    def name(self) -> str:
        return f"{self.pattern}, {str(self.dtype).removeprefix('torch.')}, layout {self.layout}"


def cases() -> Iterator[Case]:
    for values in itertools.product(PATTERNS, (torch.bfloat16, torch.float32), ("rank", "expert")):
        yield Case(*values)


def inputs(case: Case, rank: int, num_ranks: int, num_tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return x, topk_idx and topk_weights of `rank`, the same on every rank."""
    generator = torch.Generator().manual_seed(1000 * PATTERNS.index(case.pattern) + rank)
    if case.pattern == "one rank without tokens" and rank == num_ranks - 1:
        num_tokens = 0
    scores = torch.rand(num_tokens, EXPERTS_PER_RANK * num_ranks, generator=generator)
    if case.pattern == "one rank":
        scores[:, -EXPERTS_PER_RANK:] += 1
    topk_idx = scores.topk(min(NUM_TOPK, scores.shape[1]), dim=1).indices
    if case.pattern == "masked lanes":
        topk_idx = topk_idx.masked_fill(torch.rand(topk_idx.shape, generator=generator) < 0.5, -1)
    x = torch.randn(num_tokens, HIDDEN, generator=generator).to(case.dtype)
    return x, topk_idx, torch.rand(topk_idx.shape, generator=generator)


def _returned(rank: int, num_rows: int, dtype: torch.dtype) -> Tensor:
    """Return the outputs of the experts of `rank`, the same on every rank."""
    return torch.randn(num_rows, HIDDEN, generator=torch.Generator().manual_seed(77 + rank)).to(dtype)


def differences(r: Rank, buffer: Buffer, case: Case) -> list[str]:
    """Return the results of this rank that are not the reference's. Collective."""
    ranks = range(r.num_ranks)
    everyone = [inputs(case, rank, r.num_ranks, r.options.num_tokens) for rank in ranks]
    xs, idxs, weights = (list(column) for column in zip(*everyone, strict=True))
    received = reference.dispatch(xs, idxs, weights, buffer.num_experts, layout=case.layout)
    rows = [_returned(rank, len(there.recv_x), case.dtype) for rank, there in enumerate(received)]
    row_weights = [there.recv_topk_weights for there in received] if case.layout == "expert" else None
    sums = reference.combine(rows, received, [len(x) for x in xs], row_weights, ranks_per_node=buffer.ranks_per_node)

    x, idx, weight = (tensor.to(r.device) for tensor in everyone[r.rank])
    out = buffer.dispatch(x, idx, weight, layout=case.layout)
    again = buffer.dispatch(x, topk_weights=weight, handle=out.handle)
    back = buffer.combine(rows[r.rank].to(r.device), out.handle, out.recv_topk_weights if row_weights is not None else None)
    mine = received[r.rank]
    pairs = {
        "recv_x": (out.recv_x, mine.recv_x),
        "recv_topk_weights": (out.recv_topk_weights, mine.recv_topk_weights),
        "recv_x along the handle": (again.recv_x, mine.recv_x),
        "combined_x": (back, sums[r.rank]),
    }
    return [name for name, (actual, expected) in pairs.items() if not _same(actual, expected)]


def _same(actual: Tensor | None, expected: Tensor | None) -> bool:
    """Return whether both have the same bits."""
    if actual is None or expected is None:
        return actual is expected
    actual = actual.detach().cpu().contiguous()
    return actual.shape == expected.shape and torch.equal(actual.view(torch.uint8), expected.contiguous().view(torch.uint8))


def run(r: Rank) -> bool:
    """Run all cases, print a block on rank 0, and return whether all results were right. Collective."""
    num_topk = min(NUM_TOPK, EXPERTS_PER_RANK * r.num_ranks)
    buffer = r.new_buffer(max(r.options.num_tokens, 1), HIDDEN, EXPERTS_PER_RANK * r.num_ranks, num_topk)
    lines, all_right = [r.shape(buffer), "", "| case | result |", "|---|---|"], True
    for case in cases():
        wrong = r.gather(differences(r, buffer, case))
        differing = [f"rank {rank}: {', '.join(names)}" for rank, names in enumerate(wrong) if names]
        all_right = all_right and not differing
        lines.append(f"| {case.name} | {'DIFFERS on ' + '; '.join(differing[:4]) if differing else 'the same bits'} |")
    buffer.destroy()
    verdict = "all results have the reference's bits" if all_right else "SOME RESULTS DIFFER from the reference"
    if r.rank == 0:
        print(block("deepep_moe: correctness", [*lines, "", verdict]), flush=True)
    return all_right
