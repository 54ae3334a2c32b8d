"""DeepEP as a baseline in the same run: `--peer deep_ep`."""

import importlib
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from deepep_moe.bench.common.verify import close_to, expected_combine
from deepep_moe.bench.common.workload import Inputs, Operation, Shape
from deepep_moe.errors import BackendUnavailableError

PEERS = ("deep_ep",)
_NUM_SMS = 24  # as in DeepEP's own benchmark


def load_peer(name: str) -> Any:
    """Import and return the package. Raises BackendUnavailableError, with the reason and the fix, where that fails."""
    try:
        return importlib.import_module(name)
    except (ImportError, OSError) as error:  # OSError: a library that the package links is missing
        raise BackendUnavailableError(
            f"--peer {name}: the package {name} is not importable here ({error}); install DeepEP, built for this PyTorch and CUDA, "
            "from https://github.com/deepseek-ai/DeepEP, or leave --peer out"
        ) from error


class DeepEP:
    """Runs `deep_ep.Buffer` within one host: its layout kernel, dispatch and combine of bf16 rows, one row per (token, rank)."""

    name = "deep_ep"

    def __init__(self, shape: Shape, group: "dist.ProcessGroup"):
        self.shape, self.module = shape, load_peer(self.name)
        self.module.Buffer.set_num_sms(_NUM_SMS)
        self.configs = [getattr(self.module.Buffer, f"get_{op}_config")(shape.num_ranks) for op in ("dispatch", "combine")]
        size = max(config.get_nvl_buffer_size_hint(2 * shape.hidden, shape.num_ranks) for config in self.configs)
        self.buffer = self.module.Buffer(group, size, 0)

    def _dispatch(self, x: torch.Tensor, topk_idx: torch.Tensor, topk_weights: torch.Tensor) -> tuple[Any, ...]:
        per_rank, _, per_expert, is_token_in_rank, _ = self.buffer.get_dispatch_layout(topk_idx, self.shape.num_experts)
        return self.buffer.dispatch(
            x,
            num_tokens_per_rank=per_rank,
            is_token_in_rank=is_token_in_rank,
            num_tokens_per_expert=per_expert,
            topk_idx=topk_idx,
            topk_weights=topk_weights,
            config=self.configs[0],
        )

    def operations(self, inputs: Inputs) -> list[Operation]:
        """Return its calls, after a check that they do the same work. Collective; raises EPError."""
        idx = inputs.topk_idx.to(getattr(self.module, "topk_idx_t", torch.int64))
        arguments = inputs.x, idx, inputs.topk_weights
        recv_x, _, _, _, handle, _ = self._dispatch(*arguments)
        combine = partial(self.buffer.combine, recv_x, handle, config=self.configs[1])
        close_to("its combine", combine()[0], expected_combine(inputs, self.shape, "rank"))
        calls = {"dispatch": partial(self._dispatch, *arguments), "combine": combine}
        return [Operation(op, "bfloat16", "rank", 2 * self.shape.hidden, call, _NUM_SMS, self.name) for op, call in calls.items()]
