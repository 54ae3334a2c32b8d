"""Routings of a batch of tokens. The seed, the step and the name of a routing decide it, so it is the same for any number of ranks.

In each step a routing says how popular the experts are. The experts of a token are distinct. Each expert gets its share of all rows, give
or take one, and the experts that it stands beside are random. Contiguous experts lie on one rank.

W0 to W7 have the names of Megatron-LM#7488. Its text gives no constants, so these are ours: an eighth of the experts is hot, and a hot
expert is 8 times as popular as another.
"""

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

HEAT = 8.0
_PARTS = 8  # of the experts, one of which is hot: with 8 ranks those of a rank
_PERIOD = 4  # steps from one burst to the next
_COMPANY = 64  # rows whose experts are mixed at once

WORKLOADS = {
    "W0": "balanced",
    "W1": "hot experts anywhere",
    "W2": "a hot rank: contiguous hot experts",
    "W3": "as many hot experts, spread evenly over the ranks",
    "W4": "balanced, but of R ranks rank r has the tokens from (r / R)^2 to ((r + 1) / R)^2 of the batch",
    "W5": "no rows for the last quarter of the experts, which are whole ranks from 4 ranks up, and for every fourth of the others",
    "W6": "W2, whose hot experts are the next ones in each step",
    "W7": "W0, but each fourth step is one of W2",
}


def generator_of(*key: object) -> torch.Generator:
    return torch.Generator().manual_seed(zlib.crc32(repr(key).encode()))


@dataclass(frozen=True)
class Routing:
    """Rows for each step. `popularity(step)` is [num_experts] float64, in any unit."""

    name: str
    popularity: Callable[[int], Tensor]
    seed: int = 0
    is_ragged: bool = False
    """Ranks have different numbers of tokens."""

    def rows_per_expert(self, num_tokens: int, num_topk: int, step: int) -> Tensor:
        """Return the rows of each expert, [num_experts] int64 with the sum num_tokens * num_topk.

        Raises ValueError if an expert would have more rows than there are tokens.
        """
        popularity = self.popularity(step)
        shares = popularity * (num_tokens * num_topk / popularity.sum())
        if not float(shares.max()) <= num_tokens * (1 + 1e-9):
            most = float(shares.max()) / num_tokens
            excess = f"{self.name}: a token would choose the busiest expert {most:.2f} times"
            raise ValueError(f"{excess}; give a smaller --num-topk, or more --num-experts")
        rows = shares.floor().long()
        rows[(shares - rows).argsort(descending=True, stable=True)[: num_tokens * num_topk - int(rows.sum())]] += 1
        return rows

    def draw(self, num_tokens: int, num_topk: int, step: int) -> Tensor:
        """Return the experts of all tokens of the batch, [num_tokens, num_topk] int64, distinct in a row."""
        generator = generator_of(self.name, self.seed, step)
        rows = _lay(self.rows_per_expert(num_tokens, num_topk, step), num_tokens, generator)
        parts = rows[torch.randperm(num_tokens, generator=generator)].split(_COMPANY)
        mixed = torch.cat([_lay(part.flatten().bincount(), len(part), generator) for part in parts])
        return mixed[torch.randperm(num_tokens, generator=generator)]

    def tokens_of(self, rank: int, num_ranks: int, num_tokens: int) -> slice:
        """Return which of the batch's tokens a rank has."""
        bounds = [(r / num_ranks) ** (2 if self.is_ragged else 1) for r in (rank, rank + 1)]
        return slice(*(round(num_tokens * bound) for bound in bounds))


def _lay(rows_per_expert: Tensor, num_tokens: int, generator: torch.Generator) -> Tensor:
    """Lay the experts, each as often as it has rows, in a line, and cut the line into columns of rows [num_tokens, num_topk].

    An expert has at most num_tokens rows, which follow each other in the line, so no row has it twice.
    """
    order = torch.randperm(len(rows_per_expert), generator=generator)
    return order.repeat_interleave(rows_per_expert[order]).view(-1, num_tokens).t()


def lognormal(max_vio: float, num_experts: int, seed: int) -> Routing:
    """Return the routing with lognormal popularity whose busiest expert has 1 + max_vio times the mean."""
    normal = torch.randn(num_experts, generator=generator_of("lognormal", seed), dtype=torch.float64)
    low, high = 0.0, 1e3
    for _ in range(64):
        sigma = (low + high) / 2
        is_less = float((sigma * normal).softmax(0).max()) * num_experts < 1 + max_vio
        low, high = (sigma, high) if is_less else (low, sigma)
    return Routing(f"MaxVio {max_vio:g}", lambda step: (low * normal).softmax(0), seed)


def workload(name: str, num_experts: int, seed: int) -> Routing:
    """Return the routing with a name of `WORKLOADS`."""
    num_hot = max(1, num_experts // _PARTS)

    def popularity(step: int) -> Tensor:
        hot = torch.arange(num_hot)
        if name == "W1":
            hot = torch.randperm(num_experts, generator=generator_of(name, seed))[:num_hot]
        elif name == "W3":
            hot = hot * num_experts // num_hot
        elif name == "W6":
            hot = (hot + step * num_hot) % num_experts
        weights = torch.ones(num_experts, dtype=torch.float64)
        if name in ("W1", "W2", "W3", "W6") or (name == "W7" and step % _PERIOD == _PERIOD - 1):
            weights[hot] = HEAT
        elif name == "W5":
            weights[3::4] = 0
            weights[num_experts - num_experts // 4 :] = 0
        return weights

    return Routing(name, popularity, seed, is_ragged=name == "W4")


def trace(files: Sequence[Path], num_experts: int, seed: int) -> Routing:
    """Return the routing of recorded forwards, one of any layer in a step, in random order.

    files: what `deepep_moe.nn.writers.RoutingTrace` wrote, by rank: [forwards, layers, local experts] rows. Raises ValueError for another
    number of experts, or without rows.
    """
    loaded = [np.load(file) for file in files]
    shortest = min(map(len, loaded))
    rows = torch.from_numpy(np.concatenate([each[:shortest] for each in loaded], 2)).double().flatten(0, 1)
    rows = rows[rows.sum(1) > 0]
    if rows.shape[1] != num_experts or not len(rows):
        raise ValueError(f"--trace has {len(rows)} forwards of {rows.shape[1]} experts; give the files of all ranks, and --num-experts")
    order = torch.randperm(len(rows), generator=generator_of("trace", seed))
    return Routing("trace", lambda step: rows[order[step % len(rows)]], seed)
