"""The options of the Megatron-Core adapter, which are the arguments of `enable()`."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Options:
    """The arguments of `enable()`, checked."""

    num_max_tokens_per_rank: int | None = None
    backend: str = "auto"
    expert_alignment: int = 1
    gate: bool = True
    num_sms: int | None = None
    grouped_experts: bool = False
