"""One routing of all ranks with what the reference makes of it in a layout, for DeepEP's newer buffers. Runs in workers."""

from typing import Any

import torch
from exchange_cases import Case, assert_same

from deepep_moe import ops, reference


class Wanted:
    """The results of a case on this rank, from the inputs of all ranks; `topk_idx` replaces the case's routing."""

    def __init__(self, case: Case, rank: int, layout: str, fp8: bool = False, topk_idx: list[torch.Tensor] | None = None):
        inputs = [case.inputs(r) for r in range(case.num_ranks)]
        xs, idxs, weights = (list(column) for column in zip(*inputs, strict=True))
        self.case, self.rank = case, rank
        self.idxs = idxs if topk_idx is None else topk_idx
        self.x, self.topk_idx, self.topk_weights = inputs[rank]
        self.scales = None
        scales = None
        if fp8:
            xs, scales = (list(column) for column in zip(*map(ops.quantize_fp8, xs), strict=True))
            self.x, self.scales = xs[rank], scales[rank]
        how: dict[str, Any] = {"layout": layout, "expert_alignment": case.expert_alignment}
        self.received = reference.dispatch(xs, self.idxs, weights, case.num_experts, x_scales=scales, **how)
        self.mine = self.received[rank]
        self.outputs = [
            case.expert_outputs(r, len(there.recv_x)).to(torch.bfloat16 if fp8 else case.dtype) for r, there in enumerate(self.received)
        ]

    @property
    def num_rows_per_expert(self) -> list[int]:
        alignment = self.case.expert_alignment
        return [-(-count // alignment) * alignment for count in self.mine.num_recv_tokens_per_expert]

    def lanes(self, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
        """Numbers that lie as recv_topk_weights does, and what a combine brings back of them."""
        values = [there.recv_topk_weights * scale for there in self.received]
        return values[self.rank], reference.combine_lane_values(values, self.received, self.idxs)[self.rank]

    def combined(self, bias: torch.Tensor | None = None) -> torch.Tensor:
        biases = None
        if bias is not None:
            biases = [torch.zeros(n, self.case.hidden, dtype=bias.dtype) for n in self.case.num_tokens]
            biases[self.rank] = bias
        return reference.combine(self.outputs, self.received, self.case.num_tokens, None, biases)[self.rank]


def check_start(name: str, ours: torch.Tensor, want: torch.Tensor, rest: float = 0) -> None:
    """The first rows are `want`, all others hold `rest`."""
    assert_same(name, ours[: len(want)], want)
    assert (ours[len(want) :].float() == rest).all(), f"{name}: rows behind the last group"


def padded(rows: torch.Tensor, num_rows: int) -> torch.Tensor:
    """`rows` and then NaN, which no call may read."""
    return torch.cat([rows, rows.new_full((num_rows - len(rows), *rows.shape[1:]), float("nan"))])
