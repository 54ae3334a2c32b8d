"""The dispatcher against Megatron-Core's alltoall dispatcher: outputs and every gradient; sums by lanes; choices of shards."""

from contextlib import nullcontext

import pytest
import torch
from megatron_cases import BF16, HIDDEN, RECOMPUTED, SOFTMAX, assert_same, draw, forward_backward, layer_of, model_parallel
from on_ranks import on_ranks

from deepep_moe.integrations.megatron.dispatcher import NativeTokenDispatcher, choice_of_shards, repeat_for_tp
from deepep_moe.testing import run_ranks

pytest.importorskip("megatron.core")

DROPPING = SOFTMAX | {"moe_expert_capacity_factor": 0.8, "moe_router_load_balancing_type": "aux_loss"}
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
    ("recomputed", {"ep": 2}, RECOMPUTED),
    ("dropping", {"ep": 4}, DROPPING),
]


def _pair(sizes: dict, changes: dict) -> tuple[torch.nn.Module, torch.nn.Module]:
    """A layer with our dispatcher and one with alltoall's, same weights."""
    ours, theirs = (layer_of(sizes, dispatcher, **changes) for dispatcher in ("deepep_moe", "alltoall"))
    assert isinstance(ours.token_dispatcher, NativeTokenDispatcher)
    assert type(theirs.token_dispatcher).__name__ == "MoEAlltoAllTokenDispatcher"
    theirs.load_state_dict(ours.state_dict())
    return ours, theirs


def _compare(name: str, groups: dict, changes: dict, rank: int, num_rows: int, tolerance: float = 2e-6) -> None:
    with model_parallel(**groups) as sizes:
        ours, theirs = _pair(sizes, changes)
        # Sequence-parallel ranks hold different tokens, so every rank draws its own.
        inputs = [tensor.to(ours.config.params_dtype) for tensor in draw(rank, num_rows, 2)]
        passes = [forward_backward(layer, *inputs) for layer in (ours, theirs)]
        assert_same(*passes, f"{name}, rank {rank}", tolerance=tolerance)


@pytest.mark.multi_gpu(2)
@on_ranks(2, backend=["nvlink", "collective"])
def test_outputs_and_gradients_equal_alltoall_on_gpus(rank: int, num_ranks: int, backend: str) -> None:
    with model_parallel("cuda", ep=num_ranks, backend=backend) as sizes:
        for changes in ({}, RECOMPUTED):
            ours, theirs = _pair(sizes, changes)
            for num_rows in (5 + 40 * rank, 64):  # the first agrees on the bound
                inputs = [tensor.cuda() for tensor in draw(rank, num_rows, 2)]
                passes = [forward_backward(layer, *inputs) for layer in (ours, theirs)]
                assert_same(*passes, f"{num_rows} rows, rank {rank}, {changes}", tolerance=5e-6)
            assert ours.token_dispatcher.buffer.backend == backend


def _compare_with_formula(rank: int) -> None:
    """Rank 0 has no tokens, most go to expert 0, some to none (which Megatron-Core's router cannot produce): against the dense formula."""
    with model_parallel(ep=4) as sizes:
        dispatcher = layer_of(sizes).token_dispatcher
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
        assert_same(*passes, f"formula, rank {rank}")


@on_ranks(4)
def test_outputs_and_gradients_equal_alltoall(rank: int, num_ranks: int) -> None:
    for name, groups, changes in SIZES:
        _compare(name, groups, changes, rank, 12)
    _compare("different token counts", {"ep": 4}, {}, rank, 3 + 5 * rank)
    _compare_with_formula(rank)
    # alltoall adds up to 4 terms in bf16, whose roundings are 2^-9 each; ours rounds once per rank and once at the end.
    _compare("bf16", {"ep": 4, "experts": "framework"}, BF16, rank, 12, tolerance=2e-2)


# ---- sums by lanes ----


def _sums_of_lanes(rank: int, _: int, device: str, ep: int, changes: dict) -> list:
    """Return the output and the gradients of a layer whose experts multiply the rows of expert e by e + 1."""
    with model_parallel(device, ep=ep, sums="lanes") as sizes:
        layer = layer_of(sizes, **BF16, **changes)
        seen = []

        def experts(rows: torch.Tensor, tokens_per_expert: torch.Tensor, probs: torch.Tensor) -> tuple[torch.Tensor, None]:
            seen.append(probs)
            factors = torch.tensor([expert + 1.0 for expert in layer.local_expert_indices], device=rows.device)
            counts = tokens_per_expert.to(rows.device)
            factors = torch.cat((factors, factors.new_zeros(1))).repeat_interleave(torch.cat((counts, len(rows) - counts.sum()[None])))
            return rows * factors[:, None].to(rows.dtype), None

        layer.experts.forward = experts
        x = torch.randn(12, 1, HIDDEN, generator=torch.Generator().manual_seed(rank)).bfloat16()
        x = x.to(next(layer.parameters()).device).requires_grad_()
        with torch.autocast("cpu", enabled=False) if device == "cpu" else nullcontext():
            y = layer(x)[0]
        y.float().square().sum().backward()
        assert seen and all((probs == 1).all() and not probs.requires_grad for probs in seen)
        return [tensor.detach().float().tolist() for tensor in (y, x.grad, layer.router.weight.grad)]


@pytest.mark.parametrize("changes", ({}, RECOMPUTED), ids=("plain", "recomputed"))
@pytest.mark.parametrize("device", ("cpu", pytest.param("cuda", marks=pytest.mark.multi_gpu(2))))
def test_sums_of_lanes_have_the_same_bits_on_any_number_of_ranks(device: str, changes: dict) -> None:
    alone, spread = (run_ranks(_sums_of_lanes, 2, device, ep, changes) for ep in (1, 2))  # NCCL's groups end with their processes
    assert spread == alone


# ---- choices of shards, small enough to check by eye ----


def test_every_shard_of_an_expert_is_addressed():
    # 4 experts, 2 per expert-parallel rank, 2 shards each: ranks (e, t) = (0, 0), (0, 1), (1, 0), (1, 1) hold "experts" 01, 23, 45, 67.
    topk_idx, weights = repeat_for_tp(torch.tensor([[1, 2], [3, -1]]), torch.tensor([[0.1, 0.2], [0.3, 0.0]]), 2, 2)
    assert topk_idx.tolist() == [[1, 3, 4, 6], [5, 7, -1, -1]]
    torch.testing.assert_close(weights, torch.tensor([[0.1, 0.1, 0.2, 0.2], [0.3, 0.3, 0.0, 0.0]]))
    assert repeat_for_tp(topk_idx, weights, 2, 1) == (topk_idx, weights), "one shard"


@pytest.mark.parametrize("tp_size", (1, 2, 4))
def test_the_choice_is_read_from_its_shards(tp_size):
    choice = torch.tensor([[1, 2, -1], [7, 0, 5], [-1, -1, -1]])
    topk_idx, _ = repeat_for_tp(choice, torch.ones(3, 3), 2, tp_size)
    actual = choice_of_shards(topk_idx.to(torch.int32), 2, tp_size)
    assert torch.equal(actual, choice) and actual.dtype == torch.int64
