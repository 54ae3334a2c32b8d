"""Routers of our layers choose by the gate: as Megatron-Core's own routing does, or, said in the log, by that."""

import importlib.metadata
import inspect
import logging
from unittest import mock

import pytest
import torch
from logs import heard
from megatron_cases import HIDDEN, RECOMPUTED, assert_bits, assert_same, draw, forward_backward, layer_of, model_parallel, on_megatron
from on_ranks import on_ranks

from deepep_moe.integrations.megatron import gating, plugin
from deepep_moe.integrations.megatron.gating import choice_for

pytest.importorskip("megatron.core")
if importlib.metadata.version("megatron-core").startswith("0.13."):
    pytest.skip("megatron-core 0.13 has no function that the gate could stand for", allow_module_level=True)

LOSS = "switch_load_balancing_loss_func"
NO_GROUPS = {"moe_router_num_groups": None, "moe_router_group_topk": None, "moe_router_topk_scaling_factor": None}
SOFTMAX = NO_GROUPS | {"moe_router_score_function": "softmax", "moe_router_enable_expert_bias": False}
ROUTINGS = {
    "DeepSeek-V3": {},
    "sigmoid, top-1": NO_GROUPS | {"moe_router_topk": 1},
    "softmax of the chosen": SOFTMAX,
    "softmax of all": SOFTMAX | {"moe_router_pre_softmax": True},
    "softmax in groups": {"moe_router_score_function": "softmax", "moe_router_enable_expert_bias": False},
    "softmax of all, in groups": {
        "moe_router_score_function": "softmax", "moe_router_enable_expert_bias": False, "moe_router_pre_softmax": True,
    },
    "no bias": {"moe_router_enable_expert_bias": False},
    "no auxiliary loss": {"moe_router_load_balancing_type": "none", "moe_aux_loss_coeff": 0.0},
    "several losses": {
        "moe_router_load_balancing_type": ["global_aux_loss", "aux_loss"], "moe_aux_loss_coeff": [1e-2, 1e-3], "moe_z_loss_coeff": 1e-3,
    },
    "capacity": {"moe_expert_capacity_factor": 1.0},
    "forced balance": {"moe_router_force_load_balancing": True},
}  # fmt: skip


def biased_layer(sizes, **switches):
    """A layer that dispatches through deepep_moe, with a bias that moves its choice."""
    layer = layer_of(sizes, **({"moe_router_dtype": "fp32"} | switches)).train()
    if layer.router.expert_bias is not None:
        layer.router.expert_bias.copy_(torch.linspace(-0.2, 0.2, 8).roll(3))
    return layer


def recorded(owner, name):
    """A context that notes what the function returns, in the list that it gives."""
    original, returned = getattr(owner, name), []

    def note(*args, **kwargs):
        returned.append(original(*args, **kwargs))
        return returned[-1]

    return mock.patch.object(owner, name, note), returned


def routed(sizes, switches, device):
    """Did the gate choose, and score for auxiliary losses; the routing map; what else a router makes of one input; and what its layer
    makes of it."""
    from megatron.core.transformer.moe import moe_utils, router

    layer = biased_layer(sizes, **switches).to(device)
    x = draw(3, 11, 2)[0].to(device)
    leaf = x.clone().requires_grad_()
    torch.manual_seed(5)
    moe_utils.RandomSTE.generator = None  # of random logits; 0.15 keeps it
    (noting_losses, losses), (noting_gates, gates) = recorded(router, LOSS), recorded(gating, "gate_full")
    with noting_losses, noting_gates:
        probs, routing_map = layer.router(leaf)
    results = {f"auxiliary loss {i}": loss for i, loss in enumerate(losses)}
    # Attached losses have a gradient, whether or not the probs have one.
    of_losses = torch.autograd.grad(probs, layer.router.weight, torch.zeros_like(probs), retain_graph=True)[0]
    probs.backward(torch.randn(probs.shape, generator=torch.Generator().manual_seed(4)).to(device))
    results |= {"probs": probs, "input gradient": leaf.grad, "weight gradient": layer.router.weight.grad, "gradient of losses": of_losses}
    if layer.router.local_tokens_per_expert is not None:
        results["tokens per expert"] = layer.router.local_tokens_per_expert
    results = {name: value.detach().clone() for name, value in results.items()}
    torch.manual_seed(5)
    served = choice_for(routing_map) is not None, any(output.shares is not None for output in gates)
    return served, routing_map, results, forward_backward(layer, x, torch.ones_like(x))


@pytest.mark.parametrize(("num_ranks", "device"), [(1, "cpu"), (2, "cpu"), pytest.param(1, "cuda", marks=pytest.mark.gpu)])
@on_ranks()
def test_equals_megatron(rank, num_ranks, device):
    names = ROUTINGS if num_ranks == 1 else ["DeepSeek-V3"]
    with model_parallel(device, ep=num_ranks) as sizes:
        ours = {name: routed(sizes, ROUTINGS[name], device) for name in names}
        plugin.disable()
        plugin.enable(gate=False)
        for name in names:
            served, routing_map, results, layer = ours[name]
            served_without_gate, expected_map, expected, expected_layer = routed(sizes, ROUTINGS[name], device)
            assert served_without_gate == (False, False)
            assert served == (name != "capacity", name != "no auxiliary loss")  # a capacity makes a map of its own
            has_losses = "auxiliary loss 0" in expected and bool(expected["gradient of losses"].abs().max() > 1e-5)
            assert has_losses == (name != "no auxiliary loss") and results.keys() == expected.keys()
            assert torch.equal(routing_map, expected_map)
            assert_same(results, expected, f"{name}, rank {rank}")
            assert_same(layer, expected_layer, f"{name}, rank {rank}")


@on_megatron(1)
def test_the_bias_takes_counts_from_the_gate(rank, num_ranks, sizes):
    """A map that somebody has changed, and one with masked tokens, are counted as Megatron-Core does."""
    router = biased_layer(sizes, moe_router_load_balancing_type="none").router
    if not hasattr(router, "_apply_expert_bias"):
        pytest.skip("this Megatron-Core counts inside of its routing")
    _, routing_map = router(draw(6, 11, 2)[0])
    counts = router.local_tokens_per_expert.clone()
    assert torch.equal(counts, routing_map.sum(0).float()) and counts.sum() == routing_map.sum() > 0
    choice_for(routing_map).num_tokens_per_expert.fill_(7)
    router._apply_expert_bias(routing_map)
    assert torch.equal(router.local_tokens_per_expert, counts + 7)
    with torch.no_grad():
        router._apply_expert_bias(routing_map)
    assert torch.equal(router.local_tokens_per_expert, counts + 7)
    routing_map.logical_and_(torch.arange(len(routing_map))[:, None] < 5)
    router._apply_expert_bias(routing_map)
    assert torch.equal(router.local_tokens_per_expert, counts + 7 + routing_map.sum(0))


@on_megatron(1)
def test_padding_masks(rank, num_ranks, sizes):
    from megatron.core.transformer.moe import router as router_module

    if "padding_mask" not in inspect.signature(router_module.TopKRouter.forward).parameters:
        pytest.skip("this Megatron-Core's routers take no padding mask")
    padding = torch.arange(22).view(11, 2) % 3 == 0
    x, results = draw(6, 11, 2)[0], []
    router = biased_layer(sizes, moe_router_enable_expert_bias=False).router
    for is_ours in (True, False):
        (noting_losses, losses), (noting_gates, gates) = recorded(router_module, LOSS), recorded(gating, "gate_full")
        with noting_losses, noting_gates:
            probs, _ = router(x, padding)
        of_losses = torch.autograd.grad(probs, router.weight, torch.zeros_like(probs))[0]
        results.append({"loss": losses[0].detach(), "gradient of losses": of_losses})
        assert [output.shares is not None for output in gates] == ([False, True] if is_ours else [])
        if is_ours:
            assert (gates[1].shares[padding.flatten()] == 0).all()
        plugin.disable()
        plugin.enable(gate=False)
    assert_same(*results, "padding mask")


@on_megatron(1)
def test_router_replay(rank, num_ranks, sizes):
    replay = pytest.importorskip("megatron.core.transformer.moe.router_replay")
    RouterReplay, actions = replay.RouterReplay, replay.RouterReplayAction
    router = biased_layer(sizes, moe_enable_routing_replay=True).router
    x = torch.randn(5, 1, HIDDEN)
    free = router(x)[1]
    assert choice_for(free) is not None
    RouterReplay.set_global_router_replay_action(actions.RECORD)
    recorded = router(x)[1]
    assert choice_for(recorded) is None and torch.equal(recorded, free)
    assert torch.equal(RouterReplay.get_recorded_data()[0].sort(1).values, free.nonzero()[:, 1].view(5, 4))
    RouterReplay.set_replay_data([torch.tensor([[7, 5, 1, 0]]).repeat(5, 1)])
    RouterReplay.set_global_router_replay_action(actions.REPLAY_FORWARD)
    assert router(x)[1].nonzero()[:, 1].view(5, 4).tolist() == [[0, 1, 5, 7]] * 5


@on_megatron(1)
def test_says_why_it_does_not_serve(rank, num_ranks, sizes):
    lines, x = heard(logging.INFO), torch.randn(5, 1, HIDDEN)
    for _ in range(2):
        assert choice_for(biased_layer(sizes, moe_router_dtype="fp64").router(x)[1]) is None
    ours = [line for line in lines if "routing" in line]
    assert len(ours) == 1 and "rounds scores to torch.float64" in ours[0] and "moe_router_dtype='fp32'" in ours[0]
    other = layer_of(sizes, "alltoall", moe_router_dtype="fp32")
    assert choice_for(other.router(x)[1]) is None and len([line for line in lines if "routing" in line]) == 1
    changed = biased_layer(sizes).router(x)[1]
    changed[0, 0] = ~changed[0, 0]
    assert choice_for(changed) is None


MANY = {"num_moe_experts": 1032, "moe_router_enable_expert_bias": False, "moe_ffn_hidden_size": 4}
REFUSED = {
    "no kernels": ({}, "this build has no CUDA kernels"),
    "many experts": (NO_GROUPS | MANY, "logits has 1032 experts; on a GPU it must have at most 1024"),
    "small groups": ({"moe_router_topk": 1}, "group_score_topk is 0; it must be 1 to the 2 experts of a group"),
}


@on_ranks(1, name=REFUSED)
def test_says_what_the_gate_refuses(rank, num_ranks, name):
    """Tensors on the CPU stand for those of a GPU, which the gate of a build without nvcc does not serve, nor with many experts."""
    from deepep_moe import _C, device
    from deepep_moe.ops import lanes

    switches, reason = REFUSED[name]
    device.GPU = "cpu" if name != "small groups" else device.GPU
    if name == "no kernels":
        vars(_C).pop("MAX_GPU_GATE_EXPERTS", None)
    else:
        _C.MAX_GPU_GATE_EXPERTS = 1024
    lanes.native_for = lambda tensor: None  # tensors are the CPU's after all
    lines, x, results = heard(logging.INFO), torch.randn(5, 1, HIDDEN), []
    with model_parallel(backend="collective") as sizes:
        for _ in range(2):
            results.append(biased_layer(sizes, **switches)(x)[0])
            plugin.disable()
            plugin.enable(gate=False, backend="collective")
    assert torch.equal(*results)
    said = [line for line in lines if "routing" in line]
    assert len(said) == 1 and said[0].startswith("Megatron-Core's own routing is used") and reason in said[0], lines


@on_megatron(1)
def test_attached_losses(rank, num_ranks, sizes):
    """A loss that is attached to the probs leaves the choice with them, to the bit; each loss has its gradient once, whichever is read."""
    from megatron.core.transformer.moe import moe_utils

    scaler = moe_utils.MoEAuxLossAutoScaler
    for name in ("DeepSeek-V3", "several losses"):
        layer = biased_layer(sizes, **ROUTINGS[name])
        x, cotangent = draw(0, 6, 2)
        probs, routing_map = layer.router(x)
        assert choice_for(routing_map).weights_for(probs) is choice_for(routing_map).topk_weights, name
        ours = forward_backward(layer, x, cotangent)
        with mock.patch.object(scaler, "apply", super(scaler, scaler).apply):
            probs, routing_map = layer.router(x)
            assert choice_for(routing_map).weights_for(probs) is not choice_for(routing_map).topk_weights, name
            theirs = forward_backward(layer, x, cotangent)
        assert_bits(ours, theirs, name)
        layer.zero_grad()
        probs, routing_map = layer.router(x)
        reads = probs, choice_for(routing_map).topk_weights
        reads = *reads, reads[0].sum() + reads[1].sum()
        alone = [torch.autograd.grad(0 * read.sum(), layer.router.weight, retain_graph=True)[0] for read in reads]
        assert alone[0].abs().sum() > 0 and torch.equal(alone[0], alone[1]) and torch.equal(alone[0], alone[2]), name


# ---- overflow in fp16 ----

OVERFLOWS = ("DeepSeek-V3", "softmax of the chosen", "softmax of all", "sigmoid, top-1", "capacity", "recomputed")


@on_megatron(2)
def test_overflows_in_fp16(rank, num_ranks, sizes):
    """Rank 0 has tokens of NaN and of infinity. Its other tokens, and those of rank 1, are as with `alltoall`. The output and the router's
    gradients are not finite in the same places as there, so Megatron-Core finds the overflow."""
    half = {"fp16": True, "params_dtype": torch.float16, "moe_router_dtype": "fp32"}
    for name in OVERFLOWS:
        results = []
        for dispatcher in ("alltoall", "deepep_moe"):
            switches = half | (RECOMPUTED if name == "recomputed" else ROUTINGS[name])
            layer = layer_of(sizes, dispatcher, **switches).half().train()
            x = draw(rank, 6, 2)[0].half()
            if rank == 0:
                x[1, 0], x[4, 1, 3], x[5, 0] = torch.nan, torch.inf, torch.inf
            x.requires_grad_()
            output, _ = layer(x)
            output.float().square().mean().backward()
            results.append(output.detach().float())
            assert layer.router.weight.grad.isfinite().all() == (rank != 0), (name, dispatcher)
            with torch.no_grad():
                layer.eval()(x)  # a validation takes such logits too
        stock, ours = results
        assert torch.equal(stock.isfinite().all(2), ours.isfinite().all(2)), name
        torch.testing.assert_close(ours.nan_to_num(0, 0, 0), stock.nan_to_num(0, 0, 0), atol=2e-3, rtol=4e-3)
    if rank == 0:
        with pytest.raises(ValueError, match=r"logits has nan for token 0.* enable\(gate=False\)"):
            biased_layer(sizes).router(torch.full((1, 1, HIDDEN), torch.nan))
