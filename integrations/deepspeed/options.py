"""The options of the DeepSpeed adapter: arguments of `replace_moe_layers`, and keys of the section "deepep_moe" of ds_config."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from deepep_moe.arguments import as_float, as_int, check_choice
from deepep_moe.exchange.backends.select import BACKENDS
from deepep_moe.group.settings import SUMS
from deepep_moe.integrations.deepspeed.expert_weights import Reader
from deepep_moe.nn.balance import Balance, check_is_balance

SECTION = "deepep_moe"
Layer = Any
"""A MOELayer or an AutoEPMoELayer of DeepSpeed, swapped or not. Its modules have no types."""


@dataclasses.dataclass(frozen=True)
class Options:
    """The arguments of `replace_moe_layers`, which documents them. Raises ValueError or TypeError for wrong ones."""

    exact: bool = True
    backend: str = "auto"
    num_max_tokens_per_rank: int | None = None
    num_sms: int | None = None
    gate: bool = True
    expert_bias_update_rate: float | None = None
    grouped_experts: bool | Reader | None = None
    ranks_per_node: int | None = None
    fp8: bool = False
    sums: str = "ranks"
    balance: Balance | None = None

    def __post_init__(self) -> None:
        for name in ("exact", "gate", "fp8"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name} is {getattr(self, name)!r}; it must be true or false")
        if not isinstance(self.grouped_experts, bool | None) and not callable(self.grouped_experts):
            raise TypeError(
                f"grouped_experts is {self.grouped_experts!r}; it must be true, false or null, or in Python a function of an expert"
            )
        if self.fp8 and (self.exact or self.grouped_experts is False):
            raise ValueError(
                f"fp8 is True with exact={self.exact} and grouped_experts={self.grouped_experts}; pass exact=False, and do not "
                "set grouped_experts to False, or leave fp8 out"
            )
        if self.balance is not None:
            check_is_balance(self.balance)
            if self.exact or self.grouped_experts is False:
                raise ValueError(
                    f"balance is given with exact={self.exact}, grouped_experts={self.grouped_experts}; pass exact=False, and do not set "
                    "grouped_experts to False, or leave balance out"
                )
        for name, choices in (("backend", BACKENDS), ("sums", SUMS)):
            check_choice(name, getattr(self, name), choices)
        if self.sums != "ranks" and (self.exact or self.fp8):
            raise ValueError(
                f"sums is {self.sums!r} with exact={self.exact} and fp8={self.fp8}; pass exact=False, as exact mode has DeepSpeed's sums, "
                "and leave fp8 out, whose experts apply the weights"
            )
        for name, least in (("num_max_tokens_per_rank", 1), ("num_sms", 0), ("ranks_per_node", 1)):
            if getattr(self, name) is not None:
                as_int(name, getattr(self, name), "a whole number or null", least)
        rate = self.expert_bias_update_rate
        if rate is not None and not 0 < as_float("expert_bias_update_rate", rate) < math.inf:
            raise ValueError(f"expert_bias_update_rate is {rate}; it must be a positive number such as 0.001, or be left out for no bias")

    def refuse_lanes(self, reason: str) -> None:
        """Raise ValueError if sums go by lanes: DeepSpeed's own forward, which would run for this reason, adds in another order."""
        if self.sums != "ranks":
            raise ValueError(f"sums is {self.sums!r}, but DeepSpeed's own dispatch would run: {reason}")


def options_of(ds_config: Mapping[str, object]) -> Options | None:
    """Return the options of the section "deepep_moe" of a ds_config, or None if there is no such section or it says `"enabled": false`.

    Raises ValueError for unknown keys, and TypeError or ValueError for wrong values, with the name of the section.
    """
    if SECTION not in ds_config:
        return None
    section = ds_config[SECTION]
    if not isinstance(section, Mapping):
        raise TypeError(f'"{SECTION}" of ds_config is {section!r}; it must be a dictionary such as {{"enabled": true}}')
    known = ["enabled", *(field.name for field in dataclasses.fields(Options))]
    unknown = sorted(set(section) - set(known))
    if unknown:
        raise ValueError(f'"{SECTION}" of ds_config has unknown keys {unknown}; the known keys are {known}')
    values = dict(section)
    enabled = values.pop("enabled", True)
    if not isinstance(enabled, bool):
        raise TypeError(f'"{SECTION}" of ds_config: enabled is {enabled!r}; it must be true or false')
    if callable(values.get("grouped_experts")):
        raise TypeError(f'"{SECTION}" of ds_config: grouped_experts is a function; pass it to replace_moe_layers, here only true or false')
    try:
        if (num_slots := values.get("balance")) is not None:  # a dictionary has no Balance
            values["balance"] = Balance(as_int("balance", num_slots, "a number of expert slots such as 4, or null", 1))
        options = Options(**values)
    except (TypeError, ValueError) as error:
        raise type(error)(f'"{SECTION}" of ds_config: {error}') from None
    return options if enabled else None
