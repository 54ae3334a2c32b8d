"""DeepEP's `Buffer`: layout, dispatch and combine of its normal mode, on `deepep_moe.Buffer` in the rank layout."""

import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from deepep_moe.arguments import as_int
from deepep_moe.compat.deep_ep.arguments import as_given, checked_routing, combine_arguments, detached, in_rows, rows_and_scales
from deepep_moe.compat.deep_ep.config import Config
from deepep_moe.compat.deep_ep.core import GrowingBuffers, members_of
from deepep_moe.compat.deep_ep.events import EventHandle, EventOverlap
from deepep_moe.compat.deep_ep.graphs import outside_graphs
from deepep_moe.compat.deep_ep.handle import Handle
from deepep_moe.compat.deep_ep.low_latency import LowLatencyCalls
from deepep_moe.compat.deep_ep.low_latency_buffers import LowLatencyBuffers
from deepep_moe.compat.deep_ep.refused import refused
from deepep_moe.compat.deep_ep.streams import CommStream
from deepep_moe.compat.deep_ep.widths import combine_along, dispatch_along
from deepep_moe.exchange import buffer as exchange
from deepep_moe.exchange.handle import DispatchOutput
from deepep_moe.group.rendezvous import agree
from deepep_moe.group.suspension import Suspending
from deepep_moe.ops.lanes import count_lanes


@outside_graphs
class Buffer(Suspending, LowLatencyCalls):
    """The exchange of a group of ranks, with DeepEP's arguments and results. It serves GPUs, and CPU tensors for tests without one.

    Memory is made at the first call and grows with calls. `num_nvl_bytes` and `num_rdma_bytes` are kept for callers that read them.
    Results are not differentiable, as DeepEP's are not. docs/coming_from_deepep.md says what differs.

    Args:
        group: the process group, of any backend.
        num_max_tokens_per_rank: the most tokens that a rank dispatches; memory is then allocated once. None: ranks agree on it in calls.
        ranks_per_node: how many consecutive ranks are a node, as in `deepep_moe.Buffer`. None: the ranks of one host.

    The other arguments choose among DeepEP's variants; they have no effect here.

    Raises:
        NotImplementedError: `comm` (mpi4py).
        ValueError: no group.
    """

    num_sms: int = Config.num_sms

    def __init__(
        self,
        group: "dist.ProcessGroup | None",
        num_nvl_bytes: int = 0,
        num_rdma_bytes: int = 0,
        low_latency_mode: bool = False,
        num_qps_per_rank: int = 24,
        allow_nvlink_for_low_latency_mode: bool = True,
        allow_mnnvl: bool = False,
        use_fabric: bool | None = None,
        explicitly_destroy: bool = False,
        enable_shrink: bool = False,
        comm: object = None,
        *,
        allow_nvlink_for_normal_mode: bool = True,
        num_max_tokens_per_rank: int | None = None,
        ranks_per_node: int | None = None,
    ) -> None:
        if comm is not None:
            raise NotImplementedError("deep_ep.Buffer's comm (an mpi4py communicator) is not served; pass a torch.distributed group")
        self.group, self.rank, self.group_size = members_of(group, "deep_ep.Buffer")
        self.num_nvl_bytes, self.num_rdma_bytes = as_int("num_nvl_bytes", num_nvl_bytes), as_int("num_rdma_bytes", num_rdma_bytes)
        self.low_latency_mode, self.explicitly_destroy, self.enable_shrink = low_latency_mode, explicitly_destroy, enable_shrink
        self._buffers = GrowingBuffers(self.group, num_max_tokens_per_rank, ranks_per_node)
        self._stream = CommStream()
        self._low_latency = LowLatencyBuffers(self.group, self.num_rdma_bytes, enable_shrink, ranks_per_node)
        self._parts = self._buffers, self._low_latency
        self.runtime: Runtime | None = Runtime(self)
        """DeepEP's `runtime`, for callers that use it; None after `destroy`."""

    # ---- settings ----

    @staticmethod
    def set_num_sms(new_num_sms: int) -> None:
        """Set the SMs of later calls: half of them send rows. 20, DeepEP's default, stands for deepep_moe's own choice.

        Raises:
            TypeError: it is no whole number.
            ValueError: it is odd or below 0.
        """
        num_sms = as_int("new_num_sms", new_num_sms)
        if num_sms < 0 or num_sms % 2:
            raise ValueError(f"new_num_sms is {num_sms}; it must be an even number of SMs, at least 0")
        Buffer.num_sms = num_sms

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> Config:
        """Return the settings of a dispatch among `num_ranks` ranks: the SMs of `set_num_sms`."""
        return Config(num_sms=Buffer.num_sms)

    @staticmethod
    def get_combine_config(num_ranks: int) -> Config:
        """Return the settings of a combine among `num_ranks` ranks: the SMs of `set_num_sms`."""
        return Config(num_sms=Buffer.num_sms)

    @staticmethod
    def is_sm90_compiled() -> bool:
        """Return whether fp8 rows can be sent: always."""
        return True

    # ---- streams and memory ----

    @staticmethod
    def capture() -> EventOverlap:
        """Return an event on the current stream, for `previous_event`."""
        return EventOverlap(EventHandle())

    def get_comm_stream(self) -> Any:
        """Return the stream of asynchronous calls: a torch.cuda.Stream, or without a GPU a torch.cpu.Stream, on which nothing waits."""
        return self._stream.get() if torch.cuda.is_available() else torch.cpu.Stream()

    def get_local_buffer_tensor(
        self, dtype: torch.dtype, size: "torch.Size | None" = None, offset: int = 0, use_rdma_buffer: bool = False
    ) -> Tensor:
        """Return memory of the size that was given at construction, or `size` of it. It is the caller's. No call reads or writes it, as
        the memory of calls belongs to kernels.

        Raises:
            ValueError: `size` is larger.
        """
        self._buffers.check_alive()
        num_bytes = self.num_rdma_bytes if use_rdma_buffer else self.num_nvl_bytes
        num_elements = max(0, num_bytes - offset) // dtype.itemsize
        shape = torch.Size([num_elements]) if size is None else torch.Size(size)
        if shape.numel() > num_elements:
            raise ValueError(
                f"size is {list(shape)} of {dtype} at offset {offset}; the buffer was made with {num_bytes} bytes: construct it with more"
            )
        return torch.empty(shape, dtype=dtype, device="cuda" if torch.cuda.is_available() else "cpu")

    def destroy(self) -> None:
        """Free the memory. Not collective; may be called with and without `explicitly_destroy`, and again. Nothing may be called later."""
        self.runtime = None
        for part in self._parts:
            part.destroy()

    # ---- calls ----

    def get_dispatch_layout(
        self,
        topk_idx: Tensor,
        num_experts: int,
        previous_event: object = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Tensor, Tensor | None, Tensor, Tensor, EventOverlap]:
        """Count this rank's tokens. Not collective.

        topk_idx: [num_tokens, num_topk] int64 or int32, -1 = no expert. Returns num_tokens_per_rank [num_ranks] int32,
        num_tokens_per_rdma_rank [num_nodes] int32 (None for one node), num_tokens_per_expert [num_experts] int32, is_token_in_rank
        [num_tokens, num_ranks] bool, and the event.

        Raises:
            ValueError: a shape is wrong.
        """
        self._buffers.check_alive()
        with self._stream.begin(topk_idx, previous_event, async_finish) as call:
            layout = _layout(topk_idx, as_int("num_experts", num_experts), self.group_size, self._buffers.num_nodes)
        return *layout, call.end((topk_idx,), layout)

    def dispatch(
        self,
        x: Any,
        handle: Handle | None = None,
        num_tokens_per_rank: Tensor | None = None,
        num_tokens_per_rdma_rank: Tensor | None = None,
        is_token_in_rank: Tensor | None = None,
        num_tokens_per_expert: Tensor | None = None,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        expert_alignment: int = 1,
        num_worst_tokens: int = 0,
        config: Config | None = None,
        previous_event: Any = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Any, Tensor | None, Tensor | None, list[int] | None, Handle | None, EventOverlap]:
        """Send every token to the ranks of its experts, one row per (token, rank). Collective.

        Args:
            x: [num_tokens, hidden] bf16, fp32 or fp16, or a pair of fp8 rows and scales. Scales are [num_tokens, hidden / 128] fp32, or
                [num_tokens, ceil(hidden / 512)] int32 of four biased exponents each.
            handle: the handle of an earlier dispatch, whose routing is used again. No other argument about the routing is allowed then.
            num_tokens_per_expert: [num_experts]. Its length is the number of experts. The values are read only without `topk_idx`.
                num_tokens_per_rank is never read.
            is_token_in_rank: [num_tokens, num_ranks] bool. It is read only without `topk_idx`.
            topk_idx, topk_weights: [num_tokens, num_topk]. The first is int64 or int32, the second fp32.

            expert_alignment: round tokens per expert up to a multiple of it.
            num_worst_tokens: if not 0, the number of rows of the results. It is the same on every rank. Rows without a token have
                recv_topk_idx -1. The host then waits for nothing, and the list of counts is empty.
            previous_event: the call begins after this event.
            async_finish: run on the communication stream. The event returned marks the end of the call.

        Returns:
            recv_x, or the pair of rows and scales; recv_topk_idx [num_rows, num_topk], local experts, -1 for another rank's;
            recv_topk_weights [num_rows, num_topk] fp32; tokens of each local expert; the handle; the event. Along a handle all except
            recv_x and the event are None. Rows are ordered by source rank, then by token.

        Raises: as `deepep_moe.Buffer.dispatch`.
        """
        self._buffers.check_alive()
        try:
            num_sms = _senders_of(config)
            x, x_scales = rows_and_scales(x)
            call = self._stream.begin(x, previous_event, async_finish)
        except (TypeError, ValueError) as error:
            raise (handle.buffer if isinstance(handle, Handle) else self._buffers).refuse(error) from None
        routed: tuple[Any, ...] = (None, None, None, None)
        with call:
            if handle is not None:
                buffer = self._buffers.checked(handle, Handle).buffer
                out = dispatch_along(buffer, x, in_rows(x_scales, x), handle.along, num_sms=num_sms, topk_idx=topk_idx)
            else:
                routing = is_token_in_rank, num_tokens_per_expert, topk_idx, topk_weights, expert_alignment, num_worst_tokens
                out, routed = self._send(x, in_rows(x_scales, x), *routing, num_sms)
            recv_scales = as_given(out.recv_x_scales, x_scales)
        inputs = x, x_scales, topk_idx, topk_weights, is_token_in_rank, num_tokens_per_expert
        event = call.end(inputs, (out.recv_x, recv_scales, *routed[:2]))
        recv_topk_idx, recv_topk_weights, counts, new_handle = routed
        recv_x = out.recv_x if x_scales is None else (out.recv_x, recv_scales)
        return recv_x, recv_topk_idx, recv_topk_weights, counts, new_handle, event

    def _send(
        self, x: Tensor, x_scales: Tensor | None, is_token_in_rank: Tensor | None, num_tokens_per_expert: Tensor | None,
        topk_idx: Tensor | None, topk_weights: Tensor | None, expert_alignment: int, num_worst_tokens: int, num_sms: int | None,
    ) -> tuple[DispatchOutput, tuple[Any, ...]]:  # fmt: skip
        """Dispatch with new routing, or with ranks alone. Return the output, and (recv_topk_idx, recv_topk_weights, tokens of each local
        expert, the handle)."""
        buffers, counts = self._buffers, num_tokens_per_expert
        try:
            if counts is None:
                missing = "give what get_dispatch_layout returned, or the handle of an earlier dispatch"
                raise ValueError(f"num_tokens_per_expert is missing; {missing}")
            if not isinstance(counts, Tensor) or counts.dim() != 1:
                raise ValueError(f"num_tokens_per_expert is {counts!r:.80}; it must be a tensor [num_experts]")
            if topk_idx is not None:
                lanes = checked_routing(topk_idx)
            elif is_token_in_rank is not None:
                lanes = _lanes_of_ranks(is_token_in_rank, counts.shape[0])
            else:
                raise ValueError("topk_idx and is_token_in_rank are missing; give one of them, or the handle of an earlier dispatch")
            alignment = as_int("expert_alignment", expert_alignment)
            bound = as_int("num_worst_tokens", num_worst_tokens) or None
        except (TypeError, ValueError) as error:
            raise buffers.refuse(error) from None
        weights = None if topk_idx is None or topk_weights is None else detached(topk_weights)
        least = 0 if bound is None else -(-bound // buffers.num_ranks)  # the caller's bound is for every rank with as many tokens
        how: dict[str, Any] = {"layout": "rank", "expert_alignment": alignment, "num_recv_rows": bound, "num_sms": num_sms}
        buffer, out = buffers.dispatch(x, lanes, weights, counts.shape[0], least, x_scales=x_scales, **how)
        handle = Handle(buffer, out.handle)
        if topk_idx is None:
            return out, (None, None, [] if bound else _counts_of_all(buffers, buffer, counts, alignment), handle)
        return out, (out.recv_topk_idx, out.recv_topk_weights, [] if bound else out.handle.num_rows_per_expert_list, handle)

    def combine(
        self,
        x: Tensor,
        handle: Handle,
        topk_weights: Tensor | None = None,
        bias: "Tensor | tuple[Tensor | None, Tensor | None] | None" = None,
        config: Config | None = None,
        previous_event: object = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Tensor, Tensor | None, EventOverlap]:
        """Sum the rows of each token at its source. Collective.

        Args:
            x: [num_rows, hidden] bf16 (fp32 and fp16 too), rows as the dispatch of `handle` returned them.
            topk_weights: [num_rows, num_topk] fp32, sent back with the rows, such as gradients of recv_topk_weights. Rows are not weighted.
            bias: [num_tokens, hidden], dtype of `x`, or a pair of such tensors, added on the token's rank.
            previous_event, async_finish: the same as in `dispatch`.

        Returns the sums [num_tokens, hidden], the weights [num_tokens, num_topk] fp32 or None, and the event.

        Raises: as `deepep_moe.Buffer.combine`.
        """
        self._buffers.check_alive()
        buffer, along = self._buffers.checked(handle, Handle).buffer, handle.along
        try:
            num_sms = _senders_of(config)
            call = self._stream.begin(x, previous_event, async_finish)
        except TypeError as error:
            raise buffer.refuse(error) from None
        with call:
            rows, weights, added = buffer.calls.refuse_on_failure(combine_arguments, x, topk_weights, bias)
            combined_x, back = combine_along(buffer, rows, along, weights, added, num_sms)
        inputs = (x, topk_weights, *(bias if isinstance(bias, (tuple, list)) else (bias,)))
        return combined_x, back, call.end(inputs, (combined_x, back))


for _name in ("internode_dispatch", "internode_combine"):
    _call = _name.removeprefix("internode_")
    setattr(Buffer, _name, refused("Buffer", _name, f"call {_call}, which serves several nodes too"))


class Runtime:
    """What callers ask of DeepEP's native object beside the calls. It knows the nodes that calls have found: one until the first call."""

    def __init__(self, buffer: Buffer) -> None:
        self._buffer: Buffer = weakref.proxy(buffer)  # weak, because the buffer keeps this object

    def is_available(self) -> bool:
        """Return True: memory is made by the calls."""
        return True

    def is_internode_available(self) -> bool:
        """Return whether the group has several nodes."""
        return self.get_num_rdma_ranks() > 1

    def get_num_rdma_ranks(self) -> int:
        """Return the number of nodes."""
        return self._buffer._buffers.num_nodes

    def get_rdma_rank(self) -> int:
        """Return this rank's node."""
        return self._buffer.rank // self._ranks_per_node()

    def get_root_rdma_rank(self, is_global: bool) -> int:
        """Return the rank on the first node that has this rank's place: its number, or the number of its node."""
        return self._buffer.rank % self._ranks_per_node() if is_global else 0

    def get_local_device_id(self) -> int:
        """Return the index of the current GPU, -1 without one."""
        return torch.cuda.current_device() if torch.cuda.is_available() else -1

    def get_comm_stream(self) -> Any:
        """Return `Buffer.get_comm_stream()`."""
        return self._buffer.get_comm_stream()

    def get_local_buffer_tensor(self, dtype: torch.dtype, offset: int = 0, use_rdma_buffer: bool = False) -> Tensor:
        """Return `Buffer.get_local_buffer_tensor(...)`."""
        return self._buffer.get_local_buffer_tensor(dtype, None, offset, use_rdma_buffer)

    def _ranks_per_node(self) -> int:
        return self._buffer.group_size // self.get_num_rdma_ranks()


def _senders_of(config: object) -> int | None:
    """Return how many SMs send with these settings: half of them, as the others receive in DeepEP. None for its default: deepep_moe
    chooses. Raises TypeError if `config` is no Config."""
    if config is not None and not isinstance(config, Config):
        raise TypeError(f"config is a {type(config).__name__}; it must be a deep_ep.Config, such as Buffer.get_dispatch_config returns")
    num_sms = as_int("num_sms", Buffer.num_sms if config is None else config.num_sms)
    return None if num_sms == Config.num_sms else max(1, num_sms // 2)


def _counts_of_all(buffers: GrowingBuffers, buffer: exchange.Buffer, num_tokens_per_expert: Tensor, alignment: int) -> list[int]:
    """Return how many tokens each local expert receives. Without topk_idx the rows received do not show it, so ranks exchange their own
    counts. Collective."""
    phase = "counts of a DeepEP dispatch without topk_idx"
    table = agree(phase, None, buffers.group, buffers.num_ranks, num_tokens_per_expert.tolist())
    first = buffer.rank * buffer.num_local_experts
    counts = torch.tensor(table).sum(0)[first : first + buffer.num_local_experts].tolist()
    return [-(-count // alignment) * alignment for count in counts]


def _layout(topk_idx: Tensor, num_experts: int, num_ranks: int, num_nodes: int) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
    """Return the counts of `Buffer.get_dispatch_layout` for `topk_idx` [num_tokens, num_topk] int32 or int64, -1 = no expert.

    The host waits for nothing. An index out of range is found by the dispatch, not here. Raises ValueError for another shape or number
    of experts.
    """
    if topk_idx.dim() != 2:
        raise ValueError(f"topk_idx has shape {list(topk_idx.shape)}; it must be [num_tokens, num_topk]")
    if num_experts < 1 or num_experts % num_ranks:
        raise ValueError(f"num_experts is {num_experts}; it must be a multiple of the group's {num_ranks} ranks")
    topk_idx = topk_idx if topk_idx.dtype in (torch.int64, torch.int32) else topk_idx.long()
    per_rank, per_expert, in_rank = count_lanes(topk_idx, num_experts, num_ranks)
    per_node = None
    if num_nodes > 1:
        per_node = in_rank.unflatten(1, (num_nodes, -1)).any(2).sum(0, dtype=torch.int32)
    return per_rank, per_node, per_expert, in_rank


def _lanes_of_ranks(is_token_in_rank: Tensor, num_experts: int) -> Tensor:
    """Return a topk_idx [num_tokens, num_ranks] int64 for tokens whose experts the caller keeps to himself: lane r names the first expert
    of rank r, or -1. Raises ValueError for another shape."""
    if is_token_in_rank.dim() != 2 or is_token_in_rank.dtype != torch.bool:
        wrong = f"shape {list(is_token_in_rank.shape)} and dtype {is_token_in_rank.dtype}"
        raise ValueError(f"is_token_in_rank has {wrong}; it must be [num_tokens, num_ranks] torch.bool")
    num_ranks = is_token_in_rank.shape[1]
    first = torch.arange(0, num_experts, num_experts // num_ranks, device=is_token_in_rank.device)
    return torch.where(is_token_in_rank, first, -1)
