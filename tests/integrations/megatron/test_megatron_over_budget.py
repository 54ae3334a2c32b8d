"""Rows without room where more ranks step than one expert-parallel group: all ranks agree at the end of a step, and nothing is lost."""

import importlib
import sys
import types
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron_cases import HIDDEN, build_layer, layer_config, model_parallel
from on_ranks import on_ranks

from deepep_moe.errors import EPCapacityError, EPPeerError
from deepep_moe.integrations.megatron import disable, enable, grow_recv_capacity, recover
from deepep_moe.integrations.megatron.plugin import selection

pytest.importorskip("megatron.core")

TOPK, NUM_TOKENS = 4, 12
SYNC_FREE = {"grouped_experts": True, "sync_free": True, "num_max_tokens_per_rank": NUM_TOKENS}
PAGED_STASH = "megatron.core.transformer.moe.paged_stash"


class Model(torch.nn.Module):
    """A chunk of a model: one MoE layer, and gradients that are summed over the ranks that have the same weights."""

    def __init__(self, config: Any):
        super().__init__()
        self.config = config
        self.layer = build_layer(config)
        self.num_syncs = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)[0]

    def finish_grad_sync(self) -> None:
        """As Megatron-Core's DDP without overlap: sums of gradients, in which all ranks have to take part."""
        from megatron.core import parallel_state

        self.num_syncs += 1
        for name, parameter in self.layer.named_parameters():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            group = parallel_state.get_expert_data_parallel_group() if name.startswith("experts.") else None
            dist.all_reduce(parameter.grad, group=group)


def inputs(rank: int, step: int, num_tokens: int = NUM_TOKENS) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return [torch.randn(num_tokens, 1, HIDDEN, generator=generator) for _ in range(2)]


def make_model(sizes: dict[str, Any], **changes: Any) -> Model:
    from megatron.core import distributed

    config = layer_config(
        **sizes, **selection(), moe_router_num_groups=None, moe_router_group_topk=None, moe_router_enable_expert_bias=False
    )
    config.finalize_model_grads_func = distributed.finalize_model_grads
    for name, value in changes.items():
        setattr(config, name, value)
    return Model(config)


def route(model: Model, is_even: bool) -> None:
    """Let tokens of this rank go where the router says, or nearly all of them to the first experts."""
    with torch.no_grad():
        model.layer.router.weight.copy_(model.even_weight if is_even else model.even_weight.abs() * model.one_sided)


def prepare(model: Model) -> None:
    weight = model.layer.router.weight.detach()
    model.even_weight = weight.clone()
    model.one_sided = torch.where(torch.arange(len(weight)) < TOPK, 50.0, -50.0).unsqueeze(1)


def one_step(model: Model, rank: int, step: int) -> torch.Tensor:
    """Forward and backward, with absolute inputs so that `route` decides, and the end of the step as Megatron-Core's schedules make it."""
    x, target = inputs(rank, step)
    model.zero_grad(set_to_none=True)
    loss = (model(x.abs()) - target).square().mean()
    loss.backward()
    model.config.finalize_model_grads_func([model], None)
    return loss.detach()


def results_of(model: Model, loss: torch.Tensor) -> list[torch.Tensor]:
    return [loss, *(parameter.grad.clone() for parameter in model.layer.parameters() if parameter.grad is not None)]


def stub_finalize(monkeypatch: pytest.MonkeyPatch) -> None:
    """finalize_model_grads of Megatron-Core, to which only the sums matter here."""
    from megatron.core import distributed

    monkeypatch.setattr(distributed, "finalize_model_grads", lambda model, num_tokens=None: [chunk.finish_grad_sync() for chunk in model])


# ---- agreement over two expert-parallel groups ----


def _train(rank: int, options: dict[str, Any]) -> tuple[list[list[torch.Tensor]], int]:
    """Three steps. In the second one the tokens of ranks 0 and 1, which are one of the two groups, all go to rank 0."""
    results, num_again = [], 0
    with model_parallel(ep=2, **options) as sizes:
        model = make_model(sizes)
        prepare(model)
        for step in range(3):
            route(model, is_even=step != 1 or rank >= 2)
            while True:
                try:
                    results.append(results_of(model, one_step(model, rank, step)))
                    break
                except EPCapacityError as error:
                    assert error.rank == 0 and "MoE layers of rank 0 received more rows than they have room for" in str(error)
                    assert any("grow_recv_capacity" in note for note in error.__notes__)
                    num_again += 1
                    recover()
                    grow_recv_capacity()
    return results, num_again


@on_ranks(4)
def test_two_groups_agree_to_run_a_step_again(rank: int, num_ranks: int) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        stub_finalize(monkeypatch)
        want, none = _train(rank, {"grouped_experts": True})
        results, num_again = _train(rank, SYNC_FREE | {"recv_capacity_factor": 1.5})
    assert (none, num_again) == (0, 1), "all four ranks run the step again, once"
    for step, (ours, theirs) in enumerate(zip(results, want, strict=True)):
        assert all(torch.equal(*pair) for pair in zip(ours, theirs, strict=True)), f"rank {rank}, step {step}"


@on_ranks(4)
def test_a_replay_ends_with_the_agreement(rank: int, num_ranks: int) -> None:
    """A step from a graph of the whole iteration runs no `finalize_model_grads` in Python: its end agrees all the same."""
    full_cuda_graph = pytest.importorskip("megatron.core.full_cuda_graph")
    with pytest.MonkeyPatch.context() as monkeypatch:
        stub_finalize(monkeypatch)
        replay = [lambda: None]
        monkeypatch.setattr(full_cuda_graph.FullCudaGraphWrapper, "__call__", lambda self, **kwargs: replay[0]())
        with model_parallel(ep=2, **SYNC_FREE, recv_capacity_factor=1.5) as sizes:
            model = make_model(sizes)
            prepare(model)
            wrapper = object.__new__(full_cuda_graph.FullCudaGraphWrapper)
            replay[0] = lambda: model(inputs(rank, 1)[0].abs()).sum().backward()
            route(model, is_even=True)
            wrapper(model=[model])
            route(model, is_even=rank >= 2)
            with pytest.raises(EPCapacityError, match="MoE layers of rank 0 received more rows than they have room for"):
                wrapper(model=[model])


@on_ranks(4)
def test_without_an_end_of_the_step_the_dispatch_raises(rank: int, num_ranks: int) -> None:
    """A forward that no step ends raises at once, on the ranks of its group."""
    with model_parallel(ep=2, **SYNC_FREE, recv_capacity_factor=1.0) as sizes:
        model = make_model(sizes).eval()
        prepare(model)
        route(model, is_even=False)
        with torch.no_grad(), pytest.raises(EPCapacityError, match="would receive"):
            model(inputs(rank, 0)[0].abs())
        recover()
        model.config.finalize_model_grads_func = None  # as in a loop of the user's own
        with pytest.raises(EPCapacityError, match="would receive"):
            model.train()(inputs(rank, 0)[0].abs())


@on_ranks(4)
def test_groups_grow_and_refuse_on_their_own(rank: int, num_ranks: int) -> None:
    """One group outgrows its buffer, or refuses a forward, while the other one steps on. Then all ranks sum gradients."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        stub_finalize(monkeypatch)
        with model_parallel(ep=2, grouped_experts=True, sync_free=True) as sizes:
            model = make_model(sizes)
            one_step(model, rank, 0)
            first = model.layer.token_dispatcher.buffer
            x = inputs(rank, 1, 200 if rank == 3 else 5)[0]
            model.zero_grad(set_to_none=True)
            model(x).sum().backward()
            model.config.finalize_model_grads_func([model], None)
            assert (model.layer.token_dispatcher.buffer is first) == (rank < 2), "only the group of rank 3 has a larger buffer"
        with model_parallel(ep=2, **SYNC_FREE) as sizes:
            model = make_model(sizes)
            if rank < 2:
                with pytest.raises(ValueError if rank == 1 else EPPeerError, match="a rank dispatches 13 tokens"):
                    model(inputs(rank, 0, 13 if rank == 1 else 3)[0])
            else:
                model(inputs(rank, 0)[0])
            recover()
            assert one_step(model, rank, 1).isfinite()


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


def runner_module(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module where Megatron-Core has its runner, with `Runner` there."""
    try:
        module = importlib.import_module(PAGED_STASH)
    except ImportError:  # before 0.19, or without Triton
        module = types.ModuleType(PAGED_STASH)
        monkeypatch.setitem(sys.modules, PAGED_STASH, module)
    runner = type("PagedStashRunner", (Runner,), {"__init__": Runner.__init__})
    monkeypatch.setattr(module, "PagedStashRunner", runner, raising=False)
    return module


def _runner_train(rank: int, factor: float | None) -> tuple[list[list[torch.Tensor]], list[int], list[torch.Size]]:
    results, num_runs, seen = [], [], []
    with model_parallel(ep=2, grouped_experts=True, num_max_tokens_per_rank=NUM_TOKENS) as sizes:
        model = make_model(sizes, **({} if factor is None else {Runner.FIELD: factor}))
        prepare(model)
        model.layer.experts.register_forward_pre_hook(lambda module, arguments: seen.append(arguments[0].shape))
        runner = sys.modules[PAGED_STASH].PagedStashRunner([model])
        for step in range(3):
            route(model, is_even=step != 1 or rank >= 2)
            runner.num_runs = 0
            loss = runner(lambda: one_step(model, rank, step))  # noqa: B023
            results.append(results_of(model, loss))
            num_runs.append(runner.num_runs)
    return results, num_runs, seen


@on_ranks(4)
def test_a_runner_of_megatron_loses_nothing(rank: int, num_ranks: int) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        stub_finalize(monkeypatch)
        runner_module(monkeypatch)
        want, once, _ = _runner_train(rank, None)
        results, num_runs, seen = _runner_train(rank, 1.5)
    assert once == [1, 1, 1] and num_runs == [1, 2, 1], "all ranks run the second step again, and no other"
    bound, every_routing = int(1.5 * NUM_TOKENS * TOPK), 2 * NUM_TOKENS * TOPK
    assert [len(shape) for shape in seen] == [2] * 4
    again = [every_routing if rank < 2 else bound, every_routing]  # CPUs repeat a dispatch at once
    assert [shape[0] for shape in seen] == [bound, *again, bound]
    for step, (ours, theirs) in enumerate(zip(results, want, strict=True)):
        assert all(torch.equal(*pair) for pair in zip(ours, theirs, strict=True)), f"rank {rank}, step {step}"


@on_ranks(2)
def test_a_stage_without_layers_knows_of_the_runner(rank: int, num_ranks: int) -> None:
    """A pipeline stage without MoE layers knows of the runner too, and waits for no agreement that other stages do not make."""
    from deepep_moe.integrations.megatron import buffers

    with pytest.MonkeyPatch.context() as monkeypatch:
        stub_finalize(monkeypatch)
        module = runner_module(monkeypatch)
        agreed: list[bool] = []
        monkeypatch.setattr(buffers, "agree", lambda *_: agreed.append(True))
        with model_parallel(ep=1, **SYNC_FREE, recv_capacity_factor=1.5) as sizes:
            chunk = make_model(sizes)
            end = chunk.config.finalize_model_grads_func
            dense = types.SimpleNamespace(config=chunk.config, finish_grad_sync=bool)
            end([dense], None)
            assert agreed == [True]
            module.PagedStashRunner([])
            end([dense], None)
            assert agreed == [True]


@on_ranks(1)
def test_what_a_layer_answers(rank: int, num_ranks: int) -> None:
    """Without a runner a layer has nothing to say, and errors say it instead."""
    with model_parallel(ep=1, **SYNC_FREE) as sizes:
        dispatcher = make_model(sizes, moe_expert_rank_capacity_factor=1.0).layer.token_dispatcher
        assert dispatcher.check_over_budget() is None and not hasattr(dispatcher._comm_manager, Runner.FIELD)
        dispatcher.follow_runner()
        assert dispatcher._comm_manager.moe_expert_rank_capacity_factor == 1.0 and dispatcher.check_over_budget() is None
        dispatcher.reset_over_budget()
        unbounded = make_model(sizes).layer.token_dispatcher
        unbounded.follow_runner()
        assert not hasattr(unbounded._comm_manager, Runner.FIELD)


def test_the_runner_is_put_back():
    from megatron.core import distributed

    stock = distributed.finalize_model_grads
    with pytest.MonkeyPatch.context() as monkeypatch:
        module = runner_module(monkeypatch)
        enable()
        try:
            assert module.PagedStashRunner.__init__ is not Runner.__init__
        finally:
            disable()
        assert module.PagedStashRunner.__init__ is Runner.__init__
    assert distributed.finalize_model_grads is stock
