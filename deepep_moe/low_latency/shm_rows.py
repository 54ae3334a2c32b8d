"""The rows of low-latency calls on CPUs: what a rank writes for its peers, and what it makes of what they have written.

The results are those of `deepep_moe.reference.low_latency`. `shm_calls` says when something may be written and read, waits, and runs the
methods of both classes `unseen`. `what` packs what this rank does in the call, and all ranks must do the same; `value` goes with its flag.
"""

from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor

from deepep_moe import _C
from deepep_moe.device import DTYPES
from deepep_moe.event import Event
from deepep_moe.low_latency.checks import num_scale_columns
from deepep_moe.low_latency.handle import State
from deepep_moe.low_latency.shm_calls import ShmCalls, members, unseen
from deepep_moe.ops import ue8m0
from deepep_moe.ops.quant import FP8, dequantize_fp8, next_powers_of_two, quantize_fp8
from deepep_moe.ops.routing import refuse_bad_routing

_CPU = torch.device("cpu")  # whatever the caller's default device is
Empty: TypeAlias = Callable[[tuple[int, ...], torch.dtype], Tensor]


class DispatchRows:
    """The rows of one dispatch of this rank, with the fields of `_torch.LowLatencyReceived`."""

    is_combine = brings_weights = False
    event: Event | None = None

    def __init__(
        self, calls: ShmCalls, empty: Empty, x: Tensor, topk_idx: Tensor, topk_weights: Tensor | None, fp8: bool, scale_format: str
    ):
        s, capacity, is_rounded = calls.settings, calls.settings.rows_of_expert, scale_format == "ue8m0"
        self._calls, self._s, self._x, self._topk_idx, self._topk_weights = calls, s, x, topk_idx, topk_weights
        self.num_tokens, self.recv_x_scales = len(x), None
        self.recv_x = empty((s.num_local_experts, capacity, s.hidden), FP8 if fp8 else x.dtype)
        if fp8:
            num_columns, dtype = num_scale_columns(s.hidden, scale_format)
            self.recv_x_scales = empty((s.num_local_experts, num_columns, capacity), dtype).transpose(1, 2)
        self.num_recv_tokens_per_expert = empty((s.num_local_experts,), torch.int32)
        with torch.inference_mode(False):  # PyTorch counts no changes in this mode
            self.state = empty((calls.handle_bytes,), torch.uint8)
        with unseen():
            self._views = State(self.state, s)
        has_scales, has_weights = self.recv_x_scales is not None, topk_weights is not None
        self.what = _C.low_latency_what(False, DTYPES[x.dtype], has_scales, is_rounded, has_weights)
        self.value, self._is_rounded = self.num_tokens, is_rounded

    def write(self, number: int, ranks: int) -> None:
        """Write what `ranks`, a bit for each, read once this rank has entered the call. Raises ValueError for bad arguments."""
        s, state, num_tokens = self._s, self._views, self.num_tokens
        refuse_bad_routing(self._topk_idx.view(-1, s.num_topk * s.lanes), s.num_experts)
        state.number.fill_(number)
        state.num_tokens.fill_(-1)
        rows = self._rows_on_their_way()
        rank_of_lane = torch.where(self._topk_idx >= 0, self._topk_idx // s.num_local_experts, -1)
        state.rank_masks[:num_tokens] = 0
        for rank in range(s.num_ranks):
            goes = rank_of_lane == rank
            if not ranks >> rank & 1:
                self._calls.statistics[-1] += goes.sum()
                continue
            state.rank_masks[:num_tokens] |= goes.any(1).int() << rank
            area = self._calls.area(rank, s.rank, number)
            area.experts[:num_tokens] = self._topk_idx
            area.weights[:num_tokens] = 1.0 if self._topk_weights is None else self._topk_weights
            area.slots[:num_tokens, : rows.shape[1]] = rows

    def _rows_on_their_way(self) -> Tensor:
        """Return [num_tokens, row_bytes] uint8: elements, then for fp8 words of scales."""
        if self.recv_x_scales is None:
            return self._x.view(torch.uint8)
        y, scales = quantize_fp8(self._x)
        if self._is_rounded:  # up to powers of two, by which the elements are divided
            scales = next_powers_of_two(scales)
            y = (self._x.float() / scales.repeat_interleave(_C.SCALE_BLOCK, dim=1)).clamp(-448, 448).to(FP8)
            scales = ue8m0.pack(scales)
        return _side_by_side(y, scales)

    def read(self, number: int, entered: int, arrived: int, values: list[int]) -> None:
        """Read the rows. `values` are those of the ranks' flags. Ranks that `entered` and have not `arrived` were masked; they send no
        rows."""
        s, state = self._s, self._views
        num_local, capacity = s.num_local_experts, s.rows_of_expert
        areas = {source: self._calls.area(s.rank, source, number) for source in members(entered)}
        local = torch.full(state.rows.shape, -1, dtype=torch.int64, device=_CPU)
        for source, area in areas.items():
            local[source, : values[source]] = area.experts[: values[source]].long() - s.rank * num_local
            state.weights[source, : values[source]] = area.weights[: values[source]]
        is_here = (local >= 0) & (local < num_local)
        local = torch.where(is_here, local, num_local)
        # Rows of an expert lie by source, those of a source by token.
        by_expert, order = local.flatten().sort(stable=True)
        counts = by_expert.bincount(minlength=num_local + 1)
        places = torch.empty_like(order)
        places[order] = torch.arange(len(order), device=_CPU) - (counts.cumsum(0) - counts)[by_expert]
        places = places.view(local.shape)
        state.rows.copy_(torch.where(is_here, local * capacity + places, -1))
        self.num_recv_tokens_per_expert.copy_(counts[:num_local])
        with self._calls.counting:
            self._calls.statistics[:num_local] += counts[:num_local]
        row_bytes = self.recv_x.shape[2] * self.recv_x.element_size()  # a multiple of 16; few large elements are copied faster
        for source, area in areas.items():
            tokens, lanes = is_here[source].nonzero(as_tuple=True)
            slots = area.slots if arrived >> source & 1 else torch.zeros_like(area.slots)
            targets = local[source, tokens, lanes], places[source, tokens, lanes]
            self.recv_x.view(torch.int64)[targets] = slots[:, :row_bytes].view(torch.int64)[tokens]
            if self.recv_x_scales is not None:
                words = slots[:, row_bytes : row_bytes + 4 * self.recv_x_scales.shape[2]].view(torch.int32)
                self.recv_x_scales.view(torch.int32)[targets] = words[tokens]
        state.num_tokens.copy_(torch.tensor(values, dtype=torch.int32, device=_CPU))


class CombineRows:
    """The rows of one combine of this rank, with the field of `_torch.LowLatencyCombined`."""

    is_combine = True
    event: Event | None = None

    def __init__(
        self, calls: ShmCalls, empty: Empty, x: Tensor, state: Tensor, num_tokens: int, topk_weights: Tensor | None, out: Tensor | None,
        wire: str | None,
    ):  # fmt: skip
        self._calls, self._s, self._x, self._topk_weights = calls, calls.settings, x, topk_weights
        self.combined_x = empty((num_tokens, calls.settings.hidden), x.dtype) if out is None else out
        with unseen():
            self._views = State(state, calls.settings)
            self.value = int(self._views.number) & 0xFFFF  # the last bits of the number of its dispatch
        self._fp8, self.brings_weights = wire == "fp8", topk_weights is not None
        self.what = _C.low_latency_what(True, DTYPES[x.dtype], self._fp8, False, self.brings_weights)

    def write(self, number: int, ranks: int) -> None:
        """Write what `ranks` read once this rank has entered: rows, or weights that this combine brings."""
        self._check_state()
        if self._topk_weights is None:
            return self.write_weighted(number, ranks)
        for rank in members(ranks):
            self._calls.area(rank, self._s.rank, number).weights[: len(self._topk_weights)] = self._topk_weights

    def _check_state(self) -> None:
        """PyTorch does not count every change of the handle's memory."""
        s, state = self._s, self._views
        if (state.num_tokens < 0).any():
            raise ValueError("handle is of a dispatch that was not received; call its hook, or wait for its event, before combine")
        is_token = torch.arange(s.num_max_tokens_per_rank, device=_CPU) < state.num_tokens[:, None]
        most_rows = s.num_local_experts * s.rows_of_expert
        is_out = (state.num_tokens > s.num_max_tokens_per_rank).any() or (state.rows.amax(2) >= most_rows)[is_token].any()
        if is_out or (state.rank_masks[: len(self.combined_x)] >> s.num_ranks != 0).any():
            raise ValueError("the state of this handle was changed after its dispatch; dispatch again")

    def write_weighted(self, number: int, ranks: int) -> None:
        """Write the rows for ranks whose weights have come, if this combine brings weights."""
        s, state, x = self._s, self._views, self._x.view(-1, self._s.hidden)
        for rank in members(ranks):
            num_tokens = int(state.num_tokens[rank])
            weights = state.weights[rank] if self._topk_weights is None else self._calls.area(s.rank, rank, number).weights
            rows = state.rows[rank, :num_tokens].long()
            sums = torch.zeros((num_tokens, s.hidden), dtype=torch.float32, device=_CPU)
            for lane in range(s.num_topk):
                here = (rows[:, lane] >= 0).nonzero()[:, 0]
                sums[here] += weights[here, lane, None] * x[rows[here, lane]].float()
            sent = _side_by_side(*quantize_fp8(sums)) if self._fp8 else sums.to(x.dtype).view(torch.uint8)
            self._calls.area(rank, s.rank, number).slots[:num_tokens, : sent.shape[1]] = sent

    def read(self, number: int, entered: int, arrived: int, values: list[int]) -> None:
        out, hidden = self.combined_x, self._s.hidden
        masks = self._views.rank_masks[: len(out)]
        total = torch.zeros(out.shape, dtype=torch.float32, device=_CPU)
        for rank in members(arrived):
            tokens = (masks >> rank & 1).nonzero()[:, 0]
            slots = self._calls.area(self._s.rank, rank, number).slots
            if self._fp8:
                y, scales = slots[:, :hidden], slots[:, hidden : hidden + hidden // _C.SCALE_BLOCK * 4]
                total[tokens] += dequantize_fp8(y[tokens].view(FP8), scales.view(torch.float32)[tokens])
            else:
                total[tokens] += slots[:, : hidden * out.element_size()].view(out.dtype)[tokens].float()
        out.copy_(total)


def _side_by_side(*parts: Tensor) -> Tensor:
    """Return the bytes of rows whose parts [num_tokens, ...] these are."""
    return torch.cat([part.view(torch.uint8) for part in parts], 1)
