"""Failures on one rank, and other code beside ours: replaced functions, hooks, subclasses."""

import functools
import time
from functools import partial

import pytest
import torch
from megatron_cases import HIDDEN, RECOMPUTED, enabled, layer_config, layer_of, model_parallel, on_megatron
from on_ranks import on_ranks

from deepep_moe.errors import EPPeerError
from deepep_moe.integrations.megatron import disable, enable
from deepep_moe.integrations.megatron.config_switches import selection
from deepep_moe.integrations.megatron.patches import Patches

pytest.importorskip("megatron.core")


FP32 = {"moe_router_dtype": "fp32"}


def needs_gate():
    from megatron.core.transformer.moe import router

    if not hasattr(router, "topk_routing_with_score_function"):
        pytest.skip("megatron-core 0.13 routes without it, and the gate does not serve it")


def fail(message, *_):
    raise ArithmeticError(message)


def fail_by_hook(module, message):
    """Let the forward of a module fail; what is returned ends it."""
    return module.register_forward_pre_hook(partial(fail, message))


# ---- a rank that fails ----


@pytest.mark.parametrize("num_forwards", (0, 1))
@pytest.mark.parametrize("device", ("cpu", pytest.param("cuda", marks=pytest.mark.multi_gpu(2))))
@on_ranks(2)
def test_peers_learn_what_failed(rank: int, num_ranks: int, device: str, num_forwards: int) -> None:
    """Failures are also reported in the first forward, which makes the buffer."""
    with model_parallel(device, ep=num_ranks) as sizes:
        layer = layer_of(sizes, **FP32)
        x = torch.randn(12, 1, HIDDEN, device=next(layer.parameters()).device)
        for _ in range(num_forwards):
            layer(x)
        for place, module in (("router", layer.router), ("expert", layer.experts), ("shared expert", layer.shared_experts)):
            hook = fail_by_hook(module, f"no {place} on rank 1") if rank == 1 else None
            prefix = "" if rank == 1 else "rank 1 did not make its call: ArithmeticError: "
            began = time.monotonic()
            with pytest.raises(ArithmeticError if rank == 1 else EPPeerError, match=f"{prefix}no {place} on rank 1"):
                layer(x)
                if device == "cuda":  # whose host does not wait for a combine
                    torch.cuda.synchronize()
                    layer.token_dispatcher.buffer.check()
            assert time.monotonic() - began < 60, "far from the deadline of 300 s"
            if hook is not None:
                hook.remove()
            assert layer(x)[0].isfinite().all(), "all go on"
        if rank == 1:  # right after the dispatch, outside of a call
            layer.token_dispatcher._counts_for_experts = partial(fail, "no counts on rank 1")
        with pytest.raises(ArithmeticError if rank == 1 else EPPeerError, match="no counts on rank 1"):
            layer(x)
            if device == "cuda":
                torch.cuda.synchronize()
                layer.token_dispatcher.buffer.check()


@on_megatron(2)
def test_peers_learn_of_a_failing_recomputation(rank: int, num_ranks: int, sizes: dict[str, int]) -> None:
    """The experts of rank 1 fail when they run for the second time."""
    layer = layer_of(sizes, **RECOMPUTED)
    output = layer(torch.randn(6, 1, HIDDEN, requires_grad=True))[0].sum()
    hook = fail_by_hook(layer.experts, "no memory on rank 1") if rank == 1 else None
    began = time.monotonic()
    with pytest.raises(ArithmeticError if rank == 1 else EPPeerError, match="no memory on rank 1"):
        output.backward()
    assert time.monotonic() - began < 60, "far from the deadline of 300 s"
    if hook is not None:
        hook.remove()
    layer(torch.randn(6, 1, HIDDEN, requires_grad=True))[0].sum().backward()


# ---- what Megatron-Core does with the layers ----


@on_megatron(2)
def test_inference_mode(rank: int, num_ranks: int, sizes: dict[str, int]) -> None:
    """Tensors of inference mode do not count in-place changes."""
    ours, stock = layer_of(sizes).eval(), layer_of(sizes, "alltoall").eval()
    x = torch.randn(5, 2, HIDDEN)
    with torch.inference_mode():
        torch.testing.assert_close(ours(x)[0], stock(x)[0])
    ours.train()(x.requires_grad_())[0].sum().backward()
    assert x.grad.isfinite().all()


@on_megatron(2)
def test_padding_that_is_switched_on_later_is_refused(rank: int, num_ranks: int, sizes: dict[str, int]) -> None:
    layer = layer_of(sizes)
    layer.config.moe_pad_expert_input_to_capacity = True  # as the inference engine does while it decodes
    with pytest.raises(ValueError, match=r"set it to False, also in inference \(moe_pad_experts_for_cuda_graph_inference sets it\)"):
        layer(torch.randn(4, 1, HIDDEN))


# ---- code of others ----


@on_megatron(2)
def test_replaced_functions_are_not_bypassed(rank: int, num_ranks: int, sizes: dict[str, int]) -> None:
    from megatron.core.transformer.moe import moe_utils, router

    needs_gate()
    calls = []

    def noting(original):
        def wrapper(*args, **kwargs):
            calls.append(original.__name__)
            return original(*args, **kwargs)

        return wrapper

    def count_calls():
        calls.clear()
        layer_of(sizes, **FP32)(torch.randn(4, 1, HIDDEN))
        return len(calls)

    disable()
    for owner, name in ((router, "topk_routing_with_score_function"), (moe_utils, "group_limited_topk")):
        original, others = getattr(owner, name), Patches()
        bare = noting(original)
        for replacement in (bare, functools.wraps(original)(bare)):
            others.set(owner, name, replacement)
            with enabled():
                assert count_calls() == 1, f"{name} of somebody else was bypassed"
            others.restore()
    with enabled():
        assert count_calls() == 0
        theirs = router.topk_routing_with_score_function = noting(router.topk_routing_with_score_function)
        assert count_calls() == 1
    assert router.topk_routing_with_score_function is theirs, "replaced after us, so not ours to put back"


@on_megatron(2)
def test_hooks_on_probs_run(rank: int, num_ranks: int, sizes: dict[str, int]) -> None:
    layer, seen = layer_of(sizes, moe_router_load_balancing_type="none"), []
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

    with enabled():

        class Theirs(moe_layer.MoEFlexTokenDispatcher):
            def __init__(self, num_local_experts, local_expert_indices, config, **groups):
                self.num_local_experts = num_local_experts

        assert type(Theirs(3, [0, 1, 2], layer_config(**selection()))) is Theirs


def test_enable_that_fails_leaves_nothing(monkeypatch):
    from megatron.core.transformer.moe import moe_layer, router

    dispatcher, forward = moe_layer.MoEFlexTokenDispatcher, moe_layer.MoELayer.forward
    monkeypatch.setattr(router, "topk_routing_with_score_function", "no function", raising=False)
    with pytest.raises(TypeError):
        enable()
    assert moe_layer.MoEFlexTokenDispatcher is dispatcher and moe_layer.MoELayer.forward is forward
    disable()  # was not enabled: nothing


@pytest.mark.gpu
@on_megatron(1, "cuda", num_sms=6)
def test_num_sms(rank: int, num_ranks: int, sizes: dict[str, int]) -> None:
    layer = layer_of(sizes)
    for num_sms in (6, 4):
        layer(torch.randn(4, 1, HIDDEN, device="cuda"))
        assert layer.token_dispatcher.buffer.calls.own_mode.num_sms == num_sms
        layer.config.moe_flex_dispatcher_num_sms = 4
