"""DeepEP's `HybridEPBuffer` on `deepep_moe.Buffer`: a dispatch with permutation is its expert layout, one without its rank layout."""

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from deepep_moe import config as library_config
from deepep_moe.compat.deep_ep.core import GrowingBuffers
from deepep_moe.compat.deep_ep.dense_routing import keep_within, lane_values, to_dense, to_lanes
from deepep_moe.compat.deep_ep.hybrid_handle import Configurer, HybridConfig, HybridHandle
from deepep_moe.device import is_gpu
from deepep_moe.errors import EPPeerError
from deepep_moe.exchange.buffer import Buffer
from deepep_moe.exchange.handle import DispatchOutput
from deepep_moe.exchange.lanes import combine_with_lanes
from deepep_moe.group.rendezvous import gather_objects

_FP8 = torch.float8_e4m3fn


class WiderRoutingError(ValueError):
    """A token chooses more experts than any token has chosen before."""

    @classmethod
    def caused(cls, error: Exception) -> bool:
        """Return whether `error` is this error, or the EPPeerError of a rank whose peer raised it."""
        return isinstance(error, cls) or (isinstance(error, EPPeerError) and error.cause == cls.__name__)


class _Routing(NamedTuple):
    """Where tokens go, as a caller says it: by a map, by indices, or along a handle."""

    routing_map: Tensor | None
    topk_idx: Tensor | None
    """Not read beside a map."""
    probs: Tensor | None
    topk_weights: Tensor | None
    """Not read beside a map, nor beside probs."""
    num_experts: int
    num_rows: int | None = None
    """The bound on the rows of this rank."""
    alignment: int = 1

    def weights(self, topk_idx: Tensor) -> Tensor | None:
        """Return the weights of the lanes `topk_idx` [num_tokens, num_topk], fp32."""
        if self.probs is not None:
            return lane_values(topk_idx, self.probs)
        return None if self.topk_weights is None or self.routing_map is not None else self.topk_weights.float()


class HybridEPBuffer:
    """The exchange of a group of ranks, with HybridEP's arguments and results. Construction is not collective; the first call is.

    It serves GPUs, and CPU tensors for tests without one. Token counts may differ from rank to rank. Results are not differentiable, as
    HybridEP's are not. docs/coming_from_deepep.md says what differs.

    Args:
        group: the process group, of any backend.
        hidden_dim, max_num_of_tokens_per_rank, num_local_experts: sizes, as `configurer.buffer_config` has them. Calls may exceed them.
        num_sms_dispatch_api, num_sms_combine_api: SMs that send rows; None: deepep_moe chooses.

    The other arguments concern kernels or memory of HybridEP; here they change nothing.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        hidden_dim: int,
        max_num_of_tokens_per_rank: int,
        num_local_experts: int,
        use_fp8: bool = False,
        num_sms_dispatch_api: int | None = None,
        num_sms_combine_api: int | None = None,
        num_sms_preprocessing_api: int | None = None,
        num_blocks_permute: int | None = None,
        num_blocks_unpermute: int | None = None,
        load_cached_kernels: bool = False,
        use_shared_buffer: bool = True,
        enable_custom_allgather: bool = False,
        num_of_hybrid_ep_ranks_per_nvlink_domain: int | None = None,
        use_mnnvl: bool | None = None,
    ) -> None:
        self.group = group
        self.rank, self.group_size = dist.get_rank(group), dist.get_world_size(group)
        self.configurer = Configurer(HybridConfig(hidden_dim, max_num_of_tokens_per_rank, num_local_experts))
        self._num_sms = num_sms_dispatch_api or None, num_sms_combine_api or None
        self._buffers = GrowingBuffers(group)
        self._num_max_tokens = max_num_of_tokens_per_rank
        self._num_lanes = 0  # of routing maps, agreed on; 0: not yet

    @property
    def num_of_nodes(self) -> int:
        """Nodes of the group; 1 until the first call has looked for them."""
        return self._buffers.num_nodes

    @property
    def num_of_hybrid_ep_ranks_per_nvlink_domain(self) -> int:
        """Ranks of a node."""
        return self.group_size // self.num_of_nodes

    def empty_jit_cache(self) -> None:
        """Do nothing: kernels are compiled when deepep_moe is installed."""

    def update_template_config(
        self,
        hidden_dim: int | None = None,
        num_of_tokens_per_rank: int | None = None,
        num_local_experts: int | None = None,
        pad_multiple: int | None = None,
        use_fp8: bool | None = None,
        fuse_permute_dispatch: bool = False,
        **kwargs: Any,
    ) -> HybridConfig:
        """Return the buffer's settings with these changes, for callers that read them. Calls do not: they look at their arguments."""
        config = self.configurer.buffer_config
        named = hidden_dim, num_of_tokens_per_rank, num_local_experts
        names = "hidden_dim", "max_num_of_tokens_per_rank", "num_of_experts_per_rank"
        changes = {name: value for name, value in zip(names, named, strict=True) if value is not None}
        most = max(changes.get("max_num_of_tokens_per_rank", 0), config.max_num_of_tokens_per_rank)
        config.max_num_of_tokens_per_rank = most
        return config.updated(**{**changes, "max_num_of_tokens_per_rank": most}, **kwargs)

    # ---- one row per (token, local expert), grouped by expert ----

    @torch.no_grad()
    def dispatch_with_permute(
        self,
        *,
        hidden: Tensor,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        num_of_experts_per_rank: int | None = None,
        num_of_experts: int | None = None,
        use_fp8: bool | None = None,
        routing_map: Tensor | None = None,
        probs: Tensor | None = None,
        scaling_factor: Tensor | None = None,
        num_permuted_tokens: "int | Tensor | None" = None,
        pad_multiple: int | None = None,
        handle: HybridHandle | None = None,
        non_blocking: bool = False,
        fuse_permute_dispatch: bool = False,
        num_dispatched_tokens: int | None = None,
        use_host_meta: bool | None = None,
    ) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor, HybridHandle]:
        """Send every token to its experts. Collective.

        Args:
            hidden: [num_tokens, hidden] bf16 (fp32 and fp16 too), or fp8, as float8_e4m3fn or its bytes in uint8.
            routing_map, probs: [num_tokens, num_experts] bool, and floats or None. The host looks how many experts a token chooses, unless
                `num_permuted_tokens` is given.
            topk_idx, topk_weights, num_of_experts: instead of the map, [num_tokens, num_topk] int32 or int64, -1 = no expert; floats or
                None; and a number, None: as many as the buffer was made for.
            scaling_factor: [num_tokens, hidden / 128] fp32 of fp8 rows; with others it is left out.
            num_permuted_tokens: the rows of the results, of this rank, a number or a tensor of one (of a GPU, the host waits for it). Rows
                behind the last group are zero. Rows for which there is no room are dropped, on which the last item of the handle is 1 on
                every rank. The host waits for nothing. None: as many as come.
            pad_multiple: each expert's rows are padded to a multiple of it, with zero rows.
            handle: of an earlier dispatch, to send along its routing, with its padding and bound.
            non_blocking: tokens_per_expert comes on the device of the rows. It needs `num_permuted_tokens`.

        Returns:
            Rows [num_rows, hidden] by expert, then source rank, then token; probs [num_rows] fp32 or None; scaling_factor or None;
            tokens_per_expert [num_local_experts] int64, padding included, on the CPU unless `non_blocking`, or along a
            handle with a bound; the handle.

        Raises: ValueError for missing or contradicting arguments; else as `deepep_moe.Buffer.dispatch`.
        """
        is_bounded = _checked(handle).is_bounded if handle is not None else num_permuted_tokens is not None
        if use_host_meta is not None:
            non_blocking = not use_host_meta
        elif handle is not None and is_bounded:
            non_blocking = True  # Megatron-Core's backward has no use for the counts, and says nothing
        if non_blocking and not is_bounded:
            raise ValueError("non_blocking is True and num_permuted_tokens is None; give the number of rows, as nobody waits to learn it")
        bound = None if num_permuted_tokens is None or handle is not None else int(num_permuted_tokens)
        num_experts = self._num_experts(routing_map, num_of_experts)
        routing = _Routing(routing_map, topk_idx, probs, topk_weights, num_experts, bound, pad_multiple or 1)
        rows, scales = _rows_of(hidden, scaling_factor)
        out, handle = self._send(rows, scales, routing, handle, "expert")
        counts = handle.native.num_rows_per_expert.long() if non_blocking else torch.tensor(handle.native.num_rows_per_expert_list)
        return out.recv_x.view(hidden.dtype), out.recv_topk_weights, out.recv_x_scales, counts, handle

    @torch.no_grad()
    def combine_with_unpermute(
        self,
        *,
        hidden: Tensor,
        probs: Tensor | None = None,
        handle: HybridHandle | None = None,
        pad_multiple: int | None = None,
        fuse_unpermute_combine: bool = False,
        num_dispatched_tokens: int | None = None,
        non_blocking: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Sum the rows of each token at its source. Collective.

        Args:
            hidden: [num_rows, hidden] bf16 (fp32 and fp16 too), rows as the dispatch of `handle` returned them.
            probs: [num_rows] fp32, to come back beside the rows, which they do not weigh.

        Returns the sums [num_tokens, hidden], and probs [num_tokens, num_experts] fp32, 0 where a token did not go, or None.

        Raises: ValueError without a handle; else as `deepep_moe.Buffer.combine`.
        """
        return self._combine(hidden, probs, _checked(handle))

    # ---- one row per (token, rank) ----

    @torch.no_grad()
    def dispatch(
        self,
        hidden: Tensor,
        scaling_factor: Tensor | None = None,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        num_of_experts: int | None = None,
        probs: Tensor | None = None,
        routing_map: Tensor | None = None,
        num_dispatched_tokens_tensor: Tensor | None = None,
        num_dispatched_tokens: int | None = None,
        handle: HybridHandle | None = None,
    ) -> tuple[Tensor, Tensor | None, Tensor | None, HybridHandle]:
        """Send every token to the ranks of its experts. Collective; arguments as of `dispatch_with_permute`.

        Returns rows [num_rows, hidden] by source rank, then token; probs [num_rows, experts of the node] fp32 or None, 0 but for this
        rank's experts; scaling_factor or None; the handle.
        """
        routing = _Routing(routing_map, topk_idx, probs, topk_weights, self._num_experts(routing_map, num_of_experts))
        rows, scales = _rows_of(hidden, scaling_factor)
        out, handle = self._send(rows, scales, routing, handle, "rank")
        dense = None
        if out.recv_topk_weights is not None:
            dense = to_dense(self._of_node(handle), out.recv_topk_weights, handle.buffer.num_local_experts * handle.buffer.ranks_per_node)
        return out.recv_x.view(hidden.dtype), dense, out.recv_x_scales, handle

    @torch.no_grad()
    def combine(self, hidden: Tensor, probs: Tensor | None = None, handle: HybridHandle | None = None) -> tuple[Tensor, Tensor | None]:
        """Sum the rows of each token at its source. Collective; as `combine_with_unpermute`, probs as `dispatch` returns them."""
        handle = _checked(handle)
        return self._combine(hidden, None if probs is None else lane_values(self._of_node(handle), probs), handle)

    # ---- how ----

    def _num_experts(self, routing_map: Tensor | None, num_of_experts: int | None) -> int:
        if routing_map is not None:
            return routing_map.shape[-1]
        return num_of_experts or self.configurer.buffer_config.num_of_experts_per_rank * self.group_size

    def _send(
        self, rows: Tensor, scales: Tensor | None, routing: _Routing, handle: HybridHandle | None, layout: str
    ) -> tuple[DispatchOutput, HybridHandle]:
        if handle is not None:
            buffer, native = _checked(handle).buffer, handle.native
            weights = routing.weights(handle.topk_idx)
            return buffer.dispatch(rows, None, weights, x_scales=scales, handle=native, num_sms=self._num_sms[0]), handle
        if routing.routing_map is not None:
            return self._send_map(rows, scales, routing, routing.routing_map, layout)
        if routing.topk_idx is None:
            raise ValueError("routing_map and topk_idx are missing; give one of them, or the handle of an earlier dispatch")
        return self._send_lanes(rows, scales, routing, routing.topk_idx.long(), None, layout)

    def _send_map(
        self, rows: Tensor, scales: Tensor | None, routing: _Routing, routing_map: Tensor, layout: str
    ) -> tuple[DispatchOutput, HybridHandle]:
        """Dispatch with as many lanes as any token of any rank needs. The ranks agree on the number in the first call, and again where a
        token needs more: its rank refuses the dispatch, and all meet and dispatch again. With a bound on the rows of a GPU nobody looks
        after the first call, and lanes behind the last count as dropped."""
        chosen = routing_map.sum(1)
        is_seen = routing.num_rows is None or not is_gpu(rows.device) or self._num_lanes == 0
        needed = int(chosen.max()) if is_seen and len(chosen) else 0
        if self._num_lanes == 0:
            self._num_lanes = self._agreed_lanes(needed)
        for _ in range(2):
            topk_idx, lost = to_lanes(routing_map, self._num_lanes), (chosen > self._num_lanes).any()
            try:
                return self._send_lanes(rows, scales, routing, topk_idx, lost, layout, needed)
            except (WiderRoutingError, EPPeerError) as error:
                if not WiderRoutingError.caused(error):
                    raise
            self._meet(rows, routing.num_experts)
            self._num_lanes = self._agreed_lanes(max(needed, self._num_lanes))
        raise AssertionError("the ranks agreed on too few lanes")

    def _send_lanes(
        self, rows: Tensor, scales: Tensor | None, routing: _Routing, topk_idx: Tensor, lost: Tensor | None, layout: str, needed: int = 0
    ) -> tuple[DispatchOutput, HybridHandle]:
        num_topk, bound, has_dropped = topk_idx.shape[-1], routing.num_rows, None
        if bound is not None:
            topk_idx, has_dropped = keep_within(topk_idx, routing.num_experts, bound, routing.alignment, self.group, lost)

        def send(buffer: Buffer) -> DispatchOutput:
            if needed > num_topk:
                raise buffer.refuse(WiderRoutingError(f"a token chooses {needed} experts, and the ranks have agreed on {num_topk} at most"))
            return buffer.dispatch(
                rows, topk_idx, routing.weights(topk_idx), x_scales=scales, layout=layout, expert_alignment=routing.alignment,
                num_recv_rows=bound, num_sms=self._num_sms[0],
            )  # fmt: skip

        buffer, out = self._buffers.dispatch(rows, routing.num_experts, num_topk, send, self._num_max_tokens)
        return out, HybridHandle(buffer, out.handle, topk_idx, self.configurer.buffer_config, has_dropped)

    def _combine(self, rows: Tensor, values: Tensor | None, handle: HybridHandle) -> tuple[Tensor, Tensor | None]:
        buffer, num_sms = handle.buffer, self._num_sms[1]
        if values is None:
            return buffer.combine(rows, handle.native, num_sms=num_sms), None
        combined, lanes = combine_with_lanes(buffer, rows, handle.native, values.float().contiguous(), num_sms=num_sms)
        return combined, to_dense(handle.topk_idx, lanes, buffer.num_experts)

    def _of_node(self, handle: HybridHandle) -> Tensor:
        """Return recv_topk_idx of a dispatch by rank, with the experts of this node counted through."""
        buffer, idx = handle.buffer, handle.native.recv_topk_idx
        assert idx is not None  # of the rank layout
        return torch.where(idx >= 0, idx + buffer.rank % buffer.ranks_per_node * buffer.num_local_experts, -1)

    def _meet(self, rows: Tensor, num_experts: int) -> None:
        """Dispatch nothing. A peer that refused for a reason of its own does not come, and this raises what tells of it."""
        topk_idx = torch.empty(0, self._num_lanes, dtype=torch.int64, device=rows.device)
        self._buffers.dispatch(
            rows[:0], num_experts, self._num_lanes, lambda buffer: buffer.dispatch(rows[:0].float(), topk_idx, layout="rank")
        )

    def _agreed_lanes(self, needed: int) -> int:
        """Return the largest `needed` of all ranks, at least 1. Collective."""
        told = gather_objects(max(needed, 1), self.group, self.group_size, "experts of a token", library_config.timeout_s(), int)
        return max(told)


def _rows_of(hidden: Tensor, scaling_factor: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Return rows, and scales where rows are fp8. HybridEP's callers pass scales beside any rows, and fp8 as bytes."""
    if hidden.dtype == torch.uint8:
        return hidden.view(_FP8), scaling_factor
    return hidden, scaling_factor if hidden.dtype == _FP8 else None


def _checked(handle: Any) -> HybridHandle:
    if not isinstance(handle, HybridHandle):
        raise TypeError(f"handle is a {type(handle).__name__}; it must be the handle that a dispatch of HybridEPBuffer returned")
    return handle
