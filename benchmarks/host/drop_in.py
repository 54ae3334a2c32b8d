"""Time of the host in DeepEP's calls on deepep_moe (`deepep_moe.compat.deep_ep`), beside calls of `deepep_moe.Buffer` that do the same."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from benchmarks.host.measure import Shape, inputs_of, times_of
from deepep_moe import Buffer
from deepep_moe.compat import deep_ep
from deepep_moe.compat.deep_ep.hybrid import indices_to_map
from deepep_moe.compat.deep_ep.widths import combine_with_lanes
from deepep_moe.exchange.handle import DispatchOutput

NATIVE = "deepep_moe.Buffer"
Calls = dict[str, tuple[Callable[[], Any], Callable[[], Any]]]


def times(shape: Shape, repeats: int, device: str = "cuda") -> dict[str, tuple[list[float], list[float]]]:
    """Return microseconds per call of DeepEP's interface and of ours, by the name of the operation. DeepEP's constructor takes the process
    group of one rank that this makes."""
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        with torch.no_grad():
            pairs = _calls(shape, torch.device(device), dist.group.WORLD)
            return {op: (times_of(theirs, repeats), times_of(ours, repeats)) for op, (theirs, ours) in pairs.items()}
    finally:
        dist.destroy_process_group()


def _calls(shape: Shape, device: torch.device, group: Any) -> Calls:
    x, idx, weights = inputs_of(shape, device)
    native = Buffer(group, *shape, backend="shm" if device.type == "cpu" else "nvlink")

    def dispatch(layout: str) -> tuple[DispatchOutput, list[int]]:
        """A dispatch of ours that also says how many rows each expert has."""
        out = native.dispatch(x, idx, weights, layout=layout)
        return out, out.handle.num_rows_per_expert_list

    by_rank, by_expert = dispatch("rank")[0], dispatch("expert")[0]
    assert by_expert.recv_topk_weights is not None  # as weights were sent
    with_lanes = partial(combine_with_lanes, native, by_expert.recv_x, by_expert.handle, by_expert.recv_topk_weights)
    v1, v2 = deep_ep.Buffer(group), deep_ep.ElasticBuffer(group, num_max_tokens_per_rank=shape.num_tokens)
    hybrid = deep_ep.HybridEPBuffer(group, shape.hidden, shape.num_tokens, shape.num_experts)
    per_rank, _, per_expert, in_rank, _ = v1.get_dispatch_layout(idx, shape.num_experts)
    routing: dict[str, Any] = {"topk_idx": idx, "topk_weights": weights}
    of_v1 = routing | {"num_tokens_per_rank": per_rank, "is_token_in_rank": in_rank, "num_tokens_per_expert": per_expert}
    of_v2 = routing | {"num_experts": shape.num_experts}
    of_hybrid: dict[str, Any] = dict(
        zip(("routing_map", "probs"), indices_to_map(idx, weights, shape.num_tokens, shape.num_experts), strict=True)
    )
    rows, *_, handle, _ = v1.dispatch(x, **of_v1)
    assert handle is not None  # of a dispatch that was given none
    rows_2, *_, handle_2, _ = v2.dispatch(x, **of_v2, do_expand=True)
    rows_h, probs, _, _, handle_h = hybrid.dispatch_with_permute(hidden=x, **of_hybrid)
    back: dict[str, Any] = {"hidden": rows_h, "handle": handle_h}
    dispatch_along = partial(native.dispatch, x, handle=by_expert.handle)
    combine_along = partial(native.combine, by_expert.recv_x, by_expert.handle)
    calls: Calls = {
        "dispatch": (lambda: v1.dispatch(x, **of_v1), lambda: dispatch("rank")),
        "dispatch cached": (lambda: v1.dispatch(x, handle), lambda: native.dispatch(x, handle=by_rank.handle)),
        "combine": (lambda: v1.combine(rows, handle), lambda: native.combine(by_rank.recv_x, by_rank.handle)),
        "V2 dispatch": (lambda: v2.dispatch(x, **of_v2), lambda: dispatch("rank")),
        "V2 dispatch cached": (lambda: v2.dispatch(x, handle=handle_2, do_expand=True), dispatch_along),
        "V2 combine": (lambda: v2.combine(rows_2, handle_2), combine_along),
        "HybridEP dispatch": (lambda: hybrid.dispatch_with_permute(hidden=x, **of_hybrid), lambda: dispatch("expert")),
        "HybridEP dispatch cached": (lambda: hybrid.dispatch_with_permute(hidden=x, handle=handle_h), dispatch_along),
        "HybridEP combine": (lambda: hybrid.combine_with_unpermute(**back), combine_along),
        "HybridEP combine with probs": (lambda: hybrid.combine_with_unpermute(**back, probs=probs), with_lanes),
    }
    return {f"host drop-in {op}": pair for op, pair in calls.items()}


def layout_of(op: str) -> str:
    """Return the layout of the rows of an operation."""
    is_by_expert = "HybridEP" in op or ("V2" in op and op != "host drop-in V2 dispatch")
    return "expert" if is_by_expert else "rank"
