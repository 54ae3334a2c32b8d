"""Wrong arguments of low-latency calls, and settings that no backend can serve."""

import dataclasses
import itertools
import os
from functools import partial

import emulated_gpu
import pytest
import torch
from exchange_cases import device_of, look, on_device
from low_latency_cases import BACKENDS, check_usable, make
from on_ranks import on_ranks, refused

from deepep_moe import LowLatencyBuffer, LowLatencyHandle
from deepep_moe.errors import BackendUnavailableError
from deepep_moe.group.rendezvous import Introduction
from deepep_moe.group.settings import Settings
from deepep_moe.low_latency.select import make_backend

# ---- arguments ----


def freed(tensor, num_bytes=0):
    tensor = tensor.clone()
    tensor.untyped_storage().resize_(num_bytes)
    return tensor


def refuse_each(rank, culprit, table, call, arguments, look, check):
    """`call` with each of the changes on the culprit, and then the buffer is usable."""
    for changes, error, message in table:
        with refused(rank, culprit, error, message):
            call(**(arguments | (changes if rank == culprit else {})))
            look()
        check()


@on_ranks(2, sums=("ranks", "lanes"), backend=BACKENDS)
def test_bad_arguments(rank, backend, sums):
    buffer, x, idx = make(backend, rank, sums=sums)
    weights = torch.ones(4, 2, device=x.device)
    table = [
        (dict(x=x.double()), TypeError, "x has dtype float64; it must be"),
        (dict(x=[1.0]), TypeError, "x must be a torch.Tensor, not list"),
        (dict(x=x[0]), ValueError, r"x has shape \[128\]; it must be \[num_tokens, 128\]"),
        (dict(x=x[:, :64].contiguous()), ValueError, r"x has shape \[4, 64\]; it must be \[4, 128\]"),
        (dict(x=torch.zeros(128, 4, device=x.device).t()), ValueError, "x .* is not contiguous"),
        (dict(x=torch.empty(4, 128, device="meta")), ValueError, "x is on meta"),
        (dict(x=x.clone().requires_grad_()), ValueError, "x requires a gradient"),
        (dict(topk_weights=weights.clone().requires_grad_()), ValueError, "topk_weights requires a gradient"),
        (dict(topk_weights=weights.half()), TypeError, "topk_weights has dtype float16"),
        (dict(topk_weights=weights[:, :1]), ValueError, r"topk_weights has shape \[4, 1\]"),
        (dict(x=x.repeat(3, 1), topk_idx=idx.repeat(3, 1), topk_weights=None), ValueError, "12 tokens, .* num_max_tokens_per_rank of 8"),
        (dict(topk_idx=idx.float()), TypeError, "topk_idx has dtype float32"),
        (dict(topk_idx=idx[:3]), ValueError, r"topk_idx has shape \[3, 2\]"),
        (dict(topk_idx=idx + 1), ValueError, r"topk_idx\[[12], [01]\] is 4; it must be -1 \(no expert\) or 0 to 3"),
        (dict(topk_idx=idx - 2), ValueError, r"topk_idx\[\d, \d\] is -[23]; it must be -1 \(no expert\) or 0 to 3"),
        (dict(topk_idx=idx * 0 + 1), ValueError, r"topk_idx\[\d\] names expert 1 twice"),
        (dict(scale_format="e8"), ValueError, "scale_format is 'e8'"),
        (dict(fp8=torch.ones(2)), RuntimeError, "Boolean value of Tensor with more than one value is ambiguous"),
        (dict(return_hook=torch.ones(2)), RuntimeError, "Boolean value of Tensor with more than one value is ambiguous"),
        (dict(scale_format="ue8m0"), ValueError, "scale_format 'ue8m0' was given without fp8=True"),
    ]
    good = dict(x=x, topk_idx=idx, topk_weights=weights)
    table += [({name: freed(tensor)}, ValueError, f"{name} has shape .* its storage was freed or cut") for name, tensor in good.items()]
    refuse_each(rank, 0, table, buffer.dispatch, good, partial(look, buffer), partial(check_usable, buffer, x, idx))

    other, *_ = make(backend, rank, sums=sums)
    out, foreign = buffer.dispatch(x, idx), other.dispatch(x, idx)
    y = out.recv_x
    table = [
        (dict(x=y.double()), TypeError, "x has dtype float64"),
        (dict(x=y[:, :3]), ValueError, r"x has shape \[2, 3, 128\]; it must be \[2, 16, 128\]"),
        (dict(x=freed(y, 16)), ValueError, "x has shape .* its storage was freed or cut"),
        (dict(handle=None), TypeError, "handle must be the LowLatencyHandle of a dispatch, not NoneType"),
        (dict(handle=foreign.handle), ValueError, r"handle belongs to low-latency buffer \d+, this is \d+"),
        (dict(out=x[:3]), ValueError, r"out has shape \[3, 128\]; it must be \[4, 128\]"),
        (dict(out=x.half()), TypeError, "out has dtype float16"),
        (dict(out=freed(x, 16)), ValueError, "out has shape .* its storage was freed or cut"),
        (dict(topk_weights=weights.half()), TypeError, "topk_weights has dtype float16"),
        (dict(topk_weights=weights[:3]), ValueError, r"topk_weights has shape \[3, 2\]"),
        (dict(topk_weights=weights.cpu().to("meta")), ValueError, "topk_weights is on meta"),
        (dict(topk_weights=weights.clone().requires_grad_()), ValueError, "topk_weights requires a gradient"),
        (dict(topk_weights=freed(weights, 16)), ValueError, "topk_weights has shape .* its storage was freed or cut"),
        (dict(wire="fp4"), ValueError, "wire is 'fp4'"),
        *([(dict(wire="fp8"), ValueError, "wire is 'fp8' with sums='lanes'")] if sums == "lanes" else []),
    ]
    good = dict(x=y, handle=out.handle, topk_weights=weights)
    refuse_each(rank, 1, table, buffer.combine, good, partial(look, buffer), partial(check_usable, buffer, x, idx))


# Changes that a caller may make to a handle, or values that it may pass for one.
CHANGES = {
    "in place": lambda handle: handle.state.fill_(7),
    "a view in place": lambda handle: handle.state[16:].view(torch.int32)[:4].zero_(),
    "in inference mode": torch.inference_mode()(lambda handle: handle.state.zero_()),
    "freed": lambda handle: handle.state.untyped_storage().resize_(0),
    "cut": lambda handle: handle.state.untyped_storage().resize_(handle.state.numel() - 1),
    "field": lambda handle: object.__setattr__(handle, "num_tokens", 10**6),
    "copy of other state": lambda handle: dataclasses.replace(handle, state=handle.state[:64]),
    "copy of other tokens": lambda handle: dataclasses.replace(handle, num_tokens=10**6),
    "made by hand": lambda handle: LowLatencyHandle(handle.buffer_id, handle.num_tokens, handle.state),
}


@on_ranks(2, backend=BACKENDS)
def test_changed_handles(rank, backend):
    buffer, x, idx = make(backend, rank)
    for change, in_inference_mode in itertools.product(CHANGES, (False, True)):
        with torch.inference_mode(in_inference_mode):
            out = buffer.dispatch(x, idx)
        handle = CHANGES[change](out.handle) if rank == 0 else None
        with refused(rank, 0, ValueError, "handle is not as its dispatch made it"):
            buffer.combine(out.recv_x, handle if isinstance(handle, LowLatencyHandle) else out.handle)
            look(buffer)
            raise AssertionError(f"{change}, in_inference_mode={in_inference_mode}: nothing was raised")
        check_usable(buffer, x, idx)


def test_handle_changed_past_pytorch():
    buffer = LowLatencyBuffer(None, 8, 128, 2, 1)
    x, idx = torch.randn(4, 128), torch.zeros(4, 1, dtype=torch.int64)
    out = buffer.dispatch(x, idx)
    out.handle.state[8:].data.fill_(7)
    with pytest.raises(ValueError, match="the state of this handle was changed after its dispatch"):
        buffer.combine(out.recv_x, out.handle)
    out = buffer.dispatch(x, idx)
    assert torch.equal(buffer.combine(out.recv_x, out.handle), x)


@on_ranks(1, backend=BACKENDS)
def test_hidden(rank, backend):
    device_of(backend, rank)
    buffer = LowLatencyBuffer(None, 4, 20, 2, 1, backend=backend)
    x, idx = on_device(backend, rank, torch.randn(4, 20), torch.zeros(4, 1, dtype=torch.int64))
    out = buffer.dispatch(x, idx)
    shifted = torch.zeros(81, device=x.device)[1:].view(4, 20)
    for message, call in (
        ("hidden is 20; rows in fp8 need a multiple of 128", lambda: buffer.dispatch(x, idx, fp8=True)),
        ("hidden is 20; rows in fp8 need a multiple of 128", lambda: buffer.combine(out.recv_x, out.handle, wire="fp8")),
        ("rows of x have 40 bytes and .* both must be multiples of 16", lambda: buffer.dispatch(x.half(), idx)),
        ("rows of combine's x have 40 bytes and .* both must be multiples of 16", lambda: buffer.combine_input(torch.float16)),
        ("rows of x have 80 bytes and begin at address .* both must be multiples of 16", lambda: buffer.dispatch(shifted, idx)),
    ):
        with pytest.raises(ValueError, match=message):
            call()
    with pytest.raises(TypeError, match="combine's x has dtype float64"):
        buffer.combine_input(torch.float64)


@pytest.mark.parametrize(("name", "num_ranks", "message"), [
    ("auto", 9, "low-latency buffers serve at most 8 ranks, this group has 9; use Buffer"),
    ("shm", 9, "low-latency buffers serve at most 8 ranks, this group has 9; use Buffer"),
    ("nvlink", 2, ".*; use backend='auto', or Buffer"),
])  # fmt: skip
def test_advice_where_no_backend_can_serve(name, num_ranks, message):
    peers = [Introduction(None, name, {}, "here", rank, 1, "cpu:gloo", False, "", 0) for rank in range(num_ranks)]
    with pytest.raises(BackendUnavailableError, match=f"backend='{name}': {message}, which has more backends"):
        make_backend(name, Settings(num_ranks, 0, 8, 16, 4 * num_ranks, 2, 20.0, num_ranks), peers, None, False)


@pytest.mark.gpu
@pytest.mark.skipif(not emulated_gpu.is_chosen(), reason="needs GPUs linked by PCIe, or emulated ones")
@on_ranks(2)
def test_links_that_are_not_nvlink(rank):
    os.environ["DEEPEP_MOE_EMULATED_BUS"] = f"0000:{rank}1:00.0"
    message = r"on rank 0: the GPU of rank 1, 0000:11:00.0, is reached without NVLink .*; use backend='auto', or Buffer"
    with pytest.raises(BackendUnavailableError, match=message):
        make("nvlink", rank)
