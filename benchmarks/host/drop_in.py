"""Time of the host in DeepEP's calls on deepep_moe (`deepep_moe.compat.deep_ep`), beside calls of `deepep_moe.Buffer` that do the same."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import HashStore

from benchmarks.host.measure import CHAIN, Shape, chain_us
from deepep_moe import Buffer
from deepep_moe.compat import deep_ep
from deepep_moe.compat.deep_ep.hybrid_ep_buffer import indices_to_map
from deepep_moe.compat.deep_ep.widths import combine_with_lanes
from deepep_moe.exchange.handle import DispatchOutput

NATIVE = "deepep_moe.Buffer"
Calls = dict[str, tuple[Callable[[], Any], Callable[[], Any]]]


def times(shape: Shape, repeats: int, device: str = "cuda") -> dict[str, tuple[list[float], list[float]]]:
    """Return microseconds per call of DeepEP's interface and of ours, by the name of the operation. Makes a process group of one rank for
    DeepEP's constructor, if there is none."""
    makes_group = not dist.is_initialized()
    if makes_group:
        dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        with torch.no_grad():
            pairs = _calls(shape, torch.device(device), dist.group.WORLD)
            return {op: (_times(theirs, repeats), _times(ours, repeats)) for op, (theirs, ours) in pairs.items()}
    finally:
        if makes_group:
            dist.destroy_process_group()


def _times(call: Callable[[], Any], repeats: int) -> list[float]:
    return chain_us(lambda: [call() for _ in range(CHAIN)], repeats)


def _calls(shape: Shape, device: torch.device, group: Any) -> Calls:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(shape.num_tokens, shape.hidden, generator=generator).to(device, torch.bfloat16)
    scores = torch.rand(shape.num_tokens, shape.num_experts, generator=generator)
    weights, idx = (tensor.to(device) for tensor in scores.topk(shape.num_topk, dim=1))
    native = Buffer(group, *shape, backend="shm" if device.type == "cpu" else "nvlink")
    setup = _Setup(shape, group, native, x, idx, weights)
    return {f"host drop-in {op}": pair for calls in (_version_1, _version_2, _hybrid) for op, pair in calls(setup).items()}


def layout_of(op: str) -> str:
    """Return the layout of the rows of an operation."""
    is_by_expert = "HybridEP" in op or ("V2" in op and op != "host drop-in V2 dispatch")
    return "expert" if is_by_expert else "rank"


class _Setup(NamedTuple):
    shape: Shape
    group: Any
    native: Buffer
    x: Tensor
    topk_idx: Tensor
    topk_weights: Tensor

    def dispatch(self, layout: str) -> tuple[DispatchOutput, list[int]]:
        """A dispatch of ours that also says how many rows each expert has."""
        out = self.native.dispatch(self.x, self.topk_idx, self.topk_weights, layout=layout)
        return out, out.handle.num_rows_per_expert_list

    def combine_with_lanes(self, out: DispatchOutput) -> Callable[[], Any]:
        lanes = out.recv_topk_weights
        assert lanes is not None  # as weights were sent
        return lambda: combine_with_lanes(self.native, out.recv_x, out.handle, lanes)


def _version_1(setup: _Setup) -> Calls:
    native, x, idx, weights = setup.native, setup.x, setup.topk_idx, setup.topk_weights
    drop_in = deep_ep.Buffer(setup.group)
    per_rank, _, per_expert, in_rank, _ = drop_in.get_dispatch_layout(idx, setup.shape.num_experts)
    routing: dict[str, Any] = {"num_tokens_per_rank": per_rank, "is_token_in_rank": in_rank, "num_tokens_per_expert": per_expert}
    routing |= {"topk_idx": idx, "topk_weights": weights}
    out, (recv_x, _, lanes, _, handle, _) = setup.dispatch("rank")[0], drop_in.dispatch(x, **routing)
    assert handle is not None  # of a dispatch that was given none
    return {
        "dispatch": (lambda: drop_in.dispatch(x, **routing), lambda: setup.dispatch("rank")),
        "dispatch cached": (lambda: drop_in.dispatch(x, handle), lambda: native.dispatch(x, handle=out.handle)),
        "combine": (lambda: drop_in.combine(recv_x, handle), lambda: native.combine(out.recv_x, out.handle)),
        "combine with weights": (lambda: drop_in.combine(recv_x, handle, lanes), setup.combine_with_lanes(out)),
    }


def _version_2(setup: _Setup) -> Calls:
    native, x = setup.native, setup.x
    drop_in = deep_ep.ElasticBuffer(setup.group, num_max_tokens_per_rank=setup.shape.num_tokens)
    routing: dict[str, Any] = {"topk_idx": setup.topk_idx, "topk_weights": setup.topk_weights, "num_experts": setup.shape.num_experts}
    out, (recv_x, _, lanes, handle, _) = setup.dispatch("expert")[0], drop_in.dispatch(x, **routing, do_expand=True)
    along: dict[str, Any] = {"handle": handle, "do_expand": True}
    return {
        "V2 dispatch": (lambda: drop_in.dispatch(x, **routing), lambda: setup.dispatch("rank")),
        "V2 dispatch expanded": (lambda: drop_in.dispatch(x, **routing, do_expand=True), lambda: setup.dispatch("expert")),
        "V2 dispatch cached": (lambda: drop_in.dispatch(x, **along), lambda: native.dispatch(x, handle=out.handle)),
        "V2 combine": (lambda: drop_in.combine(recv_x, handle), lambda: native.combine(out.recv_x, out.handle)),
        "V2 combine with weights": (lambda: drop_in.combine(recv_x, handle, lanes), setup.combine_with_lanes(out)),
    }


def _hybrid(setup: _Setup) -> Calls:
    native, x, shape = setup.native, setup.x, setup.shape
    drop_in = deep_ep.HybridEPBuffer(setup.group, shape.hidden, shape.num_tokens, shape.num_experts)
    routing_map, probs = indices_to_map(setup.topk_idx, setup.topk_weights, shape.num_tokens, shape.num_experts)

    def dispatch(**how: Any) -> Any:
        return drop_in.dispatch_with_permute(hidden=x, **how)

    out, (recv_x, recv_probs, _, _, handle) = setup.dispatch("expert")[0], dispatch(routing_map=routing_map, probs=probs)
    back: dict[str, Any] = {"hidden": recv_x, "handle": handle}
    return {
        "HybridEP dispatch": (lambda: dispatch(routing_map=routing_map, probs=probs), lambda: setup.dispatch("expert")),
        "HybridEP dispatch cached": (lambda: dispatch(handle=handle), lambda: native.dispatch(x, handle=out.handle)),
        "HybridEP combine": (lambda: drop_in.combine_with_unpermute(**back), lambda: native.combine(out.recv_x, out.handle)),
        "HybridEP combine with probs": (lambda: drop_in.combine_with_unpermute(**back, probs=recv_probs), setup.combine_with_lanes(out)),
    }
