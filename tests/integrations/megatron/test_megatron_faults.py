"""What fails on one rank, and code of others beside ours: replaced functions, hooks, subclasses."""

import functools
import time

import pytest
import torch
from megatron_cases import HIDDEN, build_layer, layer_config, model_parallel
from on_ranks import on_ranks

from deepep_moe.errors import EPPeerError
from deepep_moe.integrations.megatron import disable, enable
from deepep_moe.integrations.megatron.patches import Patches
from deepep_moe.integrations.megatron.plugin import selection
from deepep_moe.testing.launch import run_ranks

pytest.importorskip("megatron.core")


def our_layer(sizes, **switches):
    return build_layer(layer_config(**sizes, **selection(), moe_router_dtype="fp32", **switches))


def needs_gate():
    from megatron.core.transformer.moe import router

    if not hasattr(router, "topk_routing_with_score_function"):
        pytest.skip("megatron-core 0.13 routes without it, and the gate does not serve it")


# ---- a rank that fails ----


def _failing_worker(rank: int, num_ranks: int, device_type: str, num_forwards: int) -> None:
    with model_parallel(device_type, ep=num_ranks) as sizes:
        layer = our_layer(sizes)
        x = torch.randn(12, 1, HIDDEN, device=next(layer.parameters()).device)
        for _ in range(num_forwards):
            layer(x)
        for place, module in (("router", layer.router), ("expert", layer.experts), ("shared expert", layer.shared_experts)):

            def fail(*_, place=place):
                raise ArithmeticError(f"no {place} on rank 1")

            hook = module.register_forward_pre_hook(fail) if rank == 1 else None
            told = "" if rank == 1 else "rank 1 did not make its call: ArithmeticError: "
            began = time.monotonic()
            with pytest.raises(ArithmeticError if rank == 1 else EPPeerError, match=f"{told}no {place} on rank 1"):
                layer(x)
                if device_type == "cuda":  # whose host does not wait for a combine
                    torch.cuda.synchronize()
                    layer.token_dispatcher.buffer.check()
            assert time.monotonic() - began < 60, "far from the deadline of 300 s"
            if hook is not None:
                hook.remove()
            assert layer(x)[0].isfinite().all(), "all go on"


@pytest.mark.parametrize("num_forwards", (0, 1))
@pytest.mark.parametrize("device", ("cpu", pytest.param("cuda", marks=pytest.mark.multi_gpu(2))))
def test_peers_learn_what_failed(device, num_forwards):
    """In the first forward too, which makes the buffer."""
    run_ranks(_failing_worker, 2, device, num_forwards)


@on_ranks(2)
def test_peers_learn_of_a_failing_recomputation(rank: int, num_ranks: int) -> None:
    """The experts of rank 1 fail when they run for the second time."""
    with model_parallel(ep=num_ranks) as sizes:
        layer, calls = our_layer(sizes, recompute_granularity="selective", recompute_modules=["moe"]), []

        def fail(*_):
            calls.append(1)
            if len(calls) == 2 and rank == 1:
                raise ArithmeticError("no memory on rank 1")

        layer.experts.register_forward_pre_hook(fail)
        for attempt in range(2):
            output = layer(torch.randn(6, 1, HIDDEN, requires_grad=True))[0].sum()
            if attempt == 1:
                output.backward()
                break
            began = time.monotonic()
            with pytest.raises(ArithmeticError if rank == 1 else EPPeerError, match="no memory on rank 1"):
                output.backward()
            assert time.monotonic() - began < 60, "far from the deadline of 300 s"


def _unfinished_logits_worker(rank: int, num_ranks: int) -> None:
    with model_parallel(ep=num_ranks) as sizes:
        layer = our_layer(sizes)
        x = torch.randn(4, 1, HIDDEN)
        if rank == 1:
            x[2] = torch.nan
        why = r"logits has nan for token 2.*Megatron-Core's own routing, which enable\(gate=False\) leaves in place"
        with pytest.raises(ValueError if rank == 1 else EPPeerError, match=why):
            layer(x)


def test_logits_that_are_not_finite_name_the_switch():
    needs_gate()
    run_ranks(_unfinished_logits_worker, 2)


# ---- what Megatron-Core does with the layers ----


@on_ranks(2)
def test_local_graphs_may_overwrite_the_choice(rank: int, num_ranks: int) -> None:
    """A layer whose later parts run outside of its local graphs keeps the choice of the first micro batch, and writes the second one's
    into that tensor."""
    with model_parallel(ep=num_ranks) as sizes:
        layer, outputs = our_layer(sizes), []
        layer.token_dispatcher._choice_is_overwritten = True  # as with cuda_graph_impl="local", which needs a GPU
        kept = None
        for seed in range(2):
            x = torch.randn(6, 1, HIDDEN, generator=torch.Generator().manual_seed(seed))
            outputs.append(layer(x)[0])
            chosen = layer.token_dispatcher.topk_idx.detach()
            kept = chosen if kept is None else kept.copy_(chosen)
        for output in outputs:
            output.sum().backward()


@on_ranks(2)
def test_inference_mode(rank: int, num_ranks: int) -> None:
    """In which tensors count no changes."""
    with model_parallel(ep=num_ranks) as sizes:
        ours, stock = our_layer(sizes).eval(), build_layer(layer_config(**sizes, moe_token_dispatcher_type="alltoall")).eval()
        x = torch.randn(5, 2, HIDDEN)
        with torch.inference_mode():
            torch.testing.assert_close(ours(x)[0], stock(x)[0])
        ours.train()(x.requires_grad_())[0].sum().backward()
        assert x.grad.isfinite().all()


@on_ranks(2)
def test_padding_that_is_switched_on_later_is_refused(rank: int, num_ranks: int) -> None:
    with model_parallel(ep=num_ranks) as sizes:
        layer = our_layer(sizes)
        layer.config.moe_pad_expert_input_to_capacity = True  # as the inference engine does while it decodes
        with pytest.raises(ValueError, match=r"set it to False, also in inference \(moe_pad_experts_for_cuda_graph_inference sets it\)"):
            layer(torch.randn(4, 1, HIDDEN))


@on_ranks(1)
def test_alignment_is_that_of_the_recipe(rank: int, num_ranks: int) -> None:
    with model_parallel(expert_alignment=16):
        config = layer_config(**selection(), moe_shared_expert_intermediate_size=None)  # which 0.14 and 0.15 ask for TransformerEngine
        padding = "moe_router_padding_for_quantization"
        for name, value in {padding if hasattr(config, padding) else "moe_router_padding_for_fp8": True, "fp8": "e4m3"}.items():
            setattr(config, name, value)
        build_layer(config)
        config.fp8_recipe = "mxfp8"
        with pytest.raises(ValueError, match=r"expert_alignment is 16, .*; call enable\(expert_alignment=32\)"):
            build_layer(config)


# ---- code of others ----


def _replaced_worker(rank: int, num_ranks: int) -> None:
    from megatron.core.transformer.moe import moe_utils, router

    calls = []

    def noting(original):
        def wrapper(*args, **kwargs):
            calls.append(original.__name__)
            return original(*args, **kwargs)

        return wrapper

    def count_calls(sizes):
        calls.clear()
        our_layer(sizes)(torch.randn(4, 1, HIDDEN))
        return len(calls)

    with model_parallel(ep=num_ranks) as sizes:
        for owner, name in ((router, "topk_routing_with_score_function"), (moe_utils, "group_limited_topk")):
            original, others = getattr(owner, name), Patches()
            bare = noting(original)
            for replacement in (bare, functools.wraps(original)(bare)):
                disable()
                others.set(owner, name, replacement)
                enable()
                assert count_calls(sizes) == 1, f"{name} of somebody else was bypassed"
                disable()
                others.restore()
        enable()
        assert count_calls(sizes) == 0
        router.topk_routing_with_score_function = noting(router.topk_routing_with_score_function)
        theirs = router.topk_routing_with_score_function
        assert count_calls(sizes) == 1
        disable()
        assert router.topk_routing_with_score_function is theirs, "replaced after us, so not ours to put back"


def test_replaced_functions_are_not_bypassed():
    needs_gate()
    run_ranks(_replaced_worker, 2)


@on_ranks(2)
def test_hooks_on_probs_run(rank: int, num_ranks: int) -> None:
    with model_parallel(ep=num_ranks) as sizes:
        layer, seen = our_layer(sizes, moe_router_load_balancing_type="none"), []
        route = layer.router.routing

        def routing(*args, **kwargs):
            probs, routing_map = route(*args, **kwargs)
            probs.register_hook(lambda grad: seen.append(grad) or torch.zeros_like(grad))
            return probs, routing_map

        layer.router.routing = routing
        layer(torch.randn(4, 1, HIDDEN))[0].sum().backward()
        assert len(seen) == 1 and seen[0].any(), "the gradient went past the hook"
        assert not layer.router.weight.grad.any(), "what the hook returned was not used"


def test_subclasses_of_the_flex_dispatcher_are_themselves():
    from megatron.core.transformer.moe import moe_layer

    enable()
    try:

        class Theirs(moe_layer.MoEFlexTokenDispatcher):
            def __init__(self, num_local_experts, local_expert_indices, config, **groups):
                self.num_local_experts = num_local_experts

        assert type(Theirs(3, [0, 1, 2], layer_config(**selection()))) is Theirs
    finally:
        disable()


def test_enable_that_fails_leaves_nothing(monkeypatch):
    from megatron.core.transformer.moe import moe_layer, router

    dispatcher, forward = moe_layer.MoEFlexTokenDispatcher, moe_layer.MoELayer.forward
    monkeypatch.setattr(router, "topk_routing_with_score_function", "no function", raising=False)
    with pytest.raises(TypeError):
        enable()
    assert moe_layer.MoEFlexTokenDispatcher is dispatcher and moe_layer.MoELayer.forward is forward
    disable()  # was not enabled: nothing


# ---- num_sms ----


@pytest.mark.gpu
@on_ranks(1)
def test_num_sms(rank: int, num_ranks: int) -> None:
    with model_parallel("cuda", ep=num_ranks, num_sms=6) as sizes:
        layer = our_layer(sizes)
        layer(torch.randn(4, 1, HIDDEN, device="cuda"))
        assert layer.token_dispatcher.buffer.calls.own_mode.num_sms == 6
        layer.config.moe_flex_dispatcher_num_sms = 4
        layer(torch.randn(4, 1, HIDDEN, device="cuda"))
        assert layer.token_dispatcher.buffer.calls.own_mode.num_sms == 4


def test_num_sms_is_checked():
    with pytest.raises(ValueError, match="num_sms is -1; it must be at least 0"):
        enable(num_sms=-1)
