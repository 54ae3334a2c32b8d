"""`enable(sync_free=True)`: rows get room before anybody knows how many come. Results stay, no row is lost, and all ranks agree."""

import importlib
import sys
import types
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron_cases import HIDDEN, RECOMPUTED, SYNC_FREE, assert_bits, draw, forward_backward, layer_of, model_parallel, on_megatron
from on_ranks import on_ranks

from deepep_moe.errors import EPCapacityError, EPPeerError
from deepep_moe.integrations.megatron import grow_recv_capacity, recover

pytest.importorskip("megatron.core")

TOPK, NUM_TOKENS = 4, 12
PAGED_STASH = "megatron.core.transformer.moe.paged_stash"
BOUNDED = SYNC_FREE | {"num_max_tokens_per_rank": NUM_TOKENS}
NO_GROUPS = {"moe_router_num_groups": None, "moe_router_group_topk": None}


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
    ("recomputed", {"ep": 2}, RECOMPUTED),
    ("shared experts beside the calls", {"ep": 2}, {"moe_shared_expert_overlap": True}),
]


@on_ranks(2)
def test_results_repeat_the_bits(rank: int, num_ranks: int) -> None:
    for name, groups, changes in CASES:
        results = []
        for how in (SYNC_FREE, {"experts": "own"}):
            with model_parallel(**groups, **how) as sizes:
                layer = layer_of(sizes, **changes)
                counts = (12, 1 if "tp" in groups else 1 + 9 * rank)
                results.append([forward_backward(layer, *draw(rank, num_tokens)) for num_tokens in counts])
        for ours, theirs in zip(*results, strict=True):
            assert_bits(ours, theirs, f"{name}, rank {rank}")


@on_ranks(2)
def test_room_for_rows(rank: int, num_ranks: int) -> None:
    """12 tokens of each rank, top-4 of 8 experts: room for every routing, or for a factor of the even share of 48 rows."""
    local = 8 // num_ranks
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
            layer(draw(rank, 12)[0])
            layer(draw(rank, 7)[0])
            assert seen == [(num_rows, HIDDEN)] * 2, (alignment, factor)


# ---- more rows than there is room for ----


@on_megatron(2, experts="own", num_max_tokens_per_rank=12)
def test_factor_of_the_config(rank: int, num_ranks: int, sizes: dict[str, int]) -> None:
    """Megatron-Core's own factor (0.19), which its config would refuse for a backend that it does not know."""
    layer = layer_of(sizes, late={"moe_expert_rank_capacity_factor": 1.0})  # in older versions not a field
    seen = rows_for_experts(layer)
    layer.router.expert_bias[:TOPK] = 100.0
    with pytest.raises(EPCapacityError, match="rank 0 would receive"):
        layer(draw(rank, 12)[0])
    recover()
    layer.router.expert_bias.zero_()
    layer(draw(rank, 1)[0])
    assert seen == [(48, HIDDEN)]
    if "moe_expert_rank_capacity_factor" in type(layer.config).__dataclass_fields__:
        layer_of(sizes, moe_expert_rank_capacity_factor=2.0)


# ---- more ranks step than one expert-parallel group: all agree at the end of a step ----


class Model(torch.nn.Module):
    """A chunk of a model: one MoE layer, and gradients that are summed over the ranks that have the same weights."""

    def __init__(self, layer: Any):
        super().__init__()
        self.config, self.layer = layer.config, layer
        self.even_weight = self.layer.router.weight.detach().clone()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)[0]

    def finish_grad_sync(self) -> None:
        """Sum the gradients as Megatron-Core's DDP without overlap does: all ranks have to take part."""
        from megatron.core import parallel_state

        for name, parameter in self.layer.named_parameters():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            group = parallel_state.get_expert_data_parallel_group() if name.startswith("experts.") else None
            dist.all_reduce(parameter.grad, group=group)


def make_model(sizes: dict[str, Any], **changes: Any) -> Model:
    from megatron.core import distributed

    late = {"finalize_model_grads_func": distributed.finalize_model_grads} | changes
    return Model(layer_of(sizes, late=late, **NO_GROUPS, moe_router_enable_expert_bias=False))


def route(model: Model, is_even: bool) -> None:
    """Let tokens of this rank go where the router says, or nearly all of them to the first experts."""
    one_sided = torch.where(torch.arange(8) < TOPK, 50.0, -50.0).unsqueeze(1)
    with torch.no_grad():
        model.layer.router.weight.copy_(model.even_weight if is_even else model.even_weight.abs() * one_sided)


def one_step(model: Model, rank: int, step: int) -> list[torch.Tensor]:
    """Forward and backward, with absolute inputs so that `route` decides, and the end of the step as Megatron-Core's schedules make it.
    Returns the loss and the gradients."""
    x, target = draw(100 * step + rank, NUM_TOKENS)
    model.zero_grad(set_to_none=True)
    loss = (model(x.abs()) - target).square().mean()
    loss.backward()
    (model.config.finalize_model_grads_func or _without_an_end)([model], None)
    return [loss.detach(), *(parameter.grad.clone() for parameter in model.layer.parameters() if parameter.grad is not None)]


def _without_an_end(model: list[Model], _: None) -> None:
    model[0].finish_grad_sync()


def stub_finalize() -> None:
    """finalize_model_grads of Megatron-Core, to which only the sums matter here, in this rank from now on."""
    from megatron.core import distributed

    distributed.finalize_model_grads = lambda model, num_tokens=None: [chunk.finish_grad_sync() for chunk in model]


def _train(rank: int, options: dict[str, Any], has_end: bool) -> tuple[list[list[torch.Tensor]], int]:
    """Three steps. In the second one the tokens of ranks 0 and 1, which are one of the two groups, all go to rank 0. Without ends of steps,
    as in a loop of the user's own, all ranks are one group, and all tokens go to ranks 0 and 1."""
    results, num_again = [], 0
    message = "MoE layers of rank 0 received more rows than they have room for" if has_end else "more than its num_recv_rows of"
    with model_parallel(ep=2 if has_end else 4, **options) as sizes:
        model = make_model(sizes, **({} if has_end else {"finalize_model_grads_func": None}))
        for step in range(3):
            route(model, is_even=step != 1 or (has_end and rank >= 2))
            while True:
                try:
                    results.append(one_step(model, rank, step))
                    break
                except EPCapacityError as error:
                    assert error.rank < (1 if has_end else 2) and message in str(error), str(error)
                    assert any("grow_recv_capacity" in note for note in error.__notes__)
                    num_again += 1
                    recover()
                    grow_recv_capacity()
    return results, num_again


@on_ranks(4, has_end=(True, False))
def test_all_ranks_agree_to_run_a_step_again(rank: int, num_ranks: int, has_end: bool) -> None:
    """The step that is run again loses nothing."""
    stub_finalize()
    want, none = _train(rank, {"experts": "own"}, has_end)
    results, num_again = _train(rank, BOUNDED | {"recv_capacity_factor": 1.5}, has_end)
    assert (none, num_again) == (0, 1), "all four ranks, once"
    assert_same_steps(results, want)


def assert_same_steps(results: list[list[torch.Tensor]], want: list[list[torch.Tensor]]) -> None:
    for step, (ours, theirs) in enumerate(zip(results, want, strict=True)):
        assert all(torch.equal(*pair) for pair in zip(ours, theirs, strict=True)), f"rank {dist.get_rank()}, step {step}"


@on_ranks(4)
def test_a_replay_ends_with_the_agreement(rank: int, num_ranks: int) -> None:
    """A step from a graph of the whole iteration runs no `finalize_model_grads`. Its end looks at what GPUs report, and agrees."""
    full_cuda_graph = pytest.importorskip("megatron.core.full_cuda_graph")
    stub_finalize()

    def replay(self, model):
        part = model[0] if isinstance(model, list) else model
        part(draw(100 + rank, NUM_TOKENS)[0].abs()).sum().backward()
        return "losses"

    full_cuda_graph.FullCudaGraphWrapper.__call__ = replay
    with model_parallel(ep=2, **BOUNDED, recv_capacity_factor=1.5) as sizes:
        model, wrapper, asked = make_model(sizes), object.__new__(full_cuda_graph.FullCudaGraphWrapper), []
        route(model, is_even=True)
        assert wrapper(model=[model]) == wrapper(model=model) == "losses"
        model.layer.token_dispatcher.buffer.check = lambda: asked.append(True)
        route(model, is_even=rank >= 2)
        with pytest.raises(EPCapacityError, match="MoE layers of rank 0 received more rows than they have room for"):
            wrapper(model=[model])
        assert asked == [True]
    assert full_cuda_graph.FullCudaGraphWrapper.__call__ is replay, "put back"


@on_megatron(4, ep=2, **BOUNDED, recv_capacity_factor=1.0)
def test_without_an_end_of_the_step_the_dispatch_raises(rank: int, num_ranks: int, sizes: dict[str, int]) -> None:
    """A forward that no step ends raises at once, on the ranks of its group."""
    model = make_model(sizes).eval()
    route(model, is_even=False)
    with torch.no_grad(), pytest.raises(EPCapacityError, match="would receive"):
        model(draw(rank, NUM_TOKENS)[0].abs())
    recover()
    model.config.finalize_model_grads_func = None  # as in a loop of the user's own
    with pytest.raises(EPCapacityError, match="would receive"):
        model.train()(draw(rank, NUM_TOKENS)[0].abs())


@on_ranks(4)
def test_groups_grow_and_refuse_on_their_own(rank: int, num_ranks: int) -> None:
    """One group outgrows its buffer, or refuses a forward, while the other one steps on. Then all ranks sum gradients."""
    stub_finalize()
    with model_parallel(ep=2, **SYNC_FREE) as sizes:
        model = make_model(sizes)
        one_step(model, rank, 0)
        first = model.layer.token_dispatcher.buffer
        model.zero_grad(set_to_none=True)
        model(draw(100 + rank, 200 if rank == 3 else 5)[0]).sum().backward()
        model.config.finalize_model_grads_func([model], None)
        assert (model.layer.token_dispatcher.buffer is first) == (rank < 2), "only the group of rank 3 has a larger buffer"
    with model_parallel(ep=2, **BOUNDED) as sizes:
        model = make_model(sizes)
        if rank < 2:
            with pytest.raises(ValueError if rank == 1 else EPPeerError, match="a rank dispatches 13 tokens"):
                model(draw(rank, 13 if rank == 1 else 3)[0])
        else:
            model(draw(rank, NUM_TOKENS)[0])
        recover()
        assert one_step(model, rank, 1)[0].isfinite()


# ---- Megatron-Core's own protocol, as 0.19 speaks it ----


class Runner:
    """The calls that Megatron-Core 0.19's PagedStashRunner makes of a layer's dispatcher, in its order, around a step."""

    def __init__(self, model: list[Model]):
        self.moe_layers = [chunk.layer for chunk in model]
        self.num_runs = 0

    def __call__(self, step: Any) -> Any:
        while True:
            self.num_runs += 1
            result = step()
            over = torch.zeros(1, dtype=torch.bool)
            for layer in self.moe_layers:
                noted = layer.token_dispatcher.check_over_budget()
                if noted is not None:
                    over |= noted.view(-1)[0]
            total = over.to(torch.int32)
            dist.all_reduce(total)
            bounded = [layer.token_dispatcher for layer in self.moe_layers if hasattr(layer.token_dispatcher._comm_manager, self.FIELD)]
            for dispatcher in bounded:
                setattr(dispatcher._comm_manager, self.FIELD, None if total.item() else getattr(dispatcher.config, self.FIELD))
                if total.item():
                    dispatcher.reset_over_budget()
            if not total.item():
                return result

    FIELD = "moe_expert_rank_capacity_factor"


def runner_module() -> Any:
    """The module where Megatron-Core has its runner, with `Runner` there, in this rank from now on."""
    try:
        module = importlib.import_module(PAGED_STASH)
    except ImportError:  # before 0.19, or without Triton
        module = sys.modules[PAGED_STASH] = types.ModuleType(PAGED_STASH)
    module.PagedStashRunner = type("PagedStashRunner", (Runner,), {"__init__": Runner.__init__})
    return module


def _runner_train(rank: int, factor: float | None) -> tuple[list[list[torch.Tensor]], list[int], list[torch.Size]]:
    results, num_runs, seen = [], [], []
    with model_parallel(ep=2, experts="own", num_max_tokens_per_rank=NUM_TOKENS) as sizes:
        model = make_model(sizes, **({} if factor is None else {Runner.FIELD: factor}))
        model.layer.experts.register_forward_pre_hook(lambda module, arguments: seen.append(arguments[0].shape))
        runner = sys.modules[PAGED_STASH].PagedStashRunner([model])
        for step in range(3):
            route(model, is_even=step != 1 or rank >= 2)
            runner.num_runs = 0
            results.append(runner(lambda: one_step(model, rank, step)))  # noqa: B023
            num_runs.append(runner.num_runs)
    return results, num_runs, seen


@on_ranks(4)
def test_a_runner_of_megatron_loses_nothing(rank: int, num_ranks: int) -> None:
    stub_finalize()
    runner_module()
    want, once, _ = _runner_train(rank, None)
    results, num_runs, seen = _runner_train(rank, 1.5)
    assert once == [1, 1, 1] and num_runs == [1, 2, 1], "all ranks run the second step again, and no other"
    bound, every_routing = int(1.5 * NUM_TOKENS * TOPK), 2 * NUM_TOKENS * TOPK
    assert [len(shape) for shape in seen] == [2] * 4
    again = [every_routing if rank < 2 else bound, every_routing]  # CPUs repeat a dispatch at once
    assert [shape[0] for shape in seen] == [bound, *again, bound]
    assert_same_steps(results, want)


@on_ranks(2)
def test_a_stage_without_layers_knows_of_the_runner(rank: int, num_ranks: int) -> None:
    """A pipeline stage without MoE layers knows of the runner too, and waits for no agreement that other stages do not make."""
    from deepep_moe.integrations.megatron import buffers

    stub_finalize()
    module, agreed = runner_module(), []
    buffers.take_notes = lambda _, of_all_ranks: agreed.append(True) if of_all_ranks else None
    with model_parallel(ep=1, **BOUNDED, recv_capacity_factor=1.5) as sizes:
        assert module.PagedStashRunner.__init__ is not Runner.__init__
        chunk = make_model(sizes)
        end = chunk.config.finalize_model_grads_func
        dense = types.SimpleNamespace(config=chunk.config, finish_grad_sync=bool)
        end([dense], None)
        assert agreed == [True]
        module.PagedStashRunner([])
        end([dense], None)
        assert agreed == [True]
    assert module.PagedStashRunner.__init__ is Runner.__init__, "put back"


@on_megatron(1, **BOUNDED)
def test_what_a_layer_answers(rank: int, num_ranks: int, sizes: dict[str, int]) -> None:
    """If there is no runner, `check_over_budget` returns None, and errors report the overflow."""
    dispatcher = make_model(sizes, moe_expert_rank_capacity_factor=1.0).layer.token_dispatcher
    assert dispatcher.check_over_budget() is None and not hasattr(dispatcher._comm_manager, Runner.FIELD)
    dispatcher.follow_runner()
    assert dispatcher._comm_manager.moe_expert_rank_capacity_factor == 1.0 and dispatcher.check_over_budget() is None
    dispatcher.reset_over_budget()
    unbounded = make_model(sizes).layer.token_dispatcher
    unbounded.follow_runner()
    assert not hasattr(unbounded._comm_manager, Runner.FIELD)
