"""The dispatcher against Megatron-Core's alltoall dispatcher: outputs, every gradient, ten optimizer steps."""

import pytest
import torch
import torch.distributed as dist
from megatron_cases import HIDDEN, assert_same, build_layer, forward_backward, layer_config, model_parallel
from on_ranks import on_ranks

from deepep_moe.integrations.megatron.plugin import selection
from deepep_moe.testing.launch import run_ranks

pytest.importorskip("megatron.core")

# (name, group sizes and options of enable(), changes of the config)
SIZES: list[tuple[str, dict, dict]] = [
    ("EP 1", {"ep": 1}, {}),
    ("EP 2", {"ep": 2}, {}),
    ("EP 4", {"ep": 4}, {}),
    ("EP 4, collective", {"ep": 4, "backend": "collective"}, {}),
    ("TP 2, EP 2", {"tp": 2, "ep": 2}, {}),
    ("TP 2, EP 4", {"tp": 2, "ep": 4}, {}),
    ("TP 2, EP 2, ETP 2", {"tp": 2, "ep": 2, "etp": 2}, {}),
    ("TP 2, EP 1, ETP 2", {"tp": 2, "ep": 1, "etp": 2}, {}),
    ("TP 1, EP 2, ETP 2", {"ep": 2, "etp": 2}, {}),
    ("padded rows", {"ep": 4, "expert_alignment": 16}, {}),
    ("fp64 router", {"ep": 2}, {"moe_router_dtype": "fp64"}),
    ("recomputed", {"ep": 2}, {"recompute_granularity": "selective", "recompute_modules": ["moe"]}),
]
DROPPING = {
    "moe_expert_capacity_factor": 0.8,
    "moe_router_load_balancing_type": "aux_loss",
    "moe_router_score_function": "softmax",
    "moe_router_enable_expert_bias": False,
}


def _inputs(data_rank: int, num_rows: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * seed + data_rank)
    return torch.randn(num_rows, 2, HIDDEN, generator=generator), torch.randn(num_rows, 2, HIDDEN, generator=generator)


def _pair(sizes: dict, changes: dict) -> tuple[torch.nn.Module, torch.nn.Module]:
    """A layer with our dispatcher and one with alltoall's, same weights."""
    from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

    from deepep_moe.integrations.megatron.dispatcher import NativeTokenDispatcher

    ours = build_layer(layer_config(**sizes, **changes, **selection()))
    theirs = build_layer(layer_config(**sizes, **changes, moe_token_dispatcher_type="alltoall"))
    assert isinstance(ours.token_dispatcher, NativeTokenDispatcher)
    assert isinstance(theirs.token_dispatcher, MoEAlltoAllTokenDispatcher)
    theirs.load_state_dict(ours.state_dict())
    return ours, theirs


def _compare(name: str, groups: dict, changes: dict, rank: int, num_rows: int, tolerance: float = 2e-6) -> float:
    with model_parallel(**groups) as sizes:
        ours, theirs = _pair(sizes, changes)
        # Sequence-parallel ranks hold different tokens, so every rank draws its own.
        inputs = [tensor.to(ours.config.params_dtype) for tensor in _inputs(rank, num_rows)]
        passes = [forward_backward(layer, *inputs) for layer in (ours, theirs)]
        return assert_same(*passes, f"{name}, rank {rank}", tolerance=tolerance)


def _compare_with_formula(rank: int) -> float:
    """Rank 0 has no tokens, most go to expert 0, some to none (which Megatron-Core's router cannot produce): against the dense formula."""
    with model_parallel(ep=4) as sizes:
        dispatcher = build_layer(layer_config(**sizes, **selection())).token_dispatcher
        generator = torch.Generator().manual_seed(rank)
        x = torch.randn(5 * rank, 1, HIDDEN, generator=generator, requires_grad=True)
        routing_map = torch.zeros(5 * rank, 8, dtype=torch.bool)
        routing_map[::2, 0] = True
        routing_map[::4, 5] = True
        probs = torch.rand(5 * rank, 8, generator=generator, requires_grad=True)
        tokens, row_counts, row_probs = dispatcher.dispatch_postprocess(
            *dispatcher.token_dispatch(*dispatcher.dispatch_preprocess(x, routing_map, probs))
        )
        scales = (torch.arange(2.0) + 1 + 2 * rank).repeat_interleave(row_counts)  # expert e multiplies by e + 1
        combined = dispatcher.token_combine(dispatcher.combine_preprocess(tokens * (scales * row_probs)[:, None]))
        output = dispatcher.combine_postprocess(combined)
        factor = (probs * routing_map * (torch.arange(8.0) + 1)).sum(1)
        passes = []
        for result in (output, x * factor[:, None, None]):
            gradients = torch.autograd.grad(result.square().sum(), (x, probs))
            passes.append({"output": result.detach(), "input gradient": gradients[0], "probs gradient": gradients[1]})
        return assert_same(*passes, f"formula, rank {rank}")


def _sizes_worker(rank: int, num_ranks: int) -> dict[str, float]:
    worst = {name: _compare(name, groups, changes, rank, 12) for name, groups, changes in SIZES}
    worst["different token counts"] = _compare("different token counts", {"ep": 4}, {}, rank, 3 + 5 * rank)
    worst["ranks and experts without tokens"] = _compare_with_formula(rank)
    worst["dropping"] = _compare("dropping", {"ep": 4}, DROPPING, rank, 12)
    # alltoall adds up to 4 terms in bf16, whose roundings are 2^-9 each; ours rounds once per rank and once at the end.
    bf16 = {"params_dtype": torch.bfloat16, "bf16": True, "moe_router_dtype": "fp32"}
    worst["bf16"] = _compare("bf16", {"ep": 4}, bf16, rank, 12, tolerance=2e-2)
    return worst


def test_outputs_and_gradients_equal_alltoall():
    results = run_ranks(_sizes_worker, 4)
    print({name: max(result[name] for result in results) for name in results[0]})


@on_ranks(2)
def test_ten_optimizer_steps_equal_alltoall(rank: int, num_ranks: int) -> None:
    with model_parallel(ep=num_ranks) as sizes:
        ours, theirs = _pair(sizes, {})
        optimizers = [torch.optim.SGD(layer.parameters(), lr=0.02, momentum=0.9) for layer in (ours, theirs)]
        for step in range(10):
            inputs = _inputs(rank, 12, seed=step)
            passes = [forward_backward(layer, *inputs) for layer in (ours, theirs)]
            # Parameters already differ by the roundings of earlier steps, which momentum adds up: ten times the one-step tolerance.
            for name, want in passes[1].items():
                scale = float(want.abs().max()) + 1e-3
                difference = float((passes[0][name] - want).abs().max()) / scale
                assert difference <= 2e-5, f"step {step}, rank {rank}: {name} differs by {difference:.2e} of its scale {scale:.3g}"
            for layer, optimizer in zip((ours, theirs), optimizers, strict=True):
                _mean_dense_gradients(layer)
                optimizer.step()
        assert_same(dict(ours.named_parameters()), dict(theirs.named_parameters()), f"parameters after ten steps, rank {rank}")


def _mean_dense_gradients(layer: torch.nn.Module) -> None:
    """What data parallelism does for parameters that every rank holds; experts are this rank's own."""
    for name, parameter in layer.named_parameters():
        if not name.startswith("experts."):
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()
