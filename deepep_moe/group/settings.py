"""The settings that all ranks of a buffer agree on."""

import logging
from dataclasses import dataclass, replace
from typing import Any, NoReturn, Self

from torch import Tensor

from deepep_moe import _C, config
from deepep_moe.arguments import as_float, as_int, check_choice

logger = logging.getLogger("deepep_moe")
MAX_NUMBER = 2**31 - 1
"""The largest number of rows, columns or experts: native code counts them in 32 bits."""
SUMS = ("ranks", "lanes", "lanes_fma")
"""Combine adds a token's rows (docs/design/contract.md) rank by rank, or lane by lane without or with fused multiply-adds."""


@dataclass(frozen=True)
class Settings:
    """The sizes and the deadline of a buffer, equal on all ranks except for `rank`."""

    num_ranks: int
    rank: int
    num_max_tokens_per_rank: int
    hidden: int
    num_experts: int
    num_topk: int
    timeout_s: float
    ranks_per_node: int = 0
    """The number of consecutive ranks that are a node; 0 until `find_nodes` has set it."""
    sums: str = "ranks"
    """One of `SUMS`."""
    lanes: int = 1
    """The top-k of the caller's tokens, if sums go by lanes. The exchange then moves each (token, lane) as a token for top-1, token by
    token, and `num_topk` and `num_max_tokens_per_rank` count these."""
    expert_slot_bytes: int = 0
    """Memory of a rank for copies of experts (`ExpertSlots`)."""

    @property
    def num_local_experts(self) -> int:
        return self.num_experts // self.num_ranks

    @property
    def rows_of_expert(self) -> int:
        """Return the most rows of a local expert: a token of the caller names an expert once."""
        return self.num_ranks * self.num_max_tokens_per_rank // self.lanes

    @property
    def is_by_lane(self) -> bool:
        return self.sums != "ranks"

    @property
    def native(self) -> dict[str, Any]:
        """The arguments of every native exchange."""
        names = ("num_ranks", "rank", "num_experts", "num_topk", "hidden", "timeout_s")
        return {name: getattr(self, name) for name in names}

    @property
    def num_nodes(self) -> int:
        return self.num_ranks // self.ranks_per_node

    @property
    def node(self) -> int:
        """Return the number of this rank's node."""
        return self.rank // self.ranks_per_node


def _shown(name: str) -> Any:
    return property(lambda sizes: getattr(sizes._settings, name))


class Sizes:
    """The properties with which a buffer shows its settings."""

    _settings: Settings
    num_ranks: int = _shown("num_ranks")
    rank: int = _shown("rank")
    hidden: int = _shown("hidden")
    num_experts: int = _shown("num_experts")
    num_local_experts: int = _shown("num_local_experts")

    def __deepcopy__(self, memo: dict[int, object]) -> Self:
        return self  # copies of a layer share the buffer

    def __reduce__(self) -> NoReturn:
        name = type(self).__name__
        raise TypeError(f"a {name} is memory of running processes and cannot be saved; save the state_dict() of what holds it")

    @property
    def num_topk(self) -> int:
        return self._settings.num_topk * self._settings.lanes

    @property
    def num_max_tokens_per_rank(self) -> int:
        return self._settings.num_max_tokens_per_rank // self._settings.lanes

    @property
    def sums(self) -> str:
        """The way in which combine adds a token's rows: "ranks", "lanes" or "lanes_fma"."""
        return self._settings.sums

    def _log_backend(self, backend: str, workspace_bytes: int) -> None:
        """Say on rank 0 which backend serves."""
        s, kind = self._settings, type(self).__name__
        if s.rank == 0:
            logger.info(
                "%s: backend %s, %d ranks, %d experts, top-%d, hidden %d, workspace of %.1f MiB per rank",
                kind, backend, s.num_ranks, s.num_experts, self.num_topk, s.hidden, workspace_bytes / 2**20,
            )  # fmt: skip


def check_settings(
    s: Settings, backend: str, backends: tuple[str, ...], timeout_s: float | None, ranks_per_node: int | None = None
) -> Settings:
    """Return `s` with plain numbers, the deadline in force and the nodes that were asked for. Raises TypeError or ValueError."""
    check_choice("backend", backend, backends)
    plain: dict[str, Any] = {}
    for name, least in (("hidden", 1), ("num_experts", 1), ("num_topk", 1), ("num_max_tokens_per_rank", 0)):
        plain[name] = as_int(name, getattr(s, name), least=least, most=MAX_NUMBER)
    try:
        deadline = config.timeout_s() if timeout_s is None else as_float("timeout_s", timeout_s)
    except TypeError:
        deadline = 0.0
    if not 0 < deadline < 1e9:
        raise ValueError(f"timeout_s is {timeout_s!r}; it must be a positive number of seconds")
    s = replace(s, timeout_s=deadline, **plain)
    if s.hidden % (_C.ROW_ALIGNMENT // 4):
        raise ValueError(f"hidden is {s.hidden}; rows are multiples of 16 bytes: 4 columns in fp32, 8 in bf16 and fp16, 16 in fp8")
    if s.num_experts % s.num_ranks:
        raise ValueError(f"num_experts is {s.num_experts}; it must be a multiple of the group's {s.num_ranks} ranks")
    if ranks_per_node is not None:
        s = replace(s, ranks_per_node=as_int("ranks_per_node", ranks_per_node))
        if s.ranks_per_node < 1 or s.num_ranks % s.ranks_per_node:
            raise ValueError(f"ranks_per_node is {s.ranks_per_node}; it must be None or divide the group's {s.num_ranks} ranks")
    if s.num_topk > min(s.num_experts, _C.MAX_TOPK):
        raise ValueError(f"num_topk is {s.num_topk}; it must be at most num_experts ({s.num_experts}) and at most {_C.MAX_TOPK}")
    if s.sums not in SUMS:
        raise ValueError(f"sums is {s.sums!r}; it must be one of {list(SUMS)} (DEEPEP_MOE_SUMS sets it for deep_ep)")
    if s.is_by_lane:
        s = replace(s, lanes=s.num_topk, num_topk=1, num_max_tokens_per_rank=s.num_topk * s.num_max_tokens_per_rank)
    return s


def one_by_one(name: str, tensor: object, num_tokens: int, s: Settings) -> Any:
    """Return a tensor [num_tokens, lanes] as the exchange takes it: [num_tokens * lanes, 1]."""
    if not isinstance(tensor, Tensor):
        return tensor  # None, or what the checks of the call refuse
    if tuple(tensor.shape) != (num_tokens, s.lanes):
        raise ValueError(f"{name} has shape {list(tensor.shape)}; it must be [{num_tokens}, {s.lanes}]")
    return tensor.reshape(-1, 1)
