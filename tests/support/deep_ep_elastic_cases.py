"""One routing of all ranks with what the reference makes of it in a layout, for DeepEP's newer buffers. Runs in workers."""

import torch
from deep_ep_cases import Expected
from exchange_cases import Case, assert_same

from deepep_moe import reference


class Wanted(Expected):
    """The results of a case on this rank, with outputs of experts for a combine."""

    def __init__(self, case: Case, rank: int, layout: str, fp8: bool = False, topk_idx: list[torch.Tensor] | None = None):
        super().__init__(case, rank, fp8, layout, case.expert_alignment, topk_idx)
        self.x, self.scales = self.x if fp8 else (self.x, None)
        dtype = torch.bfloat16 if fp8 else case.dtype
        self.outputs = [case.expert_outputs(r, len(there.recv_x)).to(dtype) for r, there in enumerate(self.received)]
        self.num_rows_per_expert = self.counts

    def lanes(self, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
        """Numbers that lie as recv_topk_weights does, and what a combine brings back of them."""
        values = [there.recv_topk_weights * scale for there in self.received]
        return values[self.rank], reference.combine_lane_values(values, self.received, self.idxs)[self.rank]

    def combined(self, bias: torch.Tensor | None = None) -> torch.Tensor:
        return super().combined(self.outputs, bias)


def check_start(name: str, ours: torch.Tensor, want: torch.Tensor, rest: float = 0) -> None:
    """The first rows are `want`, all others hold `rest`."""
    assert_same(name, ours[: len(want)], want)
    assert (ours[len(want) :].float() == rest).all(), f"{name}: rows behind the last group"


def padded(rows: torch.Tensor, num_rows: int) -> torch.Tensor:
    """`rows` and then NaN, which no call may read."""
    return torch.cat([rows, rows.new_full((num_rows - len(rows), *rows.shape[1:]), float("nan"))])
