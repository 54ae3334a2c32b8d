"""Failures on one rank, and other code beside ours: replaced functions, hooks, subclasses."""

import functools
from functools import partial
from unittest import mock

import pytest
import torch
from exchange_cases import look
from megatron_cases import HIDDEN, RECOMPUTED, enabled, layer_config, layer_of, model_parallel, on_megatron
from on_ranks import failing, on_ranks, refused

from deepep_moe.errors import BufferSuspendedError
from deepep_moe.integrations.common.registry import all_buffers
from deepep_moe.integrations.megatron import disable, enable, resume, suspend
from deepep_moe.integrations.megatron.config_switches import selection

pytest.importorskip("megatron.core")


FP32 = {"moe_router_dtype": "fp32"}


def fail(message, *_):
    raise ArithmeticError(message)


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
            words = f"no {place} on rank 1"
            with failing(module, rank == 1, ArithmeticError(words)), refused(rank, 1, ArithmeticError, words):
                layer(x)
                look(layer.token_dispatcher.buffer)  # as the host of a GPU does not wait for a combine
            assert layer(x)[0].isfinite().all(), "all go on"
        if rank == 1:  # right after the dispatch, outside of a call
            layer.token_dispatcher._counts_for_experts = partial(fail, "no counts on rank 1")
        with refused(rank, 1, ArithmeticError, "no counts on rank 1"):
            layer(x)
            look(layer.token_dispatcher.buffer)


@on_megatron(2)
def test_peers_learn_of_a_failing_recomputation(rank: int, num_ranks: int, sizes: dict[str, int]) -> None:
    """The experts of rank 1 fail when they run for the second time."""
    layer = layer_of(sizes, **RECOMPUTED)
    output = layer(torch.randn(6, 1, HIDDEN, requires_grad=True))[0].sum()
    words = "no memory on rank 1"
    with failing(layer.experts, rank == 1, ArithmeticError(words)), refused(rank, 1, ArithmeticError, words):
        output.backward()
    layer(torch.randn(6, 1, HIDDEN, requires_grad=True))[0].sum().backward()


# ---- what Megatron-Core does with the layers ----


@on_megatron(2)
def test_inference_mode_and_padding_for_it(rank: int, num_ranks: int, sizes: dict[str, int]) -> None:
    """Tensors of inference mode do not count in-place changes."""
    ours, stock = layer_of(sizes).eval(), layer_of(sizes, "alltoall").eval()
    x = torch.randn(5, 2, HIDDEN)
    with torch.inference_mode():
        torch.testing.assert_close(ours(x)[0], stock(x)[0])
    ours.train()(x.requires_grad_())[0].sum().backward()
    assert x.grad.isfinite().all()

    ours.config.moe_pad_expert_input_to_capacity = True  # as the inference engine does while it decodes
    with pytest.raises(ValueError, match=r"set it to False, also in inference \(moe_pad_experts_for_cuda_graph_inference sets it\)"):
        ours(torch.randn(4, 1, HIDDEN))


@pytest.mark.parametrize("device", ("cpu", pytest.param("cuda", marks=pytest.mark.multi_gpu(2))))
@on_ranks(2)
def test_memory_given_back_between_forward_and_backward(rank: int, num_ranks: int, device: str) -> None:
    with model_parallel(device, ep=num_ranks) as sizes:
        layer = layer_of(sizes)
        x = torch.randn(12, 1, HIDDEN, device=next(layer.parameters()).device)

        def gradient(between):
            rows = x.clone().requires_grad_()
            y = layer(rows)[0]
            between()
            y.square().sum().backward()
            return rows.grad

        def cycle():
            suspend()
            suspend()
            assert all(buffer.memory().suspended or buffer.backend == "collective" for buffer in all_buffers())
            with pytest.raises(BufferSuspendedError):
                layer(x)
            resume()
            resume()

        assert torch.equal(gradient(lambda: None), gradient(cycle))


# ---- code of others ----


@on_megatron(2)
def test_replaced_functions_are_not_bypassed(rank: int, num_ranks: int, sizes: dict[str, int]) -> None:
    from megatron.core.transformer.moe import moe_utils, router

    if not hasattr(router, "topk_routing_with_score_function"):
        pytest.skip("megatron-core 0.13 routes without it, and the gate does not serve it")
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
        original = getattr(owner, name)
        bare = noting(original)
        for replacement in (bare, functools.wraps(original)(bare)):
            with mock.patch.object(owner, name, replacement), enabled():
                assert count_calls() == 1, f"{name} of somebody else was bypassed"
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
