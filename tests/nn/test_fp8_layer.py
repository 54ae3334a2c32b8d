"""A MoELayer with fp8 experts beside the same one with bf16 experts: outputs, gradients, autocast, recomputation, checkpoints, refusals."""

import copy
import re

import emulated_gpu
import pytest
import torch
from exchange_cases import BACKENDS, assert_same, device_of
from on_ranks import on_ranks

from deepep_moe.errors import EPPeerError
from deepep_moe.nn import GroupedExperts, MoELayer, Router, SwiGLU
from deepep_moe.ops import fp8_products

HIDDEN, WIDTH, NUM_EXPERTS, NUM_TOPK, NUM_TOKENS = 128, 256, 8, 2, 96


def make_layer(rank, num_ranks, *, fp8, backend="shm", dtype=torch.bfloat16, device="cpu", hidden=HIDDEN, **settings):
    torch.manual_seed(0)
    router, shared = Router(hidden, NUM_EXPERTS, NUM_TOPK, device=device), SwiGLU(hidden, WIDTH, device=device, dtype=dtype)
    torch.manual_seed(1 + rank)
    experts = GroupedExperts(NUM_EXPERTS // num_ranks, hidden, WIDTH, device=device, dtype=dtype)
    return MoELayer(router, experts, shared, num_max_tokens_per_rank=NUM_TOKENS, backend=backend, fp8=fp8, **settings)


def tokens(rank, device="cpu"):
    generator = torch.Generator().manual_seed(20 + rank)
    return torch.randn(NUM_TOKENS - rank, HIDDEN, generator=generator).bfloat16().to(device).requires_grad_()


def run(layer, x, *, recompute=False, **which):
    layer.zero_grad()
    x = x.detach().clone().requires_grad_()
    y = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False, **which) if recompute else layer(x, **which)
    y.float().square().sum().backward()
    return {"y": y.detach(), "x": x.grad} | {name: parameter.grad.clone() for name, parameter in layer.named_parameters()}


@on_ranks(2, backend=BACKENDS)
def test_layers(rank, num_ranks, backend):
    device = device_of(backend, rank)
    make = {"backend": backend, "device": device}
    x, bound = tokens(rank, device), 128 * (num_ranks * NUM_TOKENS * NUM_TOPK // 128 + NUM_EXPERTS)
    layer = make_layer(rank, num_ranks, fp8=True, **make)
    assert layer.expert_alignment == 128
    for dtype in (torch.float32, torch.bfloat16) if backend == "shm" else (torch.bfloat16,):  # fp32: weights under autocast
        with torch.autocast(device.type, torch.bfloat16, enabled=dtype == torch.float32):
            ours = run(layer if dtype == torch.bfloat16 else make_layer(rank, num_ranks, fp8=True, dtype=dtype, **make), x)
            if emulated_gpu.is_chosen() and backend == "nvlink":  # which has no products in bf16
                continue
            exact = run(make_layer(rank, num_ranks, fp8=False, expert_alignment=128, dtype=dtype, **make), x)
        for name, values in exact.items():
            error = (ours[name].float() - values.float()).norm() / values.float().norm()
            assert error < 0.12, f"{dtype}, {name}: {error}"
            assert error > 0.001 or name.startswith("shared_expert"), f"{dtype}, {name}: {error}"
    for what, again in {
        "bounded": run(make_layer(rank, num_ranks, fp8=True, num_recv_rows=bound, **make), x),
        "recomputed": run(layer, x, recompute=True),
        "loaded": run(loaded(layer, make_layer(rank, num_ranks, fp8=True, **make)), x),
        "a copy": run(copy.deepcopy(layer), x),
    }.items():
        for name, values in ours.items():
            assert_same(f"{what}: {name}", again[name], values)


@on_ranks(2, backend=BACKENDS)
def test_micro_batches(rank, num_ranks, backend):
    """Forwards that share copies of the weights have the results of those that quantize, over steps of an optimizer."""
    device = device_of(backend, rank)
    make = {"backend": backend, "device": device}
    plain, layer = (make_layer(rank, num_ranks, fp8=True, **make) for _ in range(2))
    x, names = tokens(rank, device), set(layer.state_dict())
    for step in range(2):
        for batch in range(3):
            expected, got = run(plain, x), run(layer, x, recompute=(step + batch) % 2 == 1, is_first_microbatch=batch == 0)
            for name, values in expected.items():
                assert_same(f"step {step}, batch {batch}: {name}", got[name], values)
        for each in (plain, layer):
            torch.optim.SGD(each.parameters(), lr=1e-3).step()
    kept = layer.experts.kept_weights
    parameters = sum(parameter.numel() for parameter in layer.expert_parameters())
    assert kept.num_bytes == 2 * parameters + 2 * 4 * parameters // 128**2 and set(layer.state_dict()) == names
    layer.release_fp8_weights()
    assert kept.num_bytes == 0
    with pytest.raises((TypeError, EPPeerError), match="is_first_microbatch is 'first'; it must be True, False or None"):
        layer(x, is_first_microbatch="first")
    with pytest.raises((ValueError, EPPeerError), match="is_first_microbatch is False, but no fp8 copies of the weights are kept"):
        layer(x, is_first_microbatch=False)


def loaded(source, target):
    for parameter in target.parameters():
        parameter.data.zero_()
    target.load_state_dict(source.state_dict())
    return target


@on_ranks(2)
def test_compiled(rank, num_ranks):
    """The graph breaks at the exchange and the experts, with the same results."""
    x, layer = tokens(rank), make_layer(rank, num_ranks, fp8=True)
    expected, got = run(layer, x), run(torch.compile(layer, backend="eager"), x)
    for name, values in got.items():
        assert_same(name, values, expected[name.removeprefix("_orig_mod.")])


# ---- refusals ----


EXPERTS = NUM_EXPERTS, HIDDEN, WIDTH


@pytest.mark.parametrize(
    ("experts", "settings", "message"),
    (
        ((NUM_EXPERTS, 192, WIDTH), {}, "hidden is 192, but fp8 experts need multiples of 128"),
        ((NUM_EXPERTS, HIDDEN, 200), {}, "intermediate is 200, but fp8 experts need multiples of 128"),
        (EXPERTS, {"expert_alignment": 16}, "expert_alignment is 16, but fp8 experts need a multiple of 128"),
        (EXPERTS, {"num_recv_rows": 1000}, "num_recv_rows is 1000, but fp8 experts need a multiple of 128; pass 1024"),
        ((*EXPERTS, True), {}, "fp8 is True, but the experts have biases"),
        (None, {}, "fp8 is True, but experts are LocalExperts; pass GroupedExperts"),
        (EXPERTS, {"fp8": "yes"}, "fp8 is 'yes'"),
    ),
)
def test_bad_arguments(experts, settings, message):
    router = Router(experts[1] if experts else HIDDEN, NUM_EXPERTS, NUM_TOPK)
    bias = {"bias": True} if experts and len(experts) == 4 else {}
    modules = GroupedExperts(*experts[:3], **bias) if experts else [SwiGLU(HIDDEN, WIDTH) for _ in range(NUM_EXPERTS)]
    with pytest.raises((TypeError, ValueError), match=message):
        MoELayer(router, modules, **({"fp8": True} | settings))


@on_ranks(2)
def test_refusals_before_anything_is_sent(rank, num_ranks):
    layer, x = make_layer(rank, num_ranks, fp8=True), tokens(rank)
    expected = layer(x)
    stock, why = fp8_products.why_no_products, "GPU 7 has no fp8 products; they need a Hopper GPU"
    nan = x.detach().clone()
    nan[3, 100] = torch.nan  # reaches the gate's logits
    for bad, message in (
        (x.float(), "x has dtype float32; fp8='blockwise' takes bfloat16"),
        (x, f"fp8 experts cannot run: {why}"),
        (nan, "finite"),
    ):
        fp8_products.why_no_products = (lambda device: why) if bad is x and rank == 0 else stock
        with pytest.raises(Exception, match=re.escape(message)) as caught:
            layer(bad if rank == 0 else x)
        assert (type(caught.value) is EPPeerError) == (rank == 1)
        fp8_products.why_no_products = stock
    assert_same("after refusals", layer(x), expected)
