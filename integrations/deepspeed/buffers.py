"""The buffers that the MoE layers of one process share."""

import atexit
from dataclasses import dataclass

import torch
import torch.distributed as dist

from deepep_moe.buffer import Buffer
from deepep_moe.integrations.deepspeed.options import Options
from deepep_moe.integrations.process_groups import agree_on_bound

# Backends of CPU tensors need no bound: their memory does not depend on it.
_UNBOUNDED = 2**31 - 1


@dataclass(frozen=True)
class Plan:
    """What a swapped layer was given: the options, and the most that layers sharing its buffer need."""

    options: Options
    num_local_experts: int
    """Experts of a rank in the buffer: the largest count of the layers that share it."""
    num_topk: int
    """Experts of a token, of the layer with most."""

    @property
    def lanes(self) -> int:
        """Experts of a row in the buffer: exact mode sends a row for each."""
        return 1 if self.options.exact else self.num_topk

    @property
    def rows_of_token(self) -> int:
        """That a dispatch gets, at most."""
        return self.num_topk if self.options.exact else 1


class BufferRegistry:
    """One buffer per (group, hidden) and plan. Layers that share one run one after another, in any dtype."""

    def __init__(self) -> None:
        self._buffers: dict[tuple, Buffer] = {}

    def get(self, group: dist.ProcessGroup, num_tokens: int, hidden: int, plan: Plan, device: torch.device) -> Buffer:
        """The buffer, constructed by the first call, which every rank of `group` must make together. Raises what `Buffer` raises, and
        ValueError for more tokens than it has room for; the peers raise EPPeerError."""
        key = (group, hidden, plan, device.type)
        buffer = self._buffers.get(key)
        if buffer is None:
            buffer = self._buffers[key] = self._make(group, num_tokens, hidden, plan, device)
        if num_tokens * plan.rows_of_token > buffer.num_max_tokens_per_rank:
            bound = buffer.num_max_tokens_per_rank // plan.rows_of_token
            raise buffer.refused(ValueError(
                f"{num_tokens} tokens in a forward, and MoE layers have room for {bound}, the most of their first forward if nothing else "
                "was said; set num_max_tokens_per_rank, an argument of replace_moe_layers and a key of \"deepep_moe\" in ds_config, to the "
                "most tokens that a rank ever has"
            ))  # fmt: skip
        return buffer

    def _make(self, group: dist.ProcessGroup, num_tokens: int, hidden: int, plan: Plan, device: torch.device) -> Buffer:
        options = plan.options
        if device.type == "cpu":
            bound = _UNBOUNDED
        else:
            bound = (options.num_max_tokens_per_rank or agree_on_bound(group, num_tokens, device)) * plan.rows_of_token
        if not self._buffers:
            atexit.register(self.destroy)
        num_experts = plan.num_local_experts * dist.get_world_size(group)
        return Buffer(group, bound, hidden, num_experts, plan.lanes, backend=options.backend, num_sms=options.num_sms)

    def __len__(self) -> int:
        return len(self._buffers)

    def backends(self) -> list[str]:
        """Those of all buffers, each once."""
        return sorted({buffer.backend for buffer in self._buffers.values()})

    def keep(self, plans: set[Plan]) -> None:
        """Destroy the buffers of all other plans."""
        for key in [key for key in self._buffers if key[2] not in plans]:
            self._buffers.pop(key).destroy()

    def destroy(self) -> None:
        """Destroy all buffers. The next `get` constructs new ones."""
        atexit.unregister(self.destroy)
        while self._buffers:
            self._buffers.popitem()[1].destroy()


shared = BufferRegistry()
