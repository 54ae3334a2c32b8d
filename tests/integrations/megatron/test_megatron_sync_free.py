"""`enable(sync_free=True)`: rows get room before anybody knows how many come. Results stay as they are, and no row is lost."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron_cases import HIDDEN, NUM_EXPERTS, build_layer, forward_backward, layer_config, model_parallel
from on_ranks import on_ranks

from deepep_moe.errors import EPCapacityError
from deepep_moe.integrations.megatron import disable, enable, grow_recv_capacity, recover
from deepep_moe.integrations.megatron.plugin import selection

pytest.importorskip("megatron.core")

TOPK = 4
SYNC_FREE = {"grouped_experts": True, "sync_free": True}


def inputs(rank: int, num_tokens: int, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(10 * seed + rank)
    return [torch.randn(num_tokens, 1, HIDDEN, generator=generator) for _ in range(2)]


def layer_of(sizes: dict[str, int], **changes: Any) -> Any:
    return build_layer(layer_config(**sizes, **selection(), **changes))


def rows_for_experts(layer: Any) -> list[torch.Size]:
    """The shapes of what the experts are given, from now on."""
    seen: list[torch.Size] = []
    layer.experts.register_forward_pre_hook(lambda module, arguments: seen.append(arguments[0].shape))
    return seen


# ---- the same results ----

CASES: list[tuple[str, dict, dict]] = [
    ("EP 1", {"ep": 1}, {}),
    ("EP 2", {"ep": 2}, {}),
    ("EP 2, collective", {"ep": 2, "backend": "collective"}, {}),
    ("TP 2", {"tp": 2, "ep": 2}, {}),
    ("padded rows", {"ep": 2, "expert_alignment": 16}, {}),
    ("fp64 router", {"ep": 2}, {"moe_router_dtype": "fp64"}),
    ("recomputed", {"ep": 2}, {"recompute_granularity": "selective", "recompute_modules": ["moe"]}),
    ("shared experts beside the calls", {"ep": 2}, {"moe_shared_expert_overlap": True}),
]


@on_ranks(2)
def test_results_repeat_the_bits(rank: int, num_ranks: int) -> None:
    for name, groups, changes in CASES:
        results = []
        for how in (SYNC_FREE, {"grouped_experts": True}):
            with model_parallel(**groups, **how) as sizes:
                layer = layer_of(sizes, **changes)
                results.append(
                    [forward_backward(layer, *inputs(rank, num_tokens)) for num_tokens in (12, 1 if "tp" in groups else 1 + 9 * rank)]
                )
        for ours, theirs in zip(*results, strict=True):
            for key, value in theirs.items():
                assert torch.equal(ours[key], value), f"{name}, rank {rank}: {key}"


@on_ranks(2)
def test_room_for_rows(rank: int, num_ranks: int) -> None:
    """12 tokens of each rank, top-4 of 8 experts: room for every routing, or for a factor of the even share of 48 rows."""
    local = NUM_EXPERTS // num_ranks
    for alignment, factor, num_rows in (
        (1, None, num_ranks * 12 * min(TOPK, local)),
        (16, None, (num_ranks * 12 * min(TOPK, local) + 15 * local + 15) // 16 * 16),
        (1, 1.5, 72),
        (1, 1.51, 73),
        (1, 100, num_ranks * 12 * min(TOPK, local)),
    ):
        options = SYNC_FREE | {"expert_alignment": alignment, "recv_capacity_factor": factor, "num_max_tokens_per_rank": 12}
        with model_parallel(ep=num_ranks, **options) as sizes:
            layer = layer_of(sizes)
            seen = rows_for_experts(layer)
            layer(inputs(rank, 12)[0])
            layer(inputs(rank, 7)[0])
            assert seen == [(num_rows, HIDDEN)] * 2, (alignment, factor)


# ---- more rows than there is room for ----


def overfull(layer: Any, expert: int = 0) -> None:
    """Let every token go to the experts from `expert` on."""
    layer.router.expert_bias[expert : expert + TOPK] = 100.0


def _train(rank: int, num_ranks: int, options: dict[str, Any]) -> tuple[list[torch.Tensor], int]:
    """Losses of six steps, the routing of which changes between even and one-sided, and how often a step was run again."""
    losses, num_again = [], 0
    with model_parallel(ep=num_ranks, num_max_tokens_per_rank=12, **options) as sizes:
        layer = layer_of(sizes, moe_router_num_groups=None, moe_router_group_topk=None)
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.05)
        for step in range(6):
            layer.router.expert_bias.zero_()
            if step % 2 == 1:
                overfull(layer)
            x, target = inputs(rank, 12, seed=step)
            while True:
                optimizer.zero_grad()
                try:
                    loss = (layer(x)[0] - target).square().mean()
                    loss.backward()
                except EPCapacityError as error:
                    assert error.rank == 0 and "more than its num_recv_rows of" in str(error)
                    assert any("recv_capacity_factor" in note for note in error.__notes__)
                    recover()
                    grow_recv_capacity()
                    num_again += 1
                    continue
                break
            for name, parameter in layer.named_parameters():
                if not name.startswith("experts."):
                    dist.all_reduce(parameter.grad)
            optimizer.step()
            losses.append(loss.detach())
    return losses, num_again


@on_ranks(2)
def test_a_step_that_is_run_again_loses_nothing(rank: int, num_ranks: int) -> None:
    want, none = _train(rank, num_ranks, {"grouped_experts": True})
    losses, num_again = _train(rank, num_ranks, SYNC_FREE | {"recv_capacity_factor": 1.3})
    assert (none, num_again) == (0, 1)  # 2.6 times the even share are room for all
    assert all(torch.equal(loss, wanted) for loss, wanted in zip(losses, want, strict=True))


@on_ranks(2)
def test_factor_of_the_config(rank: int, num_ranks: int) -> None:
    """Megatron-Core's own factor (0.19), which its config would refuse for a backend that it does not know."""
    with model_parallel(ep=num_ranks, grouped_experts=True, num_max_tokens_per_rank=12) as sizes:
        config = layer_config(**sizes, **selection())
        config.moe_expert_rank_capacity_factor = 1.0  # in older versions not a field
        layer = build_layer(config)
        seen = rows_for_experts(layer)
        overfull(layer)
        with pytest.raises(EPCapacityError, match="rank 0 would receive"):
            layer(inputs(rank, 12)[0])
        recover()
        layer.router.expert_bias.zero_()
        layer(inputs(rank, 1)[0])
        assert seen == [(48, HIDDEN)]
        config.moe_expert_rank_capacity_factor = 0
        with pytest.raises(ValueError, match="moe_expert_rank_capacity_factor is 0; it must be a positive number"):
            build_layer(config)


def test_config_takes_the_factor():
    config = layer_config()
    if not hasattr(config, "moe_expert_rank_capacity_factor"):
        pytest.skip("megatron-core before 0.19 has no such field")
    enable()
    try:
        assert layer_config(**selection(), moe_expert_rank_capacity_factor=2.0).moe_expert_rank_capacity_factor == 2.0
    finally:
        disable()


@on_ranks(1)
def test_a_step_ends_with_a_look_at_what_gpus_report(rank: int, num_ranks: int) -> None:
    """Before gradients are summed, the step learns what a GPU has reported. Without a factor there is nothing to learn."""
    from megatron.core import distributed

    for factor, is_asked in ((None, False), (1.0, True)):
        with model_parallel(ep=1, **SYNC_FREE, recv_capacity_factor=factor) as sizes:
            layer = layer_of(sizes)
            layer(inputs(rank, 4)[0])
            asked: list[bool] = []
            layer.token_dispatcher.buffer.check = lambda: asked.append(True)  # noqa: B023
            with pytest.raises(IndexError):  # of no model, after the look
                distributed.finalize_model_grads([])
            assert asked == [True] * is_asked


# ---- what is refused ----


@on_ranks(1)
def test_experts_that_wait_for_counts(rank: int, num_ranks: int) -> None:
    with (
        model_parallel(ep=1, sync_free=True) as sizes,
        pytest.raises(ValueError, match=r"SequentialMLP reads its counts on the host; call enable\(grouped_experts=True\)"),
    ):
        layer_of(sizes)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"sync_free": 1}, ValueError, "sync_free is 1; it must be True or False"),
        ({"recv_capacity_factor": 2.0}, ValueError, "recv_capacity_factor is given without sync_free; pass sync_free=True"),
        ({"sync_free": True, "recv_capacity_factor": "2"}, TypeError, "recv_capacity_factor is '2'; it must be a number"),
        ({"sync_free": True, "recv_capacity_factor": True}, TypeError, "recv_capacity_factor is True; it must be a number"),
        ({"sync_free": True, "recv_capacity_factor": 0.0}, ValueError, "recv_capacity_factor is 0.0; it must be a positive number"),
        ({"sync_free": True, "recv_capacity_factor": float("nan")}, ValueError, "recv_capacity_factor is nan; it must be a positive"),
    ],
)
def test_options_are_checked(options, error, message):
    with pytest.raises(error, match=message):
        enable(**options)


def test_growth_is_checked():
    grow_recv_capacity(2.0)  # nothing is enabled
    with pytest.raises(ValueError, match="times is -1; it must be a positive number"):
        grow_recv_capacity(-1)
