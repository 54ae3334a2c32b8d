"""The rows of low-latency calls on CPUs: what a rank writes for its peers, and what it makes of what they have written.

The results are those of `deepep_moe.reference.low_latency`. `shm_calls` says when something may be written and read, and waits.
"""

from collections.abc import Callable
from functools import wraps

import torch
from torch import Tensor

from deepep_moe import _C
from deepep_moe.group.settings import Settings
from deepep_moe.library import unwatched
from deepep_moe.low_latency.shm_calls import Rows, ShmCalls, handle_offsets, members
from deepep_moe.ops import ue8m0
from deepep_moe.ops.quant import FP8, dequantize_fp8, next_powers_of_two, quantize_fp8
from deepep_moe.ops.routing import refuse_bad_routing

_CPU = torch.device("cpu")  # whatever the caller's default device is


class State:
    """Views of a handle's memory, which LowLatencyHandleLayout describes. PyTorch does not count changes made through them."""

    def __init__(self, state: Tensor, s: Settings):
        first_count, first_mask, first_row, _ = handle_offsets(s)
        memory = state.data
        num_tokens, num_lanes = s.num_max_tokens_per_rank, s.num_ranks * s.num_max_tokens_per_rank * s.num_topk
        rows = memory[first_row : first_row + 8 * num_lanes]
        shape = (s.num_ranks, num_tokens, s.num_topk, 2)
        self.number = memory[:8].view(torch.int64)
        self.num_tokens = memory[first_count : first_count + 4 * s.num_ranks].view(torch.int32)
        self.rank_masks = memory[first_mask : first_mask + 4 * num_tokens].view(torch.int32)
        self.rows = rows.view(torch.int32).view(shape)[..., 0]
        self.weights = rows.view(torch.float32).view(shape)[..., 1]


def _unwatched(move: Callable[..., None]) -> Callable[..., None]:
    """Let nobody see what `move` does in the middle of a call."""

    @wraps(move)
    def move_unwatched(*args: object) -> None:
        with unwatched(), torch.inference_mode():
            move(*args)

    return move_unwatched


class DispatchRows(Rows):
    """The rows of one dispatch of this rank."""

    def __init__(
        self, calls: ShmCalls, x: Tensor, topk_idx: Tensor, topk_weights: Tensor | None, state: Tensor, recv_x: Tensor,
        recv_x_scales: Tensor | None, counts: Tensor, statistics: Tensor, is_rounded: bool,
    ):  # fmt: skip
        self._calls, self._s = calls, calls.settings
        self._x, self._topk_idx, self._topk_weights, self._is_rounded = x, topk_idx, topk_weights, is_rounded
        self._state = State(state, self._s)
        self._recv_x, self._recv_x_scales, self._counts, self._statistics = recv_x, recv_x_scales, counts, statistics

    @_unwatched
    def write(self, number: int, ranks: int) -> None:
        s, state = self._s, self._state
        refuse_bad_routing(self._topk_idx.view(-1, s.num_topk * s.lanes), s.num_experts)
        state.number.fill_(number)
        state.num_tokens.fill_(-1)
        num_tokens, rows = len(self._x), self._rows_on_their_way()
        rank_of_lane = torch.where(self._topk_idx >= 0, self._topk_idx // s.num_local_experts, -1)
        state.rank_masks[:num_tokens] = 0
        for rank in range(s.num_ranks):
            goes = rank_of_lane == rank
            if ranks >> rank & 1:
                state.rank_masks[:num_tokens] |= goes.any(1).int() << rank
            else:
                self._statistics[-1] += goes.sum()
        for rank in members(ranks):
            area = self._calls.area(rank, s.rank, number)
            area.experts[:num_tokens] = self._topk_idx
            area.weights[:num_tokens] = 1.0 if self._topk_weights is None else self._topk_weights
            area.slots[:num_tokens, : rows.shape[1]] = rows

    def _rows_on_their_way(self) -> Tensor:
        """Return [num_tokens, row_bytes] uint8: elements, then for fp8 words of scales."""
        if self._recv_x_scales is None:
            return self._x.view(torch.uint8)
        y, scales = quantize_low_latency(self._x, self._is_rounded)
        words = ue8m0.pack(scales) if self._is_rounded else scales
        return torch.cat((y.view(torch.uint8), words.view(torch.uint8)), 1)

    @_unwatched
    def read(self, number: int, entered: int, arrived: int, values: list[int]) -> None:
        s, state = self._s, self._state
        num_local, capacity = s.num_local_experts, s.rows_of_expert
        areas = {source: self._calls.area(s.rank, source, number) for source in members(entered)}
        local = torch.full(state.rows.shape, -1, dtype=torch.int64, device=_CPU)
        for source, area in areas.items():
            local[source, : values[source]] = area.experts[: values[source]].long() - s.rank * num_local
            state.weights[source, : values[source]] = area.weights[: values[source]]
        is_here = (local >= 0) & (local < num_local)
        local = torch.where(is_here, local, num_local)
        # Rows of an expert lie by source, those of a source by the caller's token.
        token = torch.arange(local.shape[1], device=_CPU)
        first = torch.arange(s.num_ranks, device=_CPU)[:, None] * (capacity // s.num_ranks)
        numbers = (first + token // s.lanes)[..., None]
        chosen = torch.zeros((capacity, num_local + 1), dtype=torch.int64, device=_CPU)
        chosen[numbers, local] = 1
        places = (chosen.cumsum(0) - 1)[numbers, local]
        state.rows.copy_(torch.where(is_here, local * capacity + places, -1))
        num_rows = chosen[:, :num_local].sum(0)
        self._counts.copy_(num_rows)
        with self._calls.counting:
            self._statistics[:num_local] += num_rows
        for source, area in areas.items():
            tokens, lanes = is_here[source].nonzero(as_tuple=True)
            slots = area.slots if arrived >> source & 1 else torch.zeros_like(area.slots)
            self._place(slots, tokens, local[source, tokens, lanes], places[source, tokens, lanes])
        state.num_tokens.copy_(torch.tensor(values, dtype=torch.int32, device=_CPU))

    def _place(self, slots: Tensor, tokens: Tensor, experts: Tensor, places: Tensor) -> None:
        row_bytes = self._recv_x.shape[2] * self._recv_x.element_size()  # a multiple of 16; few large elements are copied faster
        self._recv_x.view(torch.int64)[experts, places] = slots[:, :row_bytes].view(torch.int64)[tokens]
        if self._recv_x_scales is not None:
            words = slots[:, row_bytes : row_bytes + 4 * self._recv_x_scales.shape[2]].view(torch.int32)
            self._recv_x_scales.view(torch.int32)[experts, places] = words[tokens]


class CombineRows(Rows):
    """The rows of one combine of this rank."""

    def __init__(self, calls: ShmCalls, x: Tensor, state: Tensor, topk_weights: Tensor | None, combined_x: Tensor, fp8: bool):
        self._calls, self._s, self._fp8 = calls, calls.settings, fp8
        self._x, self._topk_weights, self._combined_x = x, topk_weights, combined_x
        self._state = State(state, self._s)

    @_unwatched
    def write(self, number: int, ranks: int) -> None:
        self._check_state()
        if self._topk_weights is None:
            return self._write_sums(number, ranks)
        for rank in members(ranks):
            self._calls.area(rank, self._s.rank, number).weights[: len(self._topk_weights)] = self._topk_weights

    @_unwatched
    def write_weighted(self, number: int, ranks: int) -> None:
        self._write_sums(number, ranks)

    def _check_state(self) -> None:
        """PyTorch does not count every change of the handle's memory."""
        s, state = self._s, self._state
        if (state.num_tokens < 0).any():
            raise ValueError("handle is of a dispatch that was not received; call its hook, or wait for its event, before combine")
        is_token = torch.arange(s.num_max_tokens_per_rank, device=_CPU) < state.num_tokens[:, None]
        most_rows = s.num_local_experts * s.rows_of_expert
        is_out = (state.num_tokens > s.num_max_tokens_per_rank).any() or (state.rows.amax(2) >= most_rows)[is_token].any()
        if is_out or (state.rank_masks[: len(self._combined_x)] >> s.num_ranks != 0).any():
            raise ValueError("the state of this handle was changed after its dispatch; dispatch again")

    def _write_sums(self, number: int, ranks: int) -> None:
        s, x = self._s, self._x.view(-1, self._s.hidden)
        for rank in members(ranks):
            num_tokens = int(self._state.num_tokens[rank])
            weights = self._state.weights[rank] if self._topk_weights is None else self._calls.area(s.rank, rank, number).weights
            rows = self._state.rows[rank, :num_tokens].long()
            sums = torch.zeros((num_tokens, s.hidden), dtype=torch.float32, device=_CPU)
            for lane in range(s.num_topk):
                here = (rows[:, lane] >= 0).nonzero()[:, 0]
                sums[here] += weights[here, lane, None] * x[rows[here, lane]].float()
            sent = (
                torch.cat([part.view(torch.uint8) for part in quantize_fp8(sums)], 1) if self._fp8 else sums.to(x.dtype).view(torch.uint8)
            )
            self._calls.area(rank, s.rank, number).slots[:num_tokens, : sent.shape[1]] = sent

    @_unwatched
    def read(self, number: int, entered: int, arrived: int, values: list[int]) -> None:
        s, out = self._s, self._combined_x
        masks = self._state.rank_masks[: len(out)]
        total = torch.zeros(out.shape, dtype=torch.float32, device=_CPU)
        for rank in members(arrived):
            tokens = (masks >> rank & 1).nonzero()[:, 0]
            total[tokens] += self._values(self._calls.area(s.rank, rank, number).slots, tokens)
        out.copy_(total)

    def _values(self, slots: Tensor, tokens: Tensor) -> Tensor:
        hidden = self._s.hidden
        if not self._fp8:
            return slots[:, : hidden * self._x.element_size()].view(self._x.dtype)[tokens].float()
        y, scales = slots[:, :hidden], slots[:, hidden : hidden + hidden // _C.SCALE_BLOCK * 4]
        return dequantize_fp8(y[tokens].view(FP8), scales.view(torch.float32)[tokens])


def quantize_low_latency(x: Tensor, is_rounded: bool) -> tuple[Tensor, Tensor]:
    """Return `x` as fp8 and its scales, rounded up to powers of two if so: then a block is divided by its scale."""
    y, scales = quantize_fp8(x)
    if not is_rounded:
        return y, scales
    scales = next_powers_of_two(scales)
    y = (x.float() / scales.repeat_interleave(_C.SCALE_BLOCK, dim=1)).clamp(-448, 448)
    return y.to(FP8), scales
