"""Wrong arguments of low-latency calls, and settings that no backend can serve."""

import dataclasses
import os

import emulated_gpu
import pytest
import torch
from exchange_cases import device_of, on_device
from low_latency_cases import finish
from low_latency_faults import check_usable, make, on_every_backend

from deepep_moe import LowLatencyBuffer, LowLatencyHandle
from deepep_moe.errors import BackendUnavailableError, EPPeerError
from deepep_moe.group.rendezvous import Introduction
from deepep_moe.group.settings import Settings
from deepep_moe.low_latency.select import make_backend
from deepep_moe.testing import run_ranks

# ---- arguments ----


def raises_on(culprit, rank, error, message):
    """The culprit's own error there, the peers' with its message elsewhere."""
    if rank == culprit:
        return pytest.raises(error, match=message)
    return pytest.raises(EPPeerError, match=f"rank {culprit} did not make its call: {error.__name__}: .*({message})")


def bad_dispatches(rank, _, backend):
    buffer, x, idx = make(backend, rank)
    weights = torch.ones(4, 2, device=x.device)
    for changes, error, message in [
        (dict(x=x.double()), TypeError, "x has dtype float64; it must be float32 or bfloat16 or float16"),
        (dict(x=[1.0]), TypeError, "x must be a torch.Tensor, not list"),
        (dict(x=x[0]), ValueError, r"x has shape \[128\]; it must be \[num_tokens, 128\]"),
        (dict(x=x[:, :64].contiguous()), ValueError, r"x has shape \[4, 64\]; it must be \[4, 128\]"),
        (dict(x=torch.zeros(128, 4, device=x.device).t()), ValueError, "x .* is not contiguous"),
        (dict(x=torch.empty(4, 128, device="meta")), ValueError, "x is on meta; this buffer moves tensors on"),
        (dict(x=x.clone().requires_grad_()), ValueError, "x requires a gradient .* use Buffer, or x.detach()"),
        (
            dict(topk_weights=weights.clone().requires_grad_()),
            ValueError,
            "topk_weights requires a gradient .* use Buffer, or topk_weights.detach()",
        ),
        (
            dict(x=x.repeat(3, 1), topk_idx=idx.repeat(3, 1), topk_weights=None),
            ValueError,
            "x has 12 tokens, more than the buffer's num_max_tokens_per_rank of 8; create the LowLatencyBuffer with a larger bound",
        ),
        (dict(topk_idx=idx.float()), TypeError, "topk_idx has dtype float32; it must be int64 or int32"),
        (dict(topk_idx=idx[:3]), ValueError, r"topk_idx has shape \[3, 2\]; it must be \[4, 2\]"),
        (dict(topk_idx=idx + 1), ValueError, r"topk_idx\[[12], [01]\] is 4; it must be -1 \(no expert\) or 0 to 3"),
        (dict(topk_idx=idx - 2), ValueError, r"topk_idx\[\d, \d\] is -[23]; it must be -1 \(no expert\) or 0 to 3"),
        (dict(topk_idx=idx * 0 + 1), ValueError, r"topk_idx\[\d\] names expert 1 twice"),
        (dict(topk_weights=weights.half()), TypeError, "topk_weights has dtype float16; it must be float32"),
        (dict(topk_weights=weights[:, :1]), ValueError, r"topk_weights has shape \[4, 1\]; it must be \[4, 2\]"),
        (dict(scale_format="e8"), ValueError, r"scale_format is 'e8'; it must be one of \['fp32', 'ue8m0'\]"),
        (dict(scale_format="ue8m0"), ValueError, "scale_format 'ue8m0' was given without fp8=True"),
    ]:
        mine = dict(x=x, topk_idx=idx, topk_weights=weights) | (changes if rank == 0 else {})
        with raises_on(0, rank, error, message):
            buffer.dispatch(**mine)
            finish(buffer)
        check_usable(buffer, x, idx)


@on_every_backend
def test_bad_arguments_of_dispatch(backend):
    run_ranks(bad_dispatches, 2, backend)


def bad_combines(rank, _, backend):
    buffer, x, idx = make(backend, rank)
    other, *_ = make(backend, rank)
    out, foreign = buffer.dispatch(x, idx), other.dispatch(x, idx)
    y, weights = out.recv_x, torch.ones(4, 2, device=x.device)
    for changes, error, message in [
        (dict(x=y.double()), TypeError, "x has dtype float64"),
        (dict(x=y[:, :3]), ValueError, r"x has shape \[2, 3, 128\]; it must be \[2, 16, 128\]"),
        (dict(handle=None), TypeError, "handle must be the LowLatencyHandle of a dispatch, not NoneType"),
        (dict(handle=foreign.handle), ValueError, r"handle belongs to low-latency buffer \d+, this is \d+"),
        (dict(out=x[:3]), ValueError, r"out has shape \[3, 128\]; it must be \[4, 128\]"),
        (dict(out=x.half()), TypeError, "out has dtype float16; it must be float32"),
        (dict(topk_weights=weights.half()), TypeError, "topk_weights has dtype float16; it must be float32"),
        (dict(topk_weights=weights[:3]), ValueError, r"topk_weights has shape \[3, 2\]; it must be \[4, 2\]"),
        (dict(topk_weights=weights.cpu().to("meta")), ValueError, "topk_weights is on meta; it must be on"),
        (dict(topk_weights=weights.clone().requires_grad_()), ValueError, "topk_weights requires a gradient .* use Buffer"),
        (dict(wire="fp4"), ValueError, r"wire is 'fp4'; it must be one of \[None, 'fp8'\]"),
    ]:
        mine = dict(x=y, handle=out.handle, topk_weights=weights) | (changes if rank == 1 else {})
        with raises_on(1, rank, error, message):
            buffer.combine(**mine)
            finish(buffer)
        check_usable(buffer, x, idx)


@on_every_backend
def test_bad_arguments_of_combine(backend):
    run_ranks(bad_combines, 2, backend)


def changed_handle(handle, change):
    """Return what a caller may pass for the handle, changed in one way."""
    match change:
        case "in place":
            handle.state.fill_(7)
        case "a view in place":
            handle.state[16:].view(torch.int32)[:4].zero_()
        case "in inference mode":
            with torch.inference_mode():
                handle.state.zero_()
        case "freed":
            handle.state.untyped_storage().resize_(0)
        case "cut":
            handle.state.untyped_storage().resize_(handle.state.numel() - 1)
        case "field":
            object.__setattr__(handle, "num_tokens", 10**6)
        case "copy of other state":
            return dataclasses.replace(handle, state=handle.state[:64])
        case "copy of other tokens":
            return dataclasses.replace(handle, num_tokens=10**6)
        case "made by hand":
            return LowLatencyHandle(handle.buffer_id, handle.num_tokens, handle.state)
    return handle


CHANGES = (
    "in place", "a view in place", "in inference mode", "freed", "cut", "field", "copy of other state", "copy of other tokens",
    "made by hand",
)  # fmt: skip


def changed_handles(rank, _, backend, in_inference_mode):
    buffer, x, idx = make(backend, rank)
    for change in CHANGES:
        with torch.inference_mode(in_inference_mode):
            out = buffer.dispatch(x, idx)
        handle = changed_handle(out.handle, change) if rank == 0 else out.handle
        with raises_on(0, rank, ValueError, "handle is not as its dispatch made it"):
            buffer.combine(out.recv_x, handle)
            finish(buffer)
        check_usable(buffer, x, idx)


@pytest.mark.parametrize("in_inference_mode", (False, True))
@on_every_backend
def test_changed_handles(backend, in_inference_mode):
    run_ranks(changed_handles, 2, backend, in_inference_mode)


def test_handle_changed_past_pytorch():
    buffer = LowLatencyBuffer(None, 8, 128, 2, 1)
    x, idx = torch.randn(4, 128), torch.zeros(4, 1, dtype=torch.int64)
    out = buffer.dispatch(x, idx)
    out.handle.state[8:].data.fill_(7)
    with pytest.raises(ValueError, match="the state of this handle was changed after its dispatch"):
        buffer.combine(out.recv_x, out.handle)
    out = buffer.dispatch(x, idx)
    assert torch.equal(buffer.combine(out.recv_x, out.handle), x)


def freed_inputs(rank, _, backend):
    buffer, x, idx = make(backend, rank)
    out, weights = buffer.dispatch(x, idx), torch.ones(4, 2, device=x.device)
    for name in ("x", "topk_idx", "topk_weights"):
        inputs = {"x": x.clone(), "topk_idx": idx.clone(), "topk_weights": weights.clone()}
        if rank == 1:
            inputs[name].untyped_storage().resize_(0)
        with raises_on(1, rank, ValueError, f"{name} has shape .* its storage was freed or cut"):
            buffer.dispatch(**inputs)
            finish(buffer)
        check_usable(buffer, x, idx)
    for name in ("x", "topk_weights", "out"):
        inputs = {"x": out.recv_x.clone(), "topk_weights": weights.clone(), "out": torch.empty_like(x)}
        if rank == 1:
            inputs[name].untyped_storage().resize_(16)
        with raises_on(1, rank, ValueError, f"{name} has shape .* its storage was freed or cut"):
            buffer.combine(handle=out.handle, **inputs)
            finish(buffer)
        check_usable(buffer, x, idx)


@on_every_backend
def test_freed_inputs(backend):
    run_ranks(freed_inputs, 2, backend)


def small_hidden(rank, _, backend):
    device_of(backend, rank)
    buffer = LowLatencyBuffer(None, 4, 20, 2, 1, backend=backend)
    x, idx = on_device(backend, rank, torch.randn(4, 20), torch.zeros(4, 1, dtype=torch.int64))
    out = buffer.dispatch(x, idx)
    with pytest.raises(ValueError, match="hidden is 20; rows in fp8 need a multiple of 128"):
        buffer.dispatch(x, idx, fp8=True)
    with pytest.raises(ValueError, match="hidden is 20; rows in fp8 need a multiple of 128"):
        buffer.combine(out.recv_x, out.handle, wire="fp8")
    with pytest.raises(ValueError, match="rows of x have 40 bytes and begin at address .* both must be multiples of 16"):
        buffer.dispatch(x.half(), idx)
    with pytest.raises(ValueError, match="rows of combine's x have 40 bytes and begin at address .* both must be multiples of 16"):
        buffer.combine_input(torch.float16)
    with pytest.raises(ValueError, match="rows of x have 80 bytes and begin at address .* both must be multiples of 16"):
        buffer.dispatch(torch.zeros(81, device=x.device)[1:].view(4, 20), idx)


@on_every_backend
def test_hidden(backend):
    run_ranks(small_hidden, 1, backend)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(num_max_tokens_per_rank=0), "num_max_tokens_per_rank is 0; it must be 1 to 65535"),
        (dict(num_max_tokens_per_rank=65536), "num_max_tokens_per_rank is 65536; it must be 1 to 65535"),
        (dict(num_experts=32768), "num_experts is 32768; a rank can hold 32767, give more ranks or fewer experts"),
        (dict(num_topk=33, num_experts=64), "num_topk is 33; it must be at most"),
        (dict(backend="collective"), r"backend is 'collective'; it must be one of \['auto', 'shm', 'nvlink', 'nvshmem'\]"),
        (dict(timeout_s=-1), "timeout_s is -1; it must be a positive number of seconds"),
    ],
)
def test_bad_settings(changes, message):
    with pytest.raises(ValueError, match=message):
        LowLatencyBuffer(None, **(dict(num_max_tokens_per_rank=8, hidden=16, num_experts=4, num_topk=2) | changes))


@pytest.mark.parametrize(
    ("name", "num_ranks", "message"),
    [
        ("auto", 9, "backend='auto': low-latency buffers serve at most 8 ranks, this group has 9; use Buffer, which has more backends"),
        ("shm", 9, "backend='shm': low-latency buffers serve at most 8 ranks, this group has 9; use Buffer, which has more backends"),
        ("nvlink", 2, "backend='nvlink': .*; use backend='auto', or Buffer, which has more backends"),
    ],
)
def test_advice_where_no_backend_can_serve(name, num_ranks, message):
    peers = [Introduction(None, name, {}, "here", rank, 1, "cpu:gloo", False, 0) for rank in range(num_ranks)]
    with pytest.raises(BackendUnavailableError, match=f"no low-latency backend can serve, {message}\npython -m deepep_moe.doctor says"):
        make_backend(name, Settings(num_ranks, 0, 8, 16, 4 * num_ranks, 2, 20.0, num_ranks), peers, None, False)


def test_attributes():
    buffer = LowLatencyBuffer(None, 8, 20, 4, 2, backend="shm")
    assert (buffer.num_max_tokens_per_rank, buffer.hidden, buffer.num_experts, buffer.num_topk) == (8, 20, 4, 2)
    with pytest.raises(AttributeError):
        buffer.hidden = 32
    with pytest.raises(TypeError, match="combine's x has dtype float64; it must be float32 or bfloat16 or float16"):
        buffer.combine_input(torch.float64)
    with pytest.raises(ValueError, match="rows of combine's x have 40 bytes and .* both must be multiples of 16"):
        buffer.combine_input(torch.float16)
    assert buffer.combine_input(torch.float32).shape == (4, 8, 20)


def over_pcie(rank, _):
    os.environ["DEEPEP_MOE_EMULATED_BUS"] = f"0000:{rank}1:00.0"
    message = r"on rank 0: the GPU of rank 1, 0000:11:00.0, is reached without NVLink .*; use backend='auto', or Buffer"
    with pytest.raises(BackendUnavailableError, match=message):
        make("nvlink", rank)


@pytest.mark.gpu
@pytest.mark.skipif(not emulated_gpu.is_chosen(), reason="needs GPUs linked by PCIe, or emulated ones")
def test_links_that_are_not_nvlink():
    run_ranks(over_pcie, 2)
