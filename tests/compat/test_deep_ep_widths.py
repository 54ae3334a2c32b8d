"""Calls of every version in one form, against the reference. Rows may have another width than their handle's dispatch had, as second
tensors of the same tokens have, and outputs wider than inputs."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from deep_ep_cases import BACKENDS, SIZES, VERSIONS, Wanted, ascending
from exchange_cases import Case, assert_same, device_of, poison_outputs
from on_ranks import on_ranks

from deepep_moe import Buffer, ops
from deepep_moe.compat.deep_ep.hybrid import indices_to_map
from deepep_moe.compat.deep_ep.widths import combine_with_lanes
from deepep_moe.errors import BufferDestroyedError, BufferSuspendedError, EPPeerError
from deepep_moe.exchange.calls import live_calls

NUM_EXPERTS, NUM_TOPK, HIDDEN = 6, 2, 64


def look(backend):
    """The host of a GPU waits for no peer along a handle, so it learns of refusals by looking."""
    if backend == "nvlink":
        torch.cuda.synchronize()
        for calls in list(live_calls.values()):
            calls.check()


@on_ranks(3, name=VERSIONS, backend=BACKENDS)
def test_another_width(rank, name, backend):
    """Results for wide rows equal, column by column, those for rows of the buffer's own width."""
    device = device_of(backend, rank)
    poison_outputs()
    generator = torch.Generator().manual_seed(rank)
    num_tokens = (7, 0, 12)[rank]
    wide = torch.randn(num_tokens, 5 * HIDDEN, generator=generator).to(device)
    idx = torch.rand(num_tokens, NUM_EXPERTS, generator=generator).argsort(1)[:, :NUM_TOPK].contiguous()
    idx[::3, 1] = -1
    w = torch.rand(num_tokens, NUM_TOPK, generator=generator).to(device)
    _, dispatch, combine = VERSIONS[name](dist.group.WORLD, NUM_EXPERTS, HIDDEN)
    dispatch = partial(dispatch, idx=idx.to(device), w=w)
    _, weights, handle = dispatch(wide[:, :HIDDEN].bfloat16().contiguous())
    is_biased = name in ("V1", "V2_5")
    for dtype in (torch.bfloat16, torch.float32, torch.float16):
        x = wide.to(dtype)
        parts = [dispatch(part, handle=handle)[0] for part in x.view(num_tokens, 5, HIDDEN).transpose(0, 1).contiguous()]
        whole = torch.cat(parts, 1)
        bias = {"bias": x.sin()} if is_biased else {}
        sums = [
            combine(part, handle, **({"bias": x.sin()[:, n * HIDDEN : (n + 1) * HIDDEN].contiguous()} if is_biased else {}))[0]
            for n, part in enumerate(parts)
        ]
        for width in (8, HIDDEN - 8, HIDDEN + 8, 3 * HIDDEN, 5 * HIDDEN - 8, 5 * HIDDEN):
            recv_x, again, _ = dispatch(x[:, :width].contiguous(), handle=handle)
            assert recv_x.dtype == dtype and recv_x.is_contiguous() and (again is None or torch.equal(again, weights))
            assert_same("recv_x", recv_x, whole[:, :width])
            some = {name: value[:, :width].contiguous() for name, value in bias.items()}
            y, back = combine(recv_x, handle, topk_weights=weights, **some)
            assert_same("sums", y, torch.cat(sums, 1)[:, :width])
            assert_same("weights", back, combine(whole[:, :HIDDEN].to(torch.float32).contiguous(), handle, topk_weights=weights)[1])
    rows, scales = ops.quantize_fp8(wide[:, : 4 * HIDDEN].contiguous())
    recv_x, recv_scales = dispatch((rows, scales), handle=handle)[0]
    want = torch.cat([dispatch(part, handle=handle)[0] for part in rows.view(torch.float32).contiguous().split(HIDDEN, 1)], 1)
    assert_same("fp8 rows", recv_x.view(torch.uint8), want.view(torch.uint8))
    assert_same("scales", recv_scales, dispatch(torch.nn.functional.pad(scales, (0, 2)), handle=handle)[0][:, :2])
    fails = partial(pytest.raises, ValueError if rank == 1 else EPPeerError)
    with fails(match="row of x, 66 columns"):
        dispatch(torch.zeros(num_tokens, 66 if rank == 1 else 72, dtype=torch.bfloat16, device=device), handle=handle)
        look(backend)
    with fails(match="x has shape"):
        combine(recv_x.float()[: None if rank != 1 else -1], handle)
        look(backend)
    dispatch(wide[:, :HIDDEN].contiguous(), handle=handle)


@on_ranks((1, 2, 4), name=VERSIONS, backend=BACKENDS)
def test_equals_reference(rank, num_ranks, name, backend):
    """More tokens on a rank than any had before, none, rows in fp8, and handles of before, all in one buffer."""
    layout, is_hybrid = "expert" if name in ("V2_expanded", "hybrid_permuted") else "rank", name.startswith("hybrid")
    device = device_of(backend, rank)
    poison_outputs()
    _, dispatch, combine = VERSIONS[name](dist.group.WORLD, 12, 256)
    held = []
    for most, fp8 in ((5, False), (0, False), (300, True), (7, False)):
        case = Case([most, 3 if most else 0, 0, most][:num_ranks], layout=layout, **SIZES)
        want = Wanted(case, rank, layout, fp8, ascending(case) if is_hybrid else None)
        idx = want.idxs[rank]
        call = partial(dispatch, want.x_on(device), idx.to(device), want.topk_weights.to(device))
        recv_x, weights, handle = call()
        want.check_rows(recv_x)
        held.append((want, idx, call, weights, handle))
    for want, idx, call, weights, handle in held:
        want.check_rows(call(handle)[0])
        y, back = combine(want.outputs[rank].to(device), handle, weights)
        assert_same("sums", y, want.combined())
        expected = torch.where(idx < 0, 0.0, want.topk_weights)
        assert_same("weights", back, indices_to_map(idx, expected, len(idx), 12)[1] if is_hybrid else expected)
    dist.barrier()  # a rank without tokens waits for nothing, and what it sends would end with it


@on_ranks(4, backend=("shm", "collective"), per_node=(4, 2))
def test_lanes_are_summed_over_ranks_and_nodes(rank, backend, per_node):
    """Every rank gets each token and gives rank + 1 for each of its lanes, whoever has the expert."""
    buffer = Buffer(None, 3, 16, 4, 4, backend=backend, ranks_per_node=per_node)
    out = buffer.dispatch(torch.ones(3, 16), torch.arange(4).repeat(3, 1), torch.ones(3, 4), layout="rank")
    _, sums = combine_with_lanes(buffer, out.recv_x, out.handle, torch.full_like(out.recv_topk_weights, rank + 1))
    assert torch.equal(sums, torch.full((3, 4), 10.0))


# ---- buffers that give their memory back for a while ----


@on_ranks(2, name=("V1", "V2", "V2_5", "hybrid_permuted"), backend=BACKENDS)
def test_all_memory(rank, name, backend):
    device = device_of(backend, rank)
    poison_outputs()
    buffer, dispatch, combine = VERSIONS[name](dist.group.WORLD, 4, 2048)
    x = torch.arange(1.0, 5.0, device=device)[:, None].expand(4, 2048).contiguous()
    topk_idx = torch.tensor([[0, 2]], device=device).expand(4, 2).contiguous()

    def send():
        recv_x, _, handle = dispatch(x, topk_idx, torch.ones(4, 2, device=device))
        return recv_x, handle

    def send_low_latency():
        buffer.low_latency_dispatch(x.bfloat16(), topk_idx, 4, 4, use_fp8=False)

    calls = [send_low_latency, send] if name == "V1" else [send]
    *_, (recv_x, handle) = [call() for call in calls]
    before = buffer.memory()
    buffer.suspend()
    buffer.suspend()
    assert sum(buffer.memory()) == before.held and buffer.memory().suspended > 0
    for call in calls:
        with pytest.raises(BufferSuspendedError):
            call()
    buffer.resume()
    assert buffer.memory() == before
    assert torch.equal(combine(recv_x, handle)[0], 2 * x), "a handle from before"
    *_, (recv_x, handle) = [call() for call in calls]
    assert torch.equal(combine(recv_x, handle)[0], 2 * x)
    if name != "hybrid_permuted":
        buffer.suspend()
        buffer.destroy()
        with pytest.raises(BufferDestroyedError):
            buffer.resume()
