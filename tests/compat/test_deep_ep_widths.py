"""Rows of another width than their handle's dispatch had: second tensors of the same tokens, and outputs wider than inputs."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from exchange_cases import assert_same, device_of, poison_outputs
from on_ranks import on_ranks

from deepep_moe import ops
from deepep_moe.compat import deep_ep
from deepep_moe.errors import EPPeerError
from deepep_moe.exchange.calls import live_calls

NUM_EXPERTS, NUM_TOPK, HIDDEN = 6, 2, 64
BACKENDS = pytest.mark.parametrize("backend", ("shm", pytest.param("nvlink", marks=pytest.mark.gpu)))


def version_1(group, x, idx, w):
    buffer = deep_ep.Buffer(group)
    _, _, per_expert, _, _ = buffer.get_dispatch_layout(idx, NUM_EXPERTS)

    def dispatch(x, handle=None, **how):
        routing = {} if handle else {"topk_idx": idx, "topk_weights": w, "num_tokens_per_expert": per_expert}
        out = buffer.dispatch(x, handle, **routing, **how)
        return out[0], out[2], out[4]

    return dispatch, lambda *args, **how: buffer.combine(*args, **how)[:2]


def version_2(group, x, idx, w, do_expand):
    buffer = deep_ep.ElasticBuffer(group, num_max_tokens_per_rank=16)

    def dispatch(x, handle=None):
        routing = {"topk_weights": w} if handle else {"topk_idx": idx, "topk_weights": w, "num_experts": NUM_EXPERTS}
        recv_x, _, recv_w, handle, _ = buffer.dispatch(x, **routing, handle=handle, do_expand=do_expand)
        return recv_x, recv_w, handle

    return dispatch, lambda *args, **how: buffer.combine(*args, **how)[:2]


def deferred(group, x, idx, w):
    buffer = deep_ep.EPBuffer(group, num_max_tokens_per_rank=16)

    def dispatch(x, handle=None):
        routing = {} if handle else {"topk_idx": idx, "topk_weights": w, "num_experts": NUM_EXPERTS}
        recv_x, _, recv_w, handle = buffer.dispatch(x, **routing, handle=handle, defer_epilogue=True).current_stream_wait()
        return recv_x, recv_w, handle

    return dispatch, lambda *args, **how: buffer.combine(*args, **how, defer_epilogue=True).current_stream_wait()


def hybrid(group, x, idx, w, permutes):
    buffer = deep_ep.HybridEPBuffer(group, HIDDEN, 16, NUM_EXPERTS // dist.get_world_size(group))

    def dispatch(x, handle=None):
        x, scales = x if isinstance(x, tuple) else (x, None)
        how = {"hidden": x, "scaling_factor": scales, "topk_idx": idx, "topk_weights": w, "num_of_experts": NUM_EXPERTS, "handle": handle}
        recv_x, probs, scales, *_, handle = (buffer.dispatch_with_permute if permutes else buffer.dispatch)(**how)
        return recv_x if scales is None else (recv_x, scales), probs, handle

    def combine(x, handle, topk_weights=None):
        return (buffer.combine_with_unpermute if permutes else buffer.combine)(hidden=x, probs=topk_weights, handle=handle)

    return dispatch, combine


def look(backend):
    """The host of a GPU waits for no peer along a handle, so it learns of refusals by looking."""
    if backend == "nvlink":
        torch.cuda.synchronize()
        for calls in list(live_calls.values()):
            calls.check()


MAKES = {
    "V1": version_1, "V2": partial(version_2, do_expand=False), "V2_expanded": partial(version_2, do_expand=True), "V2_5": deferred,
    "hybrid": partial(hybrid, permutes=False), "hybrid_permuted": partial(hybrid, permutes=True),
}  # fmt: skip


@BACKENDS
@pytest.mark.parametrize("name", MAKES)
@on_ranks(3)
def test_another_width(rank, name, backend):
    """Results for wide rows equal, column by column, those for rows of the buffer's own width."""
    make = MAKES[name]
    device = device_of(backend, rank)
    poison_outputs()
    generator = torch.Generator().manual_seed(rank)
    num_tokens = (7, 0, 12)[rank]
    wide = torch.randn(num_tokens, 5 * HIDDEN, generator=generator).to(device)
    idx = torch.rand(num_tokens, NUM_EXPERTS, generator=generator).argsort(1)[:, :NUM_TOPK].contiguous()
    idx[::3, 1] = -1
    w = torch.rand(num_tokens, NUM_TOPK, generator=generator).to(device)
    dispatch, combine = make(dist.group.WORLD, None, idx.to(device), w)
    _, weights, handle = dispatch(wide[:, :HIDDEN].bfloat16().contiguous())
    is_biased = make in (version_1, deferred)
    for dtype in (torch.bfloat16, torch.float32, torch.float16):
        x = wide.to(dtype)
        parts = [dispatch(part, handle)[0] for part in x.view(num_tokens, 5, HIDDEN).transpose(0, 1).contiguous()]
        whole = torch.cat(parts, 1)
        bias = {"bias": x.sin()} if is_biased else {}
        sums = [
            combine(part, handle, **({"bias": x.sin()[:, n * HIDDEN : (n + 1) * HIDDEN].contiguous()} if is_biased else {}))[0]
            for n, part in enumerate(parts)
        ]
        for width in (8, HIDDEN - 8, HIDDEN + 8, 3 * HIDDEN, 5 * HIDDEN - 8, 5 * HIDDEN):
            recv_x, again, _ = dispatch(x[:, :width].contiguous(), handle)
            assert recv_x.dtype == dtype and recv_x.is_contiguous() and (again is None or torch.equal(again, weights))
            assert_same("recv_x", recv_x, whole[:, :width])
            some = {name: value[:, :width].contiguous() for name, value in bias.items()}
            y, back = combine(recv_x, handle, topk_weights=weights, **some)
            assert_same("sums", y, torch.cat(sums, 1)[:, :width])
            assert_same("weights", back, combine(whole[:, :HIDDEN].to(torch.float32).contiguous(), handle, topk_weights=weights)[1])
    rows, scales = ops.quantize_fp8(wide[:, : 4 * HIDDEN].contiguous())
    recv_x, recv_scales = dispatch((rows, scales), handle)[0]
    want = torch.cat([dispatch(part, handle)[0] for part in rows.view(torch.float32).contiguous().split(HIDDEN, 1)], 1)
    assert_same("fp8 rows", recv_x.view(torch.uint8), want.view(torch.uint8))
    assert_same("scales", recv_scales, dispatch(torch.nn.functional.pad(scales, (0, 2)), handle)[0][:, :2])
    fails = partial(pytest.raises, ValueError if rank == 1 else EPPeerError)
    with fails(match="row of x, 66 columns"):
        dispatch(torch.zeros(num_tokens, 66 if rank == 1 else 72, dtype=torch.bfloat16, device=device), handle)
        look(backend)
    with fails(match="x has shape"):
        combine(recv_x.float()[: None if rank != 1 else -1], handle)
        look(backend)
    dispatch(wide[:, :HIDDEN].contiguous(), handle)
