"""DeepEP's low-latency calls on `deepep_moe.LowLatencyBuffer`."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from deepep_moe import _C
from deepep_moe.arguments import as_int, check_is_tensor, check_tensor
from deepep_moe.compat.deep_ep.arguments import detached
from deepep_moe.compat.deep_ep.events import EventOverlap
from deepep_moe.compat.deep_ep.graphs import outside_graphs
from deepep_moe.compat.deep_ep.low_latency_buffers import DispatchHandle, LowLatencyBuffers, Waits, size_hint
from deepep_moe.compat.deep_ep.streams import CommStream
from deepep_moe.errors import EPMismatchError
from deepep_moe.library import untraced
from deepep_moe.low_latency.handle import LowLatencyOutput
from deepep_moe.ops import ue8m0

Hook = Callable[[], None]
_REFUSED = {
    "x_global_scale": "as rows do not travel in NVFP4; pass use_fp8=True",
    "use_ue8m0_for_sf": "as rows do not travel in NVFP4; pass use_fp8=True, round_scale=True and use_ue8m0=True",
    "use_nvfp4": "as rows do not travel in NVFP4; pass use_fp8=True",
    "use_logfmt": "as its error is smaller than that of our fp8 wire; pass use_logfmt=False, or use deepep_moe.LowLatencyBuffer.combine("
    "wire='fp8') where fp8 will do",
    "overlap": "as combine takes no signals; pass overlap=False, and overlap with return_recv_hook=True",
    "signals": "as combine takes no signals; combine after the experts, and overlap with return_recv_hook=True",
}


@outside_graphs
class LowLatencyCalls:
    """The low-latency half of DeepEP's `Buffer`. Memory is made at the first dispatch, for the tokens that the constructor's bytes hold, or
    for those that the dispatch asks for."""

    group_size: int
    _stream: CommStream
    _low_latency: LowLatencyBuffers

    # ---- calls ----

    def low_latency_dispatch(
        self,
        x: Tensor,
        topk_idx: Tensor,
        num_max_dispatch_tokens_per_rank: int,
        num_experts: int,
        cumulative_local_expert_recv_stats: Tensor | None = None,
        dispatch_wait_recv_cost_stats: Tensor | None = None,
        use_fp8: bool = True,
        round_scale: bool = False,
        use_ue8m0: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
        *,
        x_global_scale: Tensor | None = None,
        use_nvfp4: bool = False,
        use_ue8m0_for_sf: bool = False,
    ) -> tuple[Any, Tensor, DispatchHandle, EventOverlap, Hook | None]:
        """Send every token to the ranks of its experts. Collective.

        Args:
            x: [num_tokens, hidden] bf16, contiguous.
            topk_idx: [num_tokens, num_topk] int64 or int32. An index of -1 means no expert.
            num_max_dispatch_tokens_per_rank: most tokens of any rank, the same on all ranks.
            num_experts: experts of all ranks together.
            cumulative_local_expert_recv_stats: [num_local_experts] int32. The rows received are added.
            dispatch_wait_recv_cost_stats: [num_ranks] int64. The nanoseconds waited for each rank are added.
            use_fp8: return rows as e4m3. Each scale is that of 128 columns.
            round_scale: with `use_fp8`, scales are powers of two.
            use_ue8m0: with `round_scale`, scales are their exponents. An int32 holds four.
            async_finish: the results may be read after `event`.
            return_recv_hook: the call sends, the hook receives.
            x_global_scale, use_nvfp4, use_ue8m0_for_sf: arguments of forks, refused if used.

        Returns:
            recv_x [num_local_experts, num_ranks * max, hidden] bf16. With `use_fp8` it is a pair: rows in float8_e4m3fn, and column-major
            scales [num_local_experts, num_ranks * max, hidden / 128] fp32 or [..., ceil(hidden / 512)] int32.
            Then recv_count [num_local_experts] int32; the handle; an EventOverlap; the hook, or None.

        Raises:
            NotImplementedError: NVFP4.
            ValueError, TypeError: bad arguments. Else the errors of `deepep_moe.LowLatencyBuffer.dispatch`.
        """
        self._low_latency.check_alive()
        try:
            for name, tensor in (("x", x), ("topk_idx", topk_idx)):
                if not isinstance(tensor, Tensor) or tensor.dim() != 2:
                    raise ValueError(f"{name} is {tensor!r:.80}; it must be a tensor of two dimensions")
            most = as_int("num_max_dispatch_tokens_per_rank", num_max_dispatch_tokens_per_rank)
            arguments = x, topk_idx, most, as_int("num_experts", num_experts)
            if not 1 <= most <= _C.LOW_LATENCY_MAX_TOKENS:
                raise ValueError(f"num_max_dispatch_tokens_per_rank is {most}; it must be 1 to {_C.LOW_LATENCY_MAX_TOKENS}")
        except (TypeError, ValueError) as error:
            raise self._low_latency.refuse(error) from None
        stats, wait_stats = cumulative_local_expert_recv_stats, dispatch_wait_recv_cost_stats
        try:
            _check_served(
                "low_latency_dispatch", async_finish and return_recv_hook, x_global_scale=x_global_scale is not None, use_nvfp4=use_nvfp4,
                use_ue8m0_for_sf=use_ue8m0_for_sf,
            )  # fmt: skip
            if use_ue8m0 and not round_scale:
                raise ValueError("use_ue8m0 is True without round_scale; exponents are those of rounded scales, pass round_scale=True")
            if len(x) > most:
                raise ValueError(f"x has {len(x)} tokens, more than num_max_dispatch_tokens_per_rank of {most}; pass a larger bound")
            _check_stats("cumulative_local_expert_recv_stats", stats, arguments[3] // self.group_size, torch.int32, x.device)
            _check_stats("dispatch_wait_recv_cost_stats", wait_stats, self.group_size, torch.int64, x.device)
        except (NotImplementedError, TypeError, ValueError) as error:
            raise self._low_latency.refuse_dispatch(error, *arguments) from None
        buffer = self._low_latency.get(*arguments)
        waits = Waits(wait_stats, buffer)
        scale_format = "ue8m0" if use_fp8 and round_scale else "fp32"

        def finish() -> None:
            received.fill()
            if stats is not None:
                stats.add_(out.num_recv_tokens_per_expert)

        @untraced
        def receive() -> None:
            assert out.hook is not None
            with waits:
                out.hook()
            finish()

        with self._stream.begin(x, None, async_finish) as call:
            with waits:
                out = buffer.dispatch(detached(x), topk_idx, fp8=use_fp8, scale_format=scale_format, return_hook=return_recv_hook)
            received = Received(out, buffer.num_ranks * most, is_unpacked=use_fp8 and round_scale and not use_ue8m0)
            if not return_recv_hook:
                finish()
        event = call.end((x, topk_idx, stats, wait_stats), (*out, out.handle.state, received.rows, received.scales))
        recv_x = (received.rows, received.scales) if use_fp8 else received.rows
        handle = DispatchHandle(buffer, out.handle, most)
        return recv_x, out.num_recv_tokens_per_expert, handle, event, receive if return_recv_hook else None

    def low_latency_combine(
        self,
        x: Tensor,
        topk_idx: Tensor,
        topk_weights: Tensor,
        handle: DispatchHandle,
        use_logfmt: bool = False,
        zero_copy: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
        out: Tensor | None = None,
        combine_wait_recv_cost_stats: Tensor | None = None,
        *,
        overlap: bool = False,
        packed_recv_count: Tensor | None = None,
        comp_signal: Tensor | None = None,
        src_signals: Tensor | None = None,
        src_signal_expect_value: int = 0,
        block_m: int = 64,
        threshold: int = 0,
        num_sms: int = 3,
    ) -> tuple[Tensor, EventOverlap, Hook | None]:
        """Sum each token's expert outputs, weighted, on the token's rank. Collective.

        The sum equals `deepep_moe.LowLatencyBuffer.combine` with `topk_weights` to the bit: it is made in fp32 on the experts' rank and
        rounded once, then in fp32 on the token's rank and rounded once. V1 sums all experts' rows in fp32 on the token's rank; the
        environment variable DEEPEP_MOE_SUMS=lanes_fma has that sum.

        Args:
            x: [num_local_experts, num_ranks * max, hidden] bf16, rows as the dispatch returned them.
            topk_idx: the topk_idx of the dispatch. Only its shape is read.
            topk_weights: [num_tokens, num_topk] fp32.
            handle: the handle that `low_latency_dispatch` returned.
            zero_copy: the rows lie in `get_next_low_latency_combine_buffer(handle)`. Then `x` is not read.
            async_finish, return_recv_hook: the same as in the dispatch.
            out: [num_tokens, hidden] bf16. The result is written to it.
            combine_wait_recv_cost_stats: [num_ranks] int64. The nanoseconds waited for each rank are added to it.
            use_logfmt: refused. Our fp8 wire format would not reproduce the rounding errors of LogFMT.
            overlap, packed_recv_count, comp_signal, src_signals: signals of forks, refused if used.
            src_signal_expect_value, block_m, threshold, num_sms: read with signals only.

        Returns:
            combined_x [num_tokens, hidden] bf16; an EventOverlap; the hook, or None.

        Raises:
            NotImplementedError: LogFMT, signals.
            ValueError, TypeError: bad arguments. Else the errors of `deepep_moe.LowLatencyBuffer.combine`.
        """
        self._low_latency.check_alive()
        signals = (packed_recv_count, comp_signal, src_signals)
        native, buffer = self._low_latency.checked(handle, DispatchHandle).native, handle.buffer
        try:
            _check_served(
                "low_latency_combine", async_finish and return_recv_hook, use_logfmt=use_logfmt, overlap=overlap,
                signals=any(signal is not None for signal in signals),
            )  # fmt: skip
            check_tensor("topk_idx", topk_idx, (native.num_tokens, buffer.num_topk), (torch.int64, torch.int32))
            for name, tensor in (("x", x), ("topk_weights", topk_weights)):
                check_is_tensor(name, tensor)
            wait_stats = combine_wait_recv_cost_stats
            _check_stats("combine_wait_recv_cost_stats", wait_stats, self.group_size, torch.int64, topk_weights.device)
            rows = buffer.combine_input(torch.bfloat16) if zero_copy else _as_buffer_has_them(detached(x), handle)
        except (NotImplementedError, TypeError, ValueError) as error:
            raise buffer.refuse(error) from None
        waits, weights, hook = Waits(wait_stats, buffer), detached(topk_weights), None

        @untraced
        def receive() -> None:
            assert hook is not None
            with waits:
                hook()

        with self._stream.begin(rows, None, async_finish) as call, waits:
            combined_x = buffer.combine(rows, native, topk_weights=weights, out=out, return_hook=return_recv_hook)
        if return_recv_hook:
            combined_x, hook = combined_x
        event = call.end((x, rows, topk_weights, native.state, out, wait_stats), (combined_x,))
        return combined_x, event, receive if return_recv_hook else None

    def get_next_low_latency_combine_buffer(self, handle: DispatchHandle) -> Tensor:
        """Return the tensor that a combine with `zero_copy=True` reads, [num_local_experts, num_ranks * max, hidden] bf16.

        There is one, not two as in V1. It may be written once the last combine that read it has sent, on the stream that sent."""
        self._low_latency.check_alive()
        return self._low_latency.checked(handle, DispatchHandle).buffer.combine_input(torch.bfloat16)[:, : handle.num_rows]

    # ---- ranks that are gone ----

    def low_latency_update_mask_buffer(self, rank_to_mask: int, mask: bool = False) -> None:
        """Leave a rank out of the low-latency calls, or take it back; `deepep_moe.LowLatencyBuffer.mask_rank` says how. A rank that is
        taken back must call `low_latency_rejoin`, which V1 does not have."""
        self._low_latency.mask(as_int("rank_to_mask", rank_to_mask), mask)

    def low_latency_query_mask_buffer(self, mask_status: Tensor) -> None:
        """Write into `mask_status` [num_ranks] int32 which ranks are left out: 1, else 0. Waits for the GPU's calls so far."""
        check_tensor("mask_status", mask_status, (self.group_size,), (torch.int32,))
        if mask_status.is_cuda:
            torch.cuda.current_stream(mask_status.device).synchronize()
        masked = self._low_latency.masked_ranks()
        mask_status.copy_(torch.tensor([int(rank in masked) for rank in range(self.group_size)], dtype=torch.int32))

    def low_latency_clean_mask_buffer(self) -> None:
        """Take all ranks back that this one has masked."""
        for rank in sorted(self._low_latency.masked_ranks()):
            self._low_latency.mask(rank, False)

    def low_latency_rejoin(self) -> None:
        """Come back, on a rank that the others have masked and take back now. Waits until all of them do."""
        self._low_latency.rejoin()

    # ---- memory ----

    def clean_low_latency_buffer(self, num_max_dispatch_tokens_per_rank: int, hidden: int, num_experts: int) -> None:
        """Do nothing: flags of our calls are numbers that count on, so there is nothing to clean before a call of other sizes, or after
        calls for large batches."""

    @staticmethod
    def get_low_latency_rdma_size_hint(num_max_dispatch_tokens_per_rank: int, hidden: int, num_ranks: int, num_experts: int) -> int:
        """Return the bytes of a rank's low-latency workspace on a GPU, for any number of experts a token; docs/design/low_latency.md has
        the formula. A `Buffer` that is given them as `num_rdma_bytes` has room for as many tokens from its first call on."""
        return size_hint(
            as_int("num_max_dispatch_tokens_per_rank", num_max_dispatch_tokens_per_rank), as_int("hidden", hidden),
            as_int("num_ranks", num_ranks), as_int("num_experts", num_experts),
        )  # fmt: skip


# ---- arguments ----


def _check_served(call: str, is_both: bool, **used: bool) -> None:
    for name, is_used in used.items():
        if is_used:
            raise NotImplementedError(f"{call}: {name} is not served, {_REFUSED[name]}")
    if is_both:
        raise ValueError("async_finish and return_recv_hook are both True; choose one")


def _check_stats(name: str, stats: Tensor | None, length: int, dtype: torch.dtype, device: torch.device) -> None:
    if stats is not None:
        check_tensor(name, stats, (length,), (dtype,), device, any_strides=True)


def _as_buffer_has_them(x: Tensor, handle: DispatchHandle) -> Tensor:
    """Return the experts' rows [num_local_experts, num_rows, hidden] in a tensor of as many as the buffer has. Raises ValueError for
    another shape."""
    buffer = handle.buffer
    if handle.num_rows == buffer.capacity:
        return x
    shape = buffer.num_local_experts, handle.num_rows, buffer.hidden
    if tuple(x.shape) != shape:
        raise ValueError(f"x has shape {list(x.shape)}; it must be {list(shape)}, rows as the dispatch of this handle returned them")
    rows = x.new_empty(buffer.num_local_experts, buffer.capacity, buffer.hidden)
    rows[:, : handle.num_rows] = x
    return rows


# ---- the end of a call ----


class Received:
    """The rows of a dispatch and their scales as the caller gets them, [num_local_experts, num_rows, ...]."""

    def __init__(self, out: LowLatencyOutput, num_rows: int, *, is_unpacked: bool) -> None:
        """out: of the buffer, which may have more rows; is_unpacked: its exponents are to become fp32."""
        self._out, self._is_unpacked = out, is_unpacked
        self.rows, self.scales = out.recv_x, out.recv_x_scales
        num_local, capacity, hidden = out.recv_x.shape
        if num_rows != capacity:
            self.rows = self.rows.new_empty(num_local, num_rows, hidden)
        if self.scales is not None and (num_rows != capacity or is_unpacked):
            dtype = torch.float32 if is_unpacked else self.scales.dtype
            num_columns = hidden // _C.SCALE_BLOCK if is_unpacked else self.scales.shape[2]
            self.scales = torch.empty((num_local, num_columns, num_rows), dtype=dtype, device=self.rows.device).transpose(1, 2)

    def fill(self) -> None:
        """Copy what was received, unless it lies there. Raises EPMismatchError where there is no room for it."""
        num_rows, scales, counts = self.rows.shape[1], self._out.recv_x_scales, self._out.num_recv_tokens_per_expert
        if self.rows is not self._out.recv_x:
            if not counts.is_cuda and (counts > num_rows).any():  # the host does not wait for the GPU, so it cannot look
                raise EPMismatchError(
                    f"an expert of this rank receives {int(counts.max())} rows and has room for {num_rows}; pass the same "
                    "num_max_dispatch_tokens_per_rank on every rank"
                )
            self.rows.copy_(self._out.recv_x[:, :num_rows])
        if self.scales is not scales:
            assert self.scales is not None and scales is not None
            part = scales[:, :num_rows]
            self.scales.copy_(ue8m0.unpack(part, self.scales.shape[2]) if self._is_unpacked else part)
