"""Megatron-Core's own schedules that run a layer in parts: 1F1B with the backward of another batch, shared experts beside the calls, and
recomputation."""

import gc
import importlib
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from fault_cases import FailsInBackward
from megatron_cases import RECOMPUTED, assert_bits, assert_same, draw, forward_backward, layer_config, layer_of, model_parallel, on_megatron
from megatron_training import batch_of, gpt
from on_ranks import failing, on_ranks, refused

from deepep_moe.errors import EPPeerError
from deepep_moe.integrations.megatron import recompute
from deepep_moe.integrations.megatron.config_switches import selection

pytest.importorskip("megatron.core")

NUM_BATCHES = 3
NO_DROPOUT = {"attention_dropout": 0.0, "hidden_dropout": 0.0, "moe_router_dtype": "fp32"}


HAS_SCHEDULE = importlib.util.find_spec("megatron.core.models.common.model_chunk_schedule_plan") is not None
needs_schedule = pytest.mark.skipif(not HAS_SCHEDULE, reason="megatron-core before 0.14 has no such schedule")


# ---- 1F1B ----


def batches() -> list[dict[str, Any]]:
    return [batch_of(0, number) for number in range(NUM_BATCHES)]


def one_after_another(model: Any, batches: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    losses = []
    for batch in batches:
        losses.append(model(**batch))
        losses[-1].backward(torch.ones_like(losses[-1]))
    return {"losses": torch.stack(losses).detach()} | {name: parameter.grad for name, parameter in model.named_parameters()}


def interleaved(model: Any, batches: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Run each batch's forward with the backward of the previous one."""
    from megatron.core.models.common.model_chunk_schedule_plan import TransformerModelChunkSchedulePlan
    from megatron.core.pipeline_parallel.utils import set_streams

    set_streams()
    losses: list[torch.Tensor] = []
    earlier = None
    for batch in batches:
        plan = model.build_schedule_plan(**batch)
        gradient = torch.ones_like(losses[-1]) if earlier is not None else None
        losses.append(TransformerModelChunkSchedulePlan.run(plan, earlier, b_grad=gradient))
        earlier = plan
    TransformerModelChunkSchedulePlan.run(None, earlier, b_grad=torch.ones_like(losses[-1]))
    return {"losses": torch.stack(losses).detach()} | {name: parameter.grad for name, parameter in model.named_parameters()}


def assert_repeated(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor], context: str) -> None:
    """Equal in every bit; before 0.16 up to rounding, as the schedule divided layers so that gradients were added in another order."""
    from megatron.core.models.common.model_chunk_schedule_plan import TransformerLayerSchedulePlan

    if hasattr(TransformerLayerSchedulePlan, "post_attn"):
        assert_same(got, want, context)
    else:
        assert_bits(got, want, context)


def schedule_config(sizes: dict[str, int], **changes: Any) -> Any:
    return layer_config(**sizes, **({"num_layers": 2, **NO_DROPOUT, **selection()} | changes))


# Options of enable(), and changes of the config.
SCHEDULED: list[tuple[dict, dict]] = [
    *(({"backend": backend, "experts": experts}, {}) for backend in ("shm", "collective") for experts in ("framework", "own")),
    ({}, {"moe_shared_expert_intermediate_size": None}),
]


@needs_schedule
@on_ranks(2)
def test_schedule_repeats_the_bits(rank: int, num_ranks: int) -> None:
    """It frees the inputs of parts that have run, whether or not the config says that it will."""
    for options, changes in SCHEDULED:
        with model_parallel(ep=num_ranks, **options) as sizes:
            config = schedule_config(sizes, **changes)
            want = one_after_another(gpt(config), batches())
            for is_set in (False, True):
                config.overlap_moe_expert_parallel_comm = is_set  # late: the config's own check demands 16-bit parameters
                assert_repeated(interleaved(gpt(config), batches()), want, f"{options}, {changes}, rank {rank}")


def let_local_linears_delay() -> None:
    """Some of Megatron-Core's local layers lack what the schedule calls then; they delay nothing."""
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

    for linear in (ColumnParallelLinear, RowParallelLinear):
        linear.backward_dw = lambda self: None


@needs_schedule
@on_megatron(2, experts="own")
def test_delayed_gradients_of_grouped_experts(rank: int, num_ranks: int, sizes: dict[str, int]) -> None:
    """Gradients of experts' weights are made after the dispatch of the other batch, and go where DDP wants them."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    let_local_linears_delay()
    config = schedule_config(sizes)
    want = one_after_another(gpt(config), batches())
    config.delay_wgrad_compute = config.overlap_moe_expert_parallel_comm = True
    for ddp in ("without DDP", "DDP", "DDP that does not know of the delay"):
        model = gpt(config)
        if ddp != "without DDP":
            knows = {} if "not know" in ddp else {"delay_wgrad_compute": True}
            wrapped = DistributedDataParallel(config, DistributedDataParallelConfig(use_distributed_optimizer=False, **knows), model)
            wrapped.zero_grad_buffer()
        calls: list[str] = []
        experts = model.decoder.layers[0].mlp.experts
        stock = experts.linear_fc1.add_delayed
        experts.linear_fc1.add_delayed = lambda compute, calls=calls, stock=stock: (calls.append("w1"), stock(compute))
        got = interleaved(model, batches())
        assert calls == ["w1"] * NUM_BATCHES and not experts._due
        for name, parameter in model.named_parameters():
            got[name] = parameter.grad if ddp == "without DDP" else parameter.main_grad
        assert_repeated(got, want, f"{ddp}, rank {rank}")


@needs_schedule
@on_megatron(2)
def test_schedule_frees_what_nobody_keeps(rank: int, num_ranks: int, sizes: dict[str, int]) -> None:
    """A node frees rows only where the experts keep other ones, and never frees rows that another node keeps."""
    config = schedule_config(sizes)
    for fp8, frees in ((None, False), ("hybrid", True)):
        model = gpt(config)
        for layer in model.decoder.layers:
            layer.config.fp8 = fp8
        plan = model.build_schedule_plan(**batches()[0]).get_layer(0)
        assert (plan.moe_dispatch.free_input, plan.mlp.free_input, plan.moe_combine.free_input) == (False, frees, True)
    theirs = gpt(schedule_config(sizes, moe_token_dispatcher_type="alltoall"))
    plan = theirs.build_schedule_plan(**batches()[0]).get_layer(0)
    assert plan.moe_dispatch.free_input and plan.mlp.free_input


def _fail(module: Any, *_: Any) -> None:
    raise RuntimeError("a fault in the forward")


def _fault_after(module: Any, arguments: Any, output: Any) -> Any:
    return (FailsInBackward.apply(output[0], RuntimeError("a fault in the backward")), *output[1:])


FAULTS: dict[str, Callable[[Any], Any]] = {
    "router": lambda layer: layer.mlp.router.register_forward_pre_hook(_fail),
    "attention": lambda layer: layer.self_attention.register_forward_pre_hook(_fail),
    "experts": lambda layer: layer.mlp.experts.register_forward_pre_hook(_fail),
    "experts' backward": lambda layer: layer.mlp.experts.register_forward_hook(_fault_after),
    "gradients of weights": lambda layer: setattr(layer.mlp.experts, "backward_dw", lambda: _fail(layer)),
    "attention's backward": lambda layer: layer.self_attention.register_forward_hook(_fault_after),
}


@needs_schedule
@pytest.mark.parametrize("where", FAULTS)
@on_megatron(2)
def test_peers_learn_of_faults_in_the_schedule(rank: int, num_ranks: int, sizes: dict[str, int], where: str) -> None:
    config = schedule_config(sizes)
    if where == "gradients of weights":
        config.delay_wgrad_compute = True
        let_local_linears_delay()
    model = gpt(config)
    if rank == 1:
        FAULTS[where](model.decoder.layers[0])
    is_backward = where.endswith("backward")
    with pytest.raises(RuntimeError) as raised:
        interleaved(model, batches())
    if rank == 1:
        assert str(raised.value) == f"a fault in the {'backward' if is_backward else 'forward'}"
    else:
        assert isinstance(raised.value, EPPeerError) and raised.value.rank == 1
        assert "RuntimeError: a fault in the " in str(raised.value)


# ---- shared experts ----

SHARED: list[tuple[str, dict, dict]] = [
    ("EP 2", {"ep": 2}, {}),
    ("TP 2, EP 2", {"tp": 2, "ep": 2}, {}),
    ("grouped experts", {"ep": 2, "experts": "own"}, {}),
    ("gate of the shared expert", {"ep": 2}, {"moe_shared_expert_gate": True}),
    ("recomputed", {"ep": 2}, RECOMPUTED),
]
BESIDE = {"moe_shared_expert_overlap": True}


@on_ranks(2)
def test_shared_experts_beside_the_calls_change_nothing(rank: int, num_ranks: int) -> None:
    for name, groups, changes in SHARED:
        if any(not hasattr(layer_config(), field) for field in changes):  # older versions
            continue
        with model_parallel(**groups) as sizes:
            beside, plain = layer_of(sizes, **changes, **BESIDE), layer_of(sizes, **changes)
            assert beside.config.moe_shared_expert_overlap and beside.shared_expert_overlap
            passes = [forward_backward(layer, *draw(rank, 6, 2)) for layer in (beside, plain)]
            assert_same(*passes, f"{name}, rank {rank}")


@on_megatron(1)
def test_the_gate_of_shared_experts_is_gathered(rank: int, num_ranks: int, sizes: dict[str, int]) -> None:
    """Megatron's DDP gathers a parameter before the module that owns it is called. Here nobody calls the shared experts."""
    if not hasattr(layer_config(), "moe_shared_expert_gate"):
        pytest.skip("this megatron-core has no such gate")
    layer, x = layer_of(sizes, **BESIDE, moe_shared_expert_gate=True), draw(0, 6, 2)[0]
    shared, want = layer.shared_experts, layer(x)[0]
    weight = shared.gate_weight.detach().clone()
    shared.gate_weight.data = torch.full_like(weight, torch.nan)
    shared.register_forward_pre_hook(lambda module, args: setattr(module.gate_weight, "data", weight))
    assert torch.equal(layer(x)[0], want)


@on_megatron(2)
def test_shared_experts_after_a_failure(rank: int, num_ranks: int, sizes: dict[str, int]) -> None:
    """After a forward that failed between the parts, the next one is right."""
    layer, (x, cotangent) = layer_of(sizes, **BESIDE), draw(rank, 6, 2)
    want = forward_backward(layer, x, cotangent)
    with failing(layer.experts, rank == 1, RuntimeError("a fault")), refused(rank, 1, RuntimeError, "a fault"):
        layer(x)
    assert_bits(forward_backward(layer, x, cotangent), want, f"rank {rank}")


# ---- recomputed layers go along the handles of their first run ----


def layers_of(sizes: dict[str, int], **changes: Any) -> tuple[Any, Any]:
    """A recomputed layer and a plain one with the same weights."""
    return layer_of(sizes, **(RECOMPUTED | changes)), layer_of(sizes, **changes)


def watch(buffer: Any) -> list[Any]:
    """Collect the handles of the buffer's dispatches from now on, None for dispatches with none."""
    handles: list[Any] = []
    stock = buffer.dispatch

    def dispatch(*args: Any, handle: Any = None, **kwargs: Any) -> Any:
        handles.append(handle)
        return stock(*args, handle=handle, **kwargs)

    buffer.dispatch = dispatch
    return handles


CASES: list[tuple[str, dict, dict]] = [
    ("EP 2", {"ep": 2}, {}),
    ("EP 2, collective", {"ep": 2, "backend": "collective"}, {}),
    ("TP 2, EP 1, ETP 2", {"tp": 2, "ep": 1, "etp": 2}, {}),
    ("Megatron-Core's routing", {"ep": 2, "gate": False}, {}),
    ("padded rows, sync-free", {"ep": 2, "experts": "own", "sync_free": True, "expert_alignment": 16}, {}),
    ("shared experts beside the calls", {"ep": 2}, {"moe_shared_expert_overlap": True}),
]


@on_ranks(2)
def test_recomputed_layers_repeat_their_handles(rank: int, num_ranks: int) -> None:
    for name, groups, changes in CASES:
        with model_parallel(**groups) as sizes:
            recomputed, plain = layers_of(sizes, **changes)
            plain(draw(rank, 12)[0])  # which makes the buffer
            handles = watch(plain.token_dispatcher.buffer)
            passes = [forward_backward(recomputed, *draw(rank, 12))]
            assert [handle is None for handle in handles] == [True, False], name
            passes.append(forward_backward(plain, *draw(rank, 12)))
            assert_same(*passes, f"{name}, rank {rank}")


@on_megatron(2)
def test_recomputed_transformer_layers(rank: int, num_ranks: int, sizes: dict[str, int]) -> None:
    """Whole transformer layers, two of them in one checkpoint: their dispatches come again in order."""
    whole = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 2}
    recomputed, plain = (gpt(schedule_config(sizes, **changes)) for changes in (whole, {}))
    want = one_after_another(plain, batches())
    handles = watch(plain.decoder.layers[0].mlp.token_dispatcher.buffer)
    got = one_after_another(recomputed, batches())
    assert [handle is None for handle in handles] == [True, True, False, False] * len(batches())
    assert_same(got, want, f"rank {rank}")


@on_megatron(2)
def test_any_order_of_backward(rank: int, num_ranks: int, sizes: dict[str, int]) -> None:
    """Two batches, the backward of which runs in the order of autograd's choice, and twice."""
    results = []
    for layer in layers_of(sizes):
        x, y = (draw(10 * seed + rank, 12)[0].requires_grad_() for seed in (1, 2))
        cotangents = [draw(10 * seed + rank, 12)[1] for seed in (1, 2)]
        outputs = [layer(x)[0], layer(y)[0]]
        for _ in range(2):
            torch.autograd.backward(outputs[::-1], cotangents[::-1], retain_graph=True)
        results.append({"x": x.grad, "y": y.grad, "weights": layer.router.weight.grad})
    assert_same(*results, f"rank {rank}")


@on_megatron(2)
def test_a_second_run_goes_along_a_handle_that_goes_then(rank: int, num_ranks: int, sizes: dict[str, int]) -> None:
    layer, _ = layers_of(sizes)
    layer(draw(rank, 12)[0])
    made: list[Any] = []
    stock = layer.token_dispatcher.buffer.dispatch

    def dispatch(*args: Any, **kwargs: Any) -> Any:
        out = stock(*args, **kwargs)
        made.append(weakref.ref(out.handle))
        return out

    layer.token_dispatcher.buffer.dispatch = dispatch
    output, _ = layer(draw(rank, 12)[0].requires_grad_())
    assert made[0]() is not None
    output.backward(draw(rank, 12)[1])
    del output
    gc.collect()
    assert [reference() for reference in made] == [None, None]
    with torch.no_grad():
        layer(draw(rank, 12)[0])
    gc.collect()
    assert made[-1]() is None and recompute._runs.stack == []

    recomputed, plain = layers_of(sizes, moe_router_load_balancing_type="none", moe_aux_loss_coeff=0.0)
    plain(draw(rank, 12)[0])
    handles = watch(plain.token_dispatcher.buffer)
    counts: list[list[int]] = []
    recomputed.experts.register_forward_pre_hook(lambda module, arguments: counts.append(arguments[1].tolist()))
    x = draw(rank, 12)[0].requires_grad_()
    output, _ = recomputed(x)
    recomputed.router.expert_bias.copy_(torch.linspace(-9, 9, len(recomputed.router.expert_bias)))
    output.backward(draw(rank, 12)[1])
    assert counts[0] == counts[1] and handles[1] is not None
    assert torch.isfinite(x.grad).all() and x.grad.any()
