"""What tests of the DeepEP interface share: one routing of all ranks with what the reference makes of it. Runs in workers."""

from typing import Any

import torch
import torch.distributed as dist
from exchange_cases import Case, assert_same, device_of

from deepep_moe import ops, reference
from deepep_moe.compat.deep_ep import Buffer

ALIGNMENT = 4


class Expected:
    """The results of a case on this rank, from those of all ranks; `topk_idx` replaces the case's routing."""

    def __init__(
        self, case: Case, rank: int, fp8: bool = False, layout: str = "rank", alignment: int = ALIGNMENT, topk_idx: Any = None
    ) -> None:
        inputs = [case.inputs(r) for r in range(case.num_ranks)]
        xs, idxs, weights = (list(column) for column in zip(*inputs, strict=True))
        self.case, self.rank, self.alignment, self.idxs = case, rank, alignment, idxs if topk_idx is None else topk_idx
        self.x, self.topk_idx, self.topk_weights = inputs[rank]
        scales = None
        if fp8:
            xs, scales = (list(column) for column in zip(*map(ops.quantize_fp8, xs), strict=True))
            self.x = xs[rank], scales[rank]
        how: dict[str, Any] = {"layout": layout, "expert_alignment": alignment}
        self.received = reference.dispatch(xs, self.idxs, weights, case.num_experts, x_scales=scales, **how)
        self.mine = self.received[rank]

    def in_rank(self, rank: int) -> torch.Tensor:
        """[num_tokens, num_ranks] bool, of a rank's tokens."""
        per_rank = self.case.num_experts // self.case.num_ranks
        owners = torch.where(self.idxs[rank] >= 0, self.idxs[rank] // per_rank, -1)
        return (owners[:, :, None] == torch.arange(self.case.num_ranks)).any(1)

    @property
    def counts(self) -> list[int]:
        return [-(-count // self.alignment) * self.alignment for count in self.mine.num_recv_tokens_per_expert]

    def check_rows(self, recv_x: Any) -> None:
        """Rows beyond those of the reference are room."""
        if not isinstance(self.x, tuple):
            return assert_same("recv_x", recv_x[: len(self.mine.recv_x)], self.mine.recv_x)
        for part, want in zip(recv_x, (self.mine.recv_x, self.mine.recv_x_scales), strict=True):
            assert_same("recv_x", part[: len(want)], want)

    def combined(self, outputs: list[torch.Tensor], bias: torch.Tensor | None = None) -> torch.Tensor:
        biases = None
        if bias is not None:
            biases = [torch.zeros(n, self.case.hidden, dtype=bias.dtype) for n in self.case.num_tokens]
            biases[self.rank] = bias
        return reference.combine(outputs, self.received, self.case.num_tokens, None, biases)[self.rank]


def given(value: Any, device: torch.device) -> Any:
    """A tensor on `device`, or a pair whose scales lie in column order, as DeepEP's callers keep them."""
    if isinstance(value, tuple):
        return value[0].to(device), value[1].to(device).T.contiguous().T
    return value.to(device)


def make_buffer(backend: str, rank: int, **settings: Any) -> tuple[Buffer, torch.device]:
    device = device_of(backend, rank)
    return Buffer(dist.group.WORLD, 1 << 20, 0, explicitly_destroy=True, **settings), device
