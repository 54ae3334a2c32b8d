"""Time of the host in DeepEP's calls on deepep_moe (`deepep_moe.compat.deep_ep`), beside calls of `deepep_moe.Buffer` that do the same."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from deepep_moe import Buffer
from deepep_moe.bench.host.measure import CHAIN, Shape, chain_us
from deepep_moe.compat import deep_ep
from deepep_moe.exchange.lanes import combine_with_lanes

NATIVE = "deepep_moe.Buffer"
Calls = dict[str, tuple[Callable[[], Any], Callable[[], Any]]]


def times(shape: Shape, repeats: int, device: str = "cuda") -> dict[str, tuple[list[float], list[float]]]:
    """Return microseconds per call of DeepEP's interface and of ours, by the name of the operation. Makes a process group of one rank for
    DeepEP's constructor, if there is none."""
    makes_group = not dist.is_initialized()
    if makes_group:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
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
    native, drop_in = Buffer(group, *shape, backend="shm" if device.type == "cpu" else "nvlink"), deep_ep.Buffer(group)
    per_rank, _, per_expert, in_rank, _ = drop_in.get_dispatch_layout(idx, shape.num_experts)
    routing: dict[str, Any] = {"num_tokens_per_rank": per_rank, "is_token_in_rank": in_rank, "num_tokens_per_expert": per_expert}
    routing |= {"topk_idx": idx, "topk_weights": weights}

    def dispatch() -> Any:
        out = native.dispatch(x, idx, weights, layout="rank")
        return out, out.handle.num_rows_per_expert_list

    out, (recv_x, _, lanes, _, handle, _) = dispatch()[0], drop_in.dispatch(x, **routing)
    assert handle is not None  # of a dispatch that was given none
    return {
        "host drop-in dispatch": (lambda: drop_in.dispatch(x, **routing), dispatch),
        "host drop-in dispatch cached": (lambda: drop_in.dispatch(x, handle), lambda: native.dispatch(x, handle=out.handle)),
        "host drop-in combine": (lambda: drop_in.combine(recv_x, handle), lambda: native.combine(out.recv_x, out.handle)),
        "host drop-in combine with weights": (
            lambda: drop_in.combine(recv_x, handle, lanes),
            lambda: combine_with_lanes(native, out.recv_x, out.handle, out.recv_topk_weights),
        ),
    }
