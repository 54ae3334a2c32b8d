"""Dispatch and combine of fp8 experts: what arrives, what autograd gets, the bytes on the wire, refusals before anything is sent. Whole
layers: tests/nn/test_fp8_layer.py."""

import itertools
from functools import partial

import pytest
import torch
from exchange_cases import assert_same, device_of, look
from on_ranks import on_ranks

from deepep_moe import Buffer, ops
from deepep_moe.errors import EPPeerError
from deepep_moe.ops import QuantizedRows, quantize_fp8

HIDDEN, WIDTH, NUM_EXPERTS, NUM_TOKENS = 256, 128, 8, 100
ON_GPUS = [pytest.param(*place, marks=pytest.mark.gpu) for place in (("nvlink", 1), ("nvlink", 2), ("nvlink", 4), ("nvshmem", 4))]


def inputs(rank, device):
    generator = torch.Generator().manual_seed(rank)
    num_tokens = NUM_TOKENS + 3 * rank
    x = torch.randn(num_tokens, HIDDEN, generator=generator).bfloat16().to(device)
    idx = torch.rand(num_tokens, NUM_EXPERTS, generator=generator).argsort(1)[:, :2].contiguous().to(device)
    return x, idx, torch.rand(num_tokens, 2, generator=generator).to(device)


def buffer_of(backend):
    settings = {"ranks_per_node": 2} if backend == "nvshmem" else {}
    return Buffer(None, NUM_TOKENS + 16, HIDDEN, NUM_EXPERTS, 2, backend=backend, timeout_s=60, **settings)


def sent_bytes(buffer):
    """Note the bytes of a row that each call of the buffer sends from now on."""
    noted = []

    def noting(stock, args):
        noted.append((args.x.nbytes + (0 if args.x_scales is None else args.x_scales.nbytes)) // len(args.x))
        return stock(args)

    buffer.calls.dispatch = partial(noting, buffer.calls.dispatch)
    return noted


# ---- what arrives ----


@pytest.mark.parametrize(("backend", "num_ranks"), [*itertools.product(("shm", "collective"), (1, 2, 4)), *ON_GPUS])
@on_ranks(())
def test_rows_and_gradients(rank, num_ranks, backend):
    device = device_of(backend, rank)
    buffer, (x, idx, weights) = buffer_of(backend), inputs(rank, device)
    x.requires_grad_(), weights.requires_grad_()
    noted = sent_bytes(buffer)
    out = buffer.dispatch(x, idx, weights, expert_alignment=128, fp8="blockwise")
    plain = buffer.dispatch(*quantize_fp8(x.detach(), power_of_two=True)[:1], idx, x_scales=out_scales(x), expert_alignment=128)
    assert isinstance(out.recv_x, QuantizedRows) and out.recv_x.dtype == torch.bfloat16 and out.recv_x_scales is out.recv_x.scales
    assert_same("values", out.recv_x.values, plain.recv_x)
    assert_same("scales", out.recv_x.scales, plain.recv_x_scales)
    words = ops.ue8m0.pack(out.recv_x.scales)
    assert words.shape == (len(out.recv_x), 1) and (words & 0xFF == out.recv_x.scales[:, :1].log2().clamp(min=-127) + 127).all()
    assert_same("scales as UE8M0", ops.ue8m0.unpack(words, HIDDEN // 128), out.recv_x.scales)
    for how in ({"async_op": True}, {"return_hook": True}, {"num_recv_rows": 1280}, {"handle": out.handle, "topk_idx": None}):
        other = buffer.dispatch(
            x.detach(),
            **(
                {"topk_idx": idx, "topk_weights": weights.detach(), "fp8": "blockwise"}
                | ({} if "handle" in how else {"expert_alignment": 128})
                | how
            ),
        )
        (other.hook or (other.event.wait if other.event else bool))()
        for name in ("values", "scales"):
            rows, rest = getattr(other.recv_x, name).split((len(plain.recv_x), len(other.recv_x) - len(plain.recv_x)))
            assert_same(f"{name} with {how}", rows, getattr(out.recv_x, name))
            assert not rest.float().any()
    padding = out.recv_topk_weights == 0
    assert padding.any() and not out.recv_x.values.float()[padding].any() and not out.recv_x.scales[padding].any()

    y = out.recv_x.detach().dequantized().requires_grad_()
    combined = buffer.combine(y, out.handle, fp8="blockwise")
    assert_same("combined", combined, buffer.combine(y.detach(), out.handle))
    grad = torch.randn(combined.shape, generator=torch.Generator().manual_seed(5)).bfloat16().to(device) * 1e-7
    caught = []
    y.register_hook(lambda gradient: caught.append(gradient) or gradient.dequantized())
    combined.backward(grad)
    expected = buffer.dispatch(*quantize_fp8(grad, power_of_two=True)[:1], x_scales=out_scales(grad), handle=out.handle)
    assert_same("the gradient's values", caught[0].values, expected.recv_x)
    assert_same("the gradient's scales", caught[0].scales, expected.recv_x_scales)

    grad_rows = torch.randn(out.recv_x.shape, generator=torch.Generator().manual_seed(6)).bfloat16().to(device)
    torch.autograd.backward([out.recv_x, out.recv_topk_weights], [grad_rows, torch.ones_like(out.recv_topk_weights)])
    assert_same("the gradient of x", x.grad, buffer.combine(grad_rows, out.handle))
    assert_same("the gradient of topk_weights", weights.grad, torch.ones_like(weights))
    row = HIDDEN + HIDDEN // 128 * 4
    assert row / (2 * HIDDEN) < 0.52
    for rows in (out.recv_x, caught[0]):  # those of dispatch, and of combine's gradient
        assert rows.values.nbytes + rows.scales.nbytes == row * len(rows)
    assert set(noted) == {row} or (backend in ("nvlink", "nvshmem") and not noted)  # C++ makes plain calls on GPUs


def out_scales(x):
    return quantize_fp8(x.detach(), power_of_two=True)[1]


# ---- refusals ----


def error_on(message, rank):
    """Return the error on `rank` when rank 0 refuses. Rank 3, on the other node and off the rail, hears of it from rank 2."""
    return message if rank < 3 else "rank 2 did not make its call: EPPeerError: rank 0 did not make its call"


@pytest.mark.parametrize(("backend", "num_ranks"), [("shm", 2), ("collective", 2), ON_GPUS[1], ON_GPUS[3]])
@on_ranks(())
def test_refusals(rank, num_ranks, backend):
    x, idx, _ = inputs(rank, device_of(backend, rank))
    buffer = buffer_of(backend)
    good = buffer.dispatch(x, idx, expert_alignment=128, fp8="blockwise")
    other = buffer.dispatch(x, idx)
    odd = buffer.dispatch(x, idx, expert_alignment=128, num_recv_rows=5000)
    _, scales = quantize_fp8(x)
    good_how = {"x": x, "topk_idx": idx, "expert_alignment": 128, "fp8": "blockwise"}
    for how, message in (
        ({"x": x.float()}, "x has dtype float32"),
        ({"x": x[:, :200].contiguous()}, "hidden a multiple of 128"),
        ({"expert_alignment": 64}, "expert_alignment is 64, .*; pass 128"),
        ({"num_recv_rows": 1000}, "num_recv_rows is 1000, .*; pass 1024"),
        ({"layout": "rank"}, "layout is 'rank'"),
        ({"fp8": "mxfp8"}, "fp8 is 'mxfp8'"),
        ({"x_scales": scales}, "fp8='blockwise' and x_scales were both given"),
        ({"handle": other.handle, "topk_idx": None, "expert_alignment": 1}, "expert_alignment is 1, "),
        ({"handle": odd.handle, "topk_idx": None}, "num_recv_rows is 5000, .*; pass 5120"),
    ):
        with pytest.raises((ValueError, TypeError) if rank == 0 else EPPeerError, match=error_on(message, rank)):
            buffer.dispatch(**(good_how | how if rank == 0 else good_how))
    rows = good.recv_x.dequantized()
    good_how = {"x": rows, "handle": good.handle, "fp8": "blockwise"}
    for how, message in (
        ({"topk_weights": torch.ones(len(rows), device=rows.device)}, 'topk_weights and fp8="blockwise" were both given'),
        ({"fp8": True}, "fp8 is True; combine takes False, or 'blockwise'"),
        ({"x": good.recv_x}, "x is QuantizedRows"),
        ({"x": good.recv_x, "fp8": False}, "was called with fp8 rows, which only grouped_mlp takes"),
    ):
        with pytest.raises((ValueError, TypeError, NotImplementedError) if rank == 0 else EPPeerError, match=error_on(message, rank)):
            buffer.combine(**(good_how | how if rank == 0 else good_how))
            look(buffer)
    assert_same("after refusals", buffer.dispatch(x, idx, expert_alignment=128, fp8="blockwise").recv_x.values, good.recv_x.values)
