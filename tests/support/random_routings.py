"""Many random routings one after another, of small whole numbers, so that sums are exact: the expected results need no reference."""

import os

import torch
from exchange_cases import device_of

from deepep_moe import Buffer

ROUNDS = int(os.environ.get("DEEPEP_MOE_STRESS_ROUNDS", "100"))
MAX_TOKENS, HIDDEN, NUM_TOPK = 96, 64, 4
LAYOUTS, DTYPES = ("expert", "rank"), (torch.float32, torch.bfloat16, torch.float16)


def draw(seed, rank, num_experts, device):
    """Rows of small whole numbers, whose sums are exact, and a routing: every rank can draw every rank's."""
    generator = torch.Generator(device=device).manual_seed(seed * 1009 + rank)
    kind = torch.randint(0, 5, (2,), generator=torch.Generator().manual_seed(seed * 31 + rank)).tolist()
    num_tokens = (0, MAX_TOKENS, 1, MAX_TOKENS // 3, MAX_TOKENS // 2 + 1)[kind[0]]
    x = torch.randint(-8, 9, (num_tokens, HIDDEN), generator=generator, device=device).float()
    scores = torch.rand(num_tokens, num_experts, generator=generator, device=device)
    if kind[1] == 1:
        scores *= torch.linspace(1, 0.05, num_experts, device=device)
    elif kind[1] == 2:
        scores[:, num_experts // 2] = 2
    idx = scores.argsort(1, descending=True)[:, :NUM_TOPK]
    if kind[1] >= 2:
        idx = idx.masked_fill(torch.rand(idx.shape, generator=generator, device=device) < 0.3, -1)
    return x, idx.contiguous()


def expected_rows(drawn, first, last, layout):
    """The rows of experts first to last - 1: by (source, token), in the expert layout by expert before that."""
    x = torch.cat([x for x, _ in drawn])
    idx = torch.cat([idx for _, idx in drawn])
    here = (idx >= first) & (idx < last)
    if layout == "rank":
        return x[here.any(1)]
    token, lane = here.nonzero(as_tuple=True)
    order = idx[token, lane].argsort(stable=True)
    return x[token[order]]


def expected_sums(x, idx, num_ranks, num_local, layout):
    """Return each token times the number of its rows that came back."""
    rank = idx.div(num_local, rounding_mode="floor").masked_fill(idx < 0, -1)
    is_there = [(rank == r).any(1, keepdim=True) for r in range(num_ranks)] if layout == "rank" else [idx >= 0]
    num_targets = torch.cat(is_there, 1).sum(1, keepdim=True)
    return x * num_targets.to(x.dtype)


def stress(rank, num_ranks, backend, rounds, ranks_per_node=None):
    """Dispatch and combine of one buffer, round after round, in all the ways to send."""
    device = device_of(backend, rank)
    num_local = 3
    buffer = Buffer(None, MAX_TOKENS, HIDDEN, num_ranks * num_local, NUM_TOPK, backend=backend, timeout_s=60, ranks_per_node=ranks_per_node)
    for seed in range(rounds):
        layout, dtype = LAYOUTS[seed % 5 % 2], DTYPES[seed % 7 % 3]
        drawn = [draw(seed, r, num_ranks * num_local, device) for r in range(num_ranks)]
        drawn = [(x.to(dtype), idx) for x, idx in drawn]
        x, idx = drawn[rank]
        out = buffer.dispatch(x, idx, layout=layout, num_sms=(None, 1, 5, 0)[seed % 4], async_op=seed % 11 == 3, return_hook=seed % 11 == 5)
        (out.hook or (out.event.wait if out.event else bool))()
        rows = expected_rows(drawn, rank * num_local, (rank + 1) * num_local, layout)
        assert torch.equal(out.recv_x, rows), f"round {seed}: rows differ"
        y, hook = buffer.combine(out.recv_x, out.handle, num_sms=(None, 0, 3)[seed % 3], return_hook=True)
        hook()
        assert torch.equal(y, expected_sums(x, idx, num_ranks, num_local, layout)), f"round {seed}: sums differ"
