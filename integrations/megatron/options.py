"""The options of the Megatron-Core adapter, which are the arguments of `enable()`."""

import math
from dataclasses import dataclass
from typing import Any

from deepep_moe.arguments import as_float, as_int, check_choice
from deepep_moe.exchange.backends.select import BACKENDS
from deepep_moe.exchange.checks import check_max_sms, check_num_sms
from deepep_moe.group.settings import SUMS
from deepep_moe.nn.balance import Balance, check_is_balance
from deepep_moe.ops.fp8_products import GROUP_ALIGNMENT, check_alignment

Config = Any
"""A TransformerConfig of Megatron-Core, whose fields depend on its version."""
EXPERTS = ("auto", "framework", "own")


@dataclass(frozen=True)
class Options:
    """The arguments of `enable()`. Raises ValueError for values out of bounds, TypeError for wrong types."""

    num_max_tokens_per_rank: int | None = None
    backend: str = "auto"
    expert_alignment: int = 1
    gate: bool = True
    num_sms: int | None = None
    experts: str = "auto"
    sync_free: bool = False
    recv_capacity_factor: float | None = None
    metrics: bool = False
    ranks_per_node: int | None = None
    max_sms: int | None = None
    fp8: bool = False
    sums: str = "ranks"
    balance: Balance | None = None

    def __post_init__(self) -> None:
        as_int("expert_alignment", self.expert_alignment, least=1)
        for name in ("num_max_tokens_per_rank", "ranks_per_node"):
            if getattr(self, name) is not None:
                as_int(name, getattr(self, name), least=1)
        check_num_sms(self.num_sms)
        check_max_sms(self.max_sms)
        for name in ("gate", "sync_free", "metrics", "fp8"):
            if not isinstance(value := getattr(self, name), bool):
                raise ValueError(f"{name} is {value!r}; it must be True or False")
        for name, choices in (("experts", EXPERTS), ("backend", BACKENDS), ("sums", SUMS)):
            check_choice(name, getattr(self, name), choices)
        if self.fp8:
            self._check_fp8()
        if self.balance is not None:
            check_is_balance(self.balance)
            if self.experts == "framework":
                raise ValueError("balance and experts='framework' are given, whose experts run no copies; leave one of the two out")
        if self.recv_capacity_factor is not None:
            check_capacity_factor("recv_capacity_factor", self.recv_capacity_factor)
            if not self.sync_free:
                raise ValueError("recv_capacity_factor is given without sync_free; pass sync_free=True, or leave it out")

    def _check_fp8(self) -> None:
        if self.experts == "framework":
            raise ValueError("fp8 is True, but experts is 'framework', whose experts take no fp8 rows; leave one of the two out")
        if self.sums != "ranks":
            raise ValueError(f"fp8 is True, whose experts apply the probs, but sums={self.sums!r} applies them at the token's rank")
        if self.expert_alignment == 1:
            object.__setattr__(self, "expert_alignment", GROUP_ALIGNMENT)
        check_alignment("expert_alignment", self.expert_alignment)


def check_capacity_factor(name: str, value: object) -> None:
    """Raise TypeError or ValueError for what is no factor."""
    if not 0 < as_float(name, value) < math.inf:
        raise ValueError(f"{name} is {value!r}; it must be a positive number, 1 for an even share of all rows")
