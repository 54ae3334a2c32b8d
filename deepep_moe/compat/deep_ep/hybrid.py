"""DeepEP's `HybridEPBuffer` on `deepep_moe.Buffer`: a dispatch with permutation is its expert layout, one without its rank layout."""

import contextlib
from types import SimpleNamespace
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from deepep_moe import _C, config
from deepep_moe.arguments import as_int, check_tensor
from deepep_moe.compat.deep_ep.arguments import checked_routing, combine_arguments, detached, rows_and_scales
from deepep_moe.compat.deep_ep.core import GrowingBuffers, members_of
from deepep_moe.compat.deep_ep.dense_routing import experts_only, first_lanes, keep_nothing, keep_within
from deepep_moe.compat.deep_ep.graphs import outside_graphs
from deepep_moe.compat.deep_ep.hybrid_handle import HybridConfig, HybridHandle
from deepep_moe.compat.deep_ep.widths import combine_along, dispatch_along
from deepep_moe.device import is_gpu
from deepep_moe.errors import Cause, EPPeerError
from deepep_moe.exchange.checks import MAX_ALIGNMENT
from deepep_moe.exchange.handle import DispatchOutput
from deepep_moe.group.rendezvous import agree
from deepep_moe.group.settings import MAX_NUMBER
from deepep_moe.group.suspension import Suspending
from deepep_moe.ops.lanes import dense_of_lanes, lanes_of_map, to_dense, weights_at
from deepep_moe.torch_module import needed

_FP8 = torch.float8_e4m3fn
_INDICES = torch.int64, torch.int32
_Error = TypeVar("_Error", bound=Exception)
_PROBS = torch.float32, torch.bfloat16, torch.float16, torch.float64


_Routing = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None, int | None]
"""A caller gives routing_map, topk_idx, probs, topk_weights and num_experts. With a map, only probs are read of the others; with probs,
topk_weights are not read. With a handle, only probs and topk_weights are read."""


@outside_graphs
class HybridEPBuffer(Suspending):
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
        self.group, self.rank, self.group_size = members_of(group, "HybridEPBuffer")
        sizes = {"hidden_dim": hidden_dim, "max_num_of_tokens_per_rank": max_num_of_tokens_per_rank, "num_local_experts": num_local_experts}
        hidden_dim, self._num_max_tokens, num_local_experts = (as_int(name, value) for name, value in sizes.items())
        self.configurer = SimpleNamespace(
            buffer_config=HybridConfig(
                hidden_dim=hidden_dim, max_num_of_tokens_per_rank=self._num_max_tokens, num_of_experts_per_rank=num_local_experts
            )
        )
        self._num_sms = (
            as_int("num_sms_dispatch_api", num_sms_dispatch_api or 0) or None,
            as_int("num_sms_combine_api", num_sms_combine_api or 0) or None,
        )
        self._buffers = GrowingBuffers(group, sums=config.sums())
        self._parts = (self._buffers,)
        self._num_lanes = self._num_bounded_lanes = 0  # as all ranks agree, for routing maps without and with a bound; 0: not yet
        self._gpu: torch.device | None = None
        """The GPU of the latest map without a bound, once the ranks have agreed on its lanes."""
        self._bounded: tuple[int, torch.device] | None = None
        """The experts and the device of the latest dispatch with a bound."""

    @property
    def num_of_nodes(self) -> int:
        """Return the number of nodes of the group; 1 until the first call has looked for them."""
        return self._buffers.num_nodes

    @property
    def num_of_hybrid_ep_ranks_per_nvlink_domain(self) -> int:
        """Return the number of ranks of a node."""
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
        return HybridConfig(**{**vars(config), **changes, "max_num_of_tokens_per_rank": most, **kwargs})

    # ---- one row per (token, local expert), grouped by expert ----

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
            routing_map, probs: [num_tokens, num_experts] bool, and floats or None. The host waits to learn how many experts a token has,
                unless `num_permuted_tokens` is given.
            topk_idx, topk_weights, num_of_experts: instead of the map. `topk_idx` is [num_tokens, num_topk] int32 or int64; an index that
                is no expert counts as none. The weights are floats or None. `num_of_experts` None: as many as the buffer was made for.
            scaling_factor: [num_tokens, hidden / 128] fp32, for fp8 rows only.

            num_permuted_tokens: the number of rows of this rank's results. An int or a tensor; the host waits for one on a GPU. Rows
                behind the last group are zero. Rows that do not fit are dropped; the last item of the handle is then 1 on every rank.
                The host waits for nothing else. None: as many rows as arrive.
            pad_multiple: zero rows pad each expert's rows to a multiple of it.
            handle: the handle of an earlier dispatch. Its routing, padding and bound are used again.
            non_blocking: return tokens_per_expert on the device of the rows. It needs `num_permuted_tokens`.

        Returns:
            Rows [num_rows, hidden]; probs [num_rows] fp32 or None; scaling_factor or None; tokens_per_expert [num_local_experts] int64;
            the handle. Rows are ordered by expert, then source rank, then token. The counts include padding. They lie on the CPU, unless
            `non_blocking` or the handle has a bound.

        Raises: ValueError for missing or contradicting arguments; else the errors of `deepep_moe.Buffer.dispatch`.
        """
        is_bounded = num_permuted_tokens is not None if handle is None else self._buffers.checked(handle, HybridHandle).is_bounded
        if use_host_meta is not None:
            non_blocking = not use_host_meta
        elif handle is not None and is_bounded:
            non_blocking = True  # Megatron-Core's backward passes no flag here, and does not use the counts
        routing = routing_map, topk_idx, probs, topk_weights, num_of_experts
        num_rows, alignment = None, 1
        try:
            if non_blocking and not is_bounded:
                message = "non_blocking is True and num_permuted_tokens is None; give the number of rows, as nobody waits to learn it"
                raise ValueError(message)
            if handle is None and (is_bounded or pad_multiple):
                num_rows = _bound_of(num_permuted_tokens)
                alignment = max(1, as_int("pad_multiple", pad_multiple or 1, most=MAX_ALIGNMENT))  # HybridEP does not look at one below 1
        except (TypeError, ValueError) as error:
            raise self._refuse(error, handle, routing, is_bounded) from None
        out, handle = self._send(hidden, scaling_factor, routing, handle, "expert", num_rows, alignment)
        native = handle.native
        counts = native.num_rows_per_expert.long() if non_blocking else native.num_rows_per_expert_on_host
        return _in_dtype_of(hidden, out.recv_x), out.recv_topk_weights, out.recv_x_scales, counts, handle

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
            probs: [num_rows] fp32, which come back beside the rows. The rows are not multiplied by them.

        Returns the sums [num_tokens, hidden], and probs [num_tokens, num_experts] fp32, 0 where a token did not go, or None.

        Raises: ValueError without a handle; else as `deepep_moe.Buffer.combine`.
        """
        return self._combine(hidden, probs, self._buffers.checked(handle, HybridHandle))

    # ---- one row per (token, rank) ----

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
        routing = routing_map, topk_idx, probs, topk_weights, num_of_experts
        out, handle = self._send(hidden, scaling_factor, routing, handle, "rank")
        dense = None
        if out.recv_topk_weights is not None:
            num_columns = handle.buffer.num_local_experts * handle.buffer.ranks_per_node
            dense = dense_of_lanes(self._of_node(handle), out.recv_topk_weights, num_columns)
        return _in_dtype_of(hidden, out.recv_x), dense, out.recv_x_scales, handle

    def combine(self, hidden: Tensor, probs: Tensor | None = None, handle: HybridHandle | None = None) -> tuple[Tensor, Tensor | None]:
        """Sum the rows of each token at its source. Collective; as `combine_with_unpermute`, probs as `dispatch` returns them."""
        handle = self._buffers.checked(handle, HybridHandle)
        lanes = handle.buffer.calls.refuse_on_failure(self._lanes_of_node, probs, handle)
        return self._combine(hidden, lanes, handle)

    def _lanes_of_node(self, probs: Any, handle: HybridHandle) -> Tensor | None:
        """Return `probs` of `dispatch` by lane of top-k. Raises TypeError or ValueError for others."""
        if probs is None:
            return None
        topk_idx, buffer = self._of_node(handle), handle.buffer
        shape = len(topk_idx), buffer.num_local_experts * buffer.ranks_per_node
        check_tensor("probs", probs, shape, _PROBS, topk_idx.device, any_strides=True)
        return weights_at(detached(probs), topk_idx)

    # ---- how ----

    def _send(
        self, hidden: Any, scaling_factor: Tensor | None, routing: _Routing, handle: HybridHandle | None, layout: str,
        num_rows: int | None = None, alignment: int = 1,
    ) -> tuple[DispatchOutput, HybridHandle]:  # fmt: skip
        """Dispatch with as many lanes as any token of any rank needs. For maps the ranks agree on the number in the first call. Where a
        token needs more, the dispatch refuses it on all ranks, and all meet and dispatch again. With a bound on the rows
        nobody looks after the first such call, and lanes behind the last count as dropped.

        num_rows: the bound on the rows of this rank."""
        if handle is not None:
            buffer, native = self._buffers.checked(handle, HybridHandle).buffer, handle.native
            rows, scales = buffer.calls.refuse_on_failure(_rows_of, hidden, scaling_factor)
            weights = buffer.calls.refuse_on_failure(_weights_of, routing, handle.topk_idx)
            return dispatch_along(buffer, rows, scales, native, weights, self._num_sms[0]), handle
        self._buffers.check_alive()
        routing_map, lanes = routing[0], None
        try:
            self._buffers.check_layout(layout, "call dispatch_with_permute")
            rows, scales = _rows_of(hidden, scaling_factor)
            if routing_map is not None and num_rows is None and rows.device == self._gpu:
                lanes = needed().lanes_of_map(routing_map, routing[2], self._num_lanes, rows)  # it declines what is refused below
            num_experts = self._num_experts_of(routing) if lanes is not None else self._check_routing(routing, rows)
        except (TypeError, ValueError) as error:
            raise self._refuse(error, None, routing, num_rows is not None) from None
        if num_rows is not None:
            self._bounded = num_experts, rows.device
        lanes = self._lanes_of(routing, num_experts, num_rows, alignment) if lanes is None else (*lanes, None)
        for is_last in (False, True):
            topk_idx, topk_weights, has_dropped = lanes
            try:
                buffer, out = self._buffers.dispatch(
                    rows, topk_idx, topk_weights, num_experts, self._num_max_tokens, x_scales=scales, layout=layout,
                    expert_alignment=alignment, num_recv_rows=num_rows, num_sms=self._num_sms[0],
                )  # fmt: skip
                return out, HybridHandle(buffer, out.handle, topk_idx, self.configurer.buffer_config, has_dropped)
            except (ValueError, EPPeerError) as error:
                if routing_map is None or num_rows is not None or getattr(error, "code", None) != Cause.NO_EXPERT or is_last:
                    raise
            self._num_lanes = self._agree_on_lanes(routing_map)
            lanes = self._lanes_of(routing, num_experts, None, alignment)
        raise AssertionError("the ranks agreed on too few lanes")

    def _lanes_of(
        self, routing: _Routing, num_experts: int, num_rows: int | None, alignment: int
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Return the lanes of a routing, their weights, and with a bound on the rows whether any were dropped, which is collective."""
        routing_map, topk_idx, probs, *_ = routing
        is_lost = has_dropped = None
        if routing_map is None:
            assert topk_idx is not None  # `_check_routing` has checked it
            topk_idx = experts_only(topk_idx, num_experts)
        elif num_rows is None:
            self._num_lanes = self._num_lanes or self._agree_on_lanes(routing_map)
            self._gpu = routing_map.device if is_gpu(routing_map.device) else None
            return *lanes_of_map(routing_map, None if probs is None else detached(probs), self._num_lanes), None
        else:
            self._num_bounded_lanes = num_lanes = self._num_bounded_lanes or self._agree_on_lanes(routing_map, is_bounded=True)
            topk_idx, is_lost = first_lanes(routing_map, num_lanes)
        if num_rows is not None:
            topk_idx, has_dropped = keep_within(topk_idx, num_experts, num_rows, alignment, self.group, is_lost)
        return topk_idx, _weights_of(routing, topk_idx), has_dropped

    def _check_routing(self, routing: _Routing, rows: Tensor) -> int:
        """Return the number of experts. Raises TypeError or ValueError for a routing of another shape."""
        routing_map, topk_idx, probs, topk_weights, _ = routing
        num_tokens, device, num_experts = rows.shape[0], rows.device, self._num_experts_of(routing)
        if routing_map is not None:
            check_tensor("routing_map", routing_map, (num_tokens, num_experts), (torch.bool,), device, any_strides=True)
        elif topk_idx is None:
            raise ValueError("routing_map and topk_idx are missing; give one of them, or the handle of an earlier dispatch")
        else:
            shape = num_tokens, checked_routing(topk_idx).shape[1]
            check_tensor("topk_idx", topk_idx, shape, _INDICES, device, any_strides=True)
            if topk_weights is not None and probs is None:
                check_tensor("topk_weights", topk_weights, shape, _PROBS, device, any_strides=True)
        if probs is not None:
            check_tensor("probs", probs, (num_tokens, num_experts), _PROBS, device, any_strides=True)
        return num_experts

    def _num_experts_of(self, routing: _Routing) -> int:
        """Return the number of experts. Raises TypeError or ValueError where it cannot be one."""
        if isinstance(routing[0], Tensor):
            num_experts = routing[0].shape[-1]
        else:
            num_of_experts = as_int("num_of_experts", routing[4] or 0)
            num_experts = num_of_experts or self.configurer.buffer_config.num_of_experts_per_rank * self.group_size
        if num_experts < 1 or num_experts % self.group_size:
            raise ValueError(f"the number of experts is {num_experts}; it must be a multiple of the group's {self.group_size} ranks")
        return num_experts

    def _combine(self, hidden: Any, probs: Tensor | None, handle: HybridHandle) -> tuple[Tensor, Tensor | None]:
        buffer, num_sms = handle.buffer, self._num_sms[1]
        rows, values, _ = buffer.calls.refuse_on_failure(combine_arguments, hidden, probs, None)
        combined, lanes = combine_along(buffer, rows, handle.native, None if values is None else values.float(), None, num_sms)
        return combined, None if lanes is None else dense_of_lanes(handle.topk_idx, lanes, buffer.num_experts)

    def _refuse(self, error: _Error, handle: HybridHandle | None, routing: _Routing, is_bounded: bool) -> _Error:
        """Tell the peers that this rank does not make its dispatch. Those of a dispatch with a bound are in `keep_within` first."""
        if handle is not None:
            return handle.buffer.refuse(error)
        is_first_map = routing[0] is not None and self._num_bounded_lanes == 0  # the peers agree on lanes before such a call
        if is_bounded and not is_first_map:
            keep_nothing(*self._shared_with_peers(routing))
        return self._buffers.refuse(error)

    def _shared_with_peers(self, routing: _Routing) -> tuple[int, dist.ProcessGroup, torch.device]:
        """Return the experts, the group and the device of the peers' `keep_within`. Some arguments are wrong: the others tell these, or the
        latest such dispatch does."""
        num_experts, device = self._bounded or (self.configurer.buffer_config.num_of_experts_per_rank * self.group_size, None)
        with contextlib.suppress(TypeError, ValueError):
            num_experts = self._num_experts_of(routing)
        if device is None:
            anywhere = torch.device("cuda" if torch.cuda.is_available() else "cpu")
            device = next((tensor.device for tensor in routing[:3] if isinstance(tensor, Tensor)), anywhere)
        return num_experts, self.group, device

    def _of_node(self, handle: HybridHandle) -> Tensor:
        """Return recv_topk_idx of a dispatch by rank, with the experts of this node counted through."""
        buffer, idx = handle.buffer, handle.native.recv_topk_idx
        assert idx is not None  # of the rank layout
        return torch.where(idx >= 0, idx + buffer.rank % buffer.ranks_per_node * buffer.num_local_experts, -1)

    def _agree_on_lanes(self, routing_map: Tensor, is_bounded: bool = False) -> int:
        """Return the most experts that a token of any rank has in this call or had in one before, at least 1. Collective. With a bound on
        the rows, tokens that differ in their number may have any number later, as when experts are padded to their capacity. Raises
        ValueError on all ranks where no buffer has so many lanes."""
        self._buffers.meet()
        counts = [count for count in routing_map.sum(1).tolist() if count > 0]  # tokens without experts are padding
        needed = max(counts, default=0)
        if is_bounded and needed > min(counts, default=0):
            needed = max(needed, min(routing_map.shape[1], _C.MAX_TOPK))
        needs = agree("experts of a token", None, self.group, self.group_size, max(needed, self._num_lanes, 1))
        most: int = max(needs)
        if most > _C.MAX_TOPK:
            raise ValueError(
                f"routing_map has a token with {most} experts on rank {needs.index(most)}; a token has at most {_C.MAX_TOPK}: drop experts "
                "of such tokens first"
            )
        return most


def indices_to_map(topk_idx: Tensor, topk_weights: Tensor | None, num_of_tokens: int, num_of_experts: int) -> tuple[Tensor, Tensor | None]:
    """Return the dense form of a routing by indices.

    Args:
        topk_idx: [num_of_tokens, num_topk] int32 or int64, -1 = no expert.
        topk_weights: [num_of_tokens, num_topk] of any floating-point dtype, or None.

    Returns:
        (routing_map, probs): [num_of_tokens, num_of_experts] bool, True where chosen; and fp32 of the same shape, 0 where not chosen, or
        None without `topk_weights`.

    Raises:
        ValueError: `topk_idx` has another number of rows.
    """
    if topk_idx.shape[0] != num_of_tokens:
        raise ValueError(f"topk_idx has {topk_idx.shape[0]} rows and num_of_tokens is {num_of_tokens}; give as many rows")
    weights = torch.ones_like(topk_idx, dtype=torch.float32) if topk_weights is None else topk_weights.float()
    probs, routing_map = to_dense(topk_idx, weights, num_of_experts)
    return routing_map, None if topk_weights is None else probs


def _bound_of(num_permuted_tokens: Any) -> int | None:
    """Return the bound on the rows of this rank, a number or a tensor of one. Raises TypeError, or ValueError for a negative one."""
    if num_permuted_tokens is None:
        return None
    if isinstance(num_permuted_tokens, Tensor) and num_permuted_tokens.numel() == 1:
        num_permuted_tokens = num_permuted_tokens.item()
    return as_int("num_permuted_tokens", num_permuted_tokens, "None or a number of rows", 0, MAX_NUMBER)


def _weights_of(routing: _Routing, topk_idx: Tensor) -> Tensor | None:
    """Return the weights of the lanes `topk_idx` [num_tokens, num_topk], fp32, without gradient."""
    routing_map, _, probs, topk_weights, _ = routing
    if probs is not None:
        return weights_at(detached(probs), topk_idx)
    return None if topk_weights is None or routing_map is not None else detached(topk_weights).float()


def _in_dtype_of(hidden: Tensor, recv_x: Tensor) -> Tensor:
    """Return fp8 rows as bytes where the caller gave bytes."""
    return recv_x.view(torch.uint8) if hidden.dtype is torch.uint8 else recv_x


def _rows_of(hidden: Tensor, scaling_factor: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Return rows, and scales where rows are fp8. HybridEP's callers pass scales beside any rows, and fp8 as bytes."""
    hidden, _ = rows_and_scales(hidden)
    dtype = hidden.dtype
    if dtype is torch.uint8:
        return hidden.view(_FP8), scaling_factor
    return hidden, scaling_factor if dtype is _FP8 else None
