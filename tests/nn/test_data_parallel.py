"""MoE layers under wrappers that average or shard parameters, and what PyTorch decides for each process: all ranks decide alike."""

import math

import pytest
import torch
import torch.distributed as dist
from on_ranks import on_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from deepep_moe.nn import GroupedExperts, LocalExperts, MoELayer, Router, SwiGLU, mark_experts

HIDDEN, NUM_EXPERTS = 16, 4


def make_model(group=None, *, is_grouped: bool = True, expert_bias: bool = False) -> nn.Sequential:
    """A model around a layer. In a group of one it has all experts."""
    rank, num_ranks = dist.get_rank(group), dist.get_world_size(group)
    torch.manual_seed(0)
    router, stem = Router(HIDDEN, NUM_EXPERTS, 2, expert_bias=expert_bias), nn.Linear(HIDDEN, HIDDEN)
    all_experts = GroupedExperts(NUM_EXPERTS, HIDDEN, 8)
    mine = slice(rank * NUM_EXPERTS // num_ranks, (rank + 1) * NUM_EXPERTS // num_ranks)
    if is_grouped:
        experts = GroupedExperts(NUM_EXPERTS // num_ranks, HIDDEN, 8)
        experts.up, experts.down = (nn.Parameter(w[mine].detach().clone()) for w in (all_experts.up, all_experts.down))
    else:
        experts = LocalExperts([SwiGLU(HIDDEN, 8) for _ in range(NUM_EXPERTS // num_ranks)])
        for module, up, down in zip(experts.experts, all_experts.up[mine], all_experts.down[mine], strict=True):
            module.gate_up.weight, module.down.weight = (nn.Parameter(w.detach().clone()) for w in (up, down))
    return nn.Sequential(stem, MoELayer(router, experts, num_max_tokens_per_rank=16, group=group))


def rows_of(rank: int, step: int) -> torch.Tensor:
    return torch.randn(5 + rank, HIDDEN, generator=torch.Generator().manual_seed(10 * step + rank))


@on_ranks(2, is_grouped=(True, False))
def test_ddp_trains_as_one_model(rank: int, num_ranks: int, is_grouped: bool) -> None:
    """A marked model in DDP trains as one with all experts on each rank does, whose gradients DDP averages."""
    alone = [dist.new_group([other]) for other in range(num_ranks)][rank]
    one, many = make_model(alone), make_model(is_grouped=is_grouped, expert_bias=True)
    mark_experts(many)
    norms = []
    for model in (one, many):
        wrapped, optimizer = DistributedDataParallel(model), torch.optim.SGD(model.parameters(), lr=0.3)
        for step in range(3):
            optimizer.zero_grad()
            with wrapped.no_sync():  # two micro-batches
                wrapped(rows_of(rank, step)).square().mean().backward()
            wrapped(rows_of(rank, step + 50)).square().mean().backward()
            norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5))
            optimizer.step()
    torch.testing.assert_close(torch.stack(norms[3:]), torch.stack(norms[:3]))
    x = rows_of(rank, 99)
    torch.testing.assert_close(many(x), one(x))
    assert many[1].router.num_tokens_per_expert.sum() == 7 * (5 + rank) * 2, "every rank counts its own tokens"


@on_ranks(2)
def test_wrappers_that_mix_experts_are_refused(rank: int, num_ranks: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

    x, mesh = rows_of(rank, 0), init_device_mesh("cpu", (num_ranks,))
    with pytest.raises(ValueError, match=r"experts of rank 0 .*mark_experts\(model\) on the Sequential"):
        DistributedDataParallel(make_model())(x)
    for is_grouped in (True, False):
        sharded = make_model(is_grouped=is_grouped)
        fully_shard(sharded, mesh=mesh)
        with pytest.raises(ValueError, match="fully_shard shards the experts.*ignored_params"):
            sharded(x)
    for use_orig_params in (False, True):
        flat = FullyShardedDataParallel(make_model(), use_orig_params=use_orig_params, device_id=torch.device("cpu"))
        with pytest.raises(ValueError, match="FullyShardedDataParallel shards the experts.*ignored_states"):
            flat(x)
    inner = make_model()
    want = inner(x)
    fully_shard(inner[1].experts, mesh=init_device_mesh("cpu", (num_ranks, 1), mesh_dim_names=("ranks", "copies"))["copies"])
    torch.testing.assert_close(inner(x), want)


@on_ranks(2)
def test_fsdp2_trains_as_one_model(rank: int, num_ranks: int) -> None:
    """With its experts ignored, a model in FSDP2 trains as one with all experts on each rank does, which sees the rows of all ranks."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    alone = [dist.new_group([other]) for other in range(num_ranks)][rank]
    one, many = make_model(alone), make_model()
    experts = list(many[1].expert_parameters())
    fully_shard(many, mesh=init_device_mesh("cpu", (num_ranks,)), ignored_params=set(experts))
    dense = [parameter for parameter in many.parameters() if hasattr(parameter, "full_tensor")]
    assert {id(parameter) for parameter in many.parameters()} == {id(parameter) for parameter in dense + experts}
    groups = [{"params": dense}, {"params": experts}]
    optimizers = (torch.optim.SGD(one.parameters(), lr=1.0), torch.optim.SGD(groups, lr=1.0, foreach=True))
    mine = slice(rank * NUM_EXPERTS // num_ranks, (rank + 1) * NUM_EXPERTS // num_ranks)
    for step in range(3):
        for seed in (step, step + 50):  # two micro-batches
            losses = [one(rows_of(other, seed)).square().mean() for other in range(num_ranks)]
            torch.stack(losses).mean().backward()
            loss = many(rows_of(rank, seed)).square().mean()
            loss.backward()
            torch.testing.assert_close(loss, losses[rank])
        for parameter in experts:
            parameter.grad /= num_ranks
        for (name, wanted), parameter in zip(one.named_parameters(), many.parameters(), strict=True):
            grad, want = parameter.grad, wanted.grad[mine] if "experts" in name else wanted.grad
            torch.testing.assert_close(grad.full_tensor() if hasattr(grad, "full_tensor") else grad, want)
        norms = [torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3, foreach=False) for model in (one, many)]
        torch.testing.assert_close(norms[1], norms[0])
        assert norms[0] > 1e-3, "gradients are clipped"
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    x = rows_of(rank, 99)
    torch.testing.assert_close(many(x), one(x))


@on_ranks(2)
def test_ranks_decide_alike(rank: int, num_ranks: int) -> None:
    """Norms by hand: each rank has gradients 3 in one replicated number and 4 * (rank + 1) in one expert's number."""
    model = make_model()
    layer = model[1]

    def set_gradients(value: float) -> None:
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        model[0].bias.grad[0] = 3.0
        layer.experts.up.grad[0, 0, 0] = value

    for norm_type, want in ((2.0, math.sqrt(9 + 16 + 64)), (1.0, 3 + 4 + 8), (math.inf, 8.0)):
        set_gradients(4.0 * (rank + 1))
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, norm_type)
        assert norm.item() == pytest.approx(want)
        assert model[0].bias.grad[0].item() == pytest.approx(3 / want, rel=1e-4)
    set_gradients(4.0 * (rank + 1))
    gradients = [parameter.grad for parameter in model.parameters()]
    assert torch.nn.utils.get_total_norm(gradients).item() == pytest.approx(math.sqrt(89))
    assert torch.nn.utils.get_total_norm([model[0].bias.grad]).item() == 3, "no expert takes part"
    set_gradients(math.inf if rank == 1 else 1.0)
    with pytest.raises(RuntimeError, match="non-finite"):
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
    scaler, optimizer = torch.amp.GradScaler("cpu", init_scale=4.0), torch.optim.SGD(model.parameters(), lr=1.0)
    before = model[0].bias.detach().clone()
    for is_finite in (False, True):
        optimizer.zero_grad()
        scaler.scale(model(rows_of(rank, 0)).sum())  # starts the scaler
        set_gradients(math.inf if rank == 1 and not is_finite else 1.0)
        scaler.step(optimizer)
        scaler.update()
        assert torch.equal(model[0].bias, before) is not is_finite, "all ranks skip the step, or none"
        assert scaler.get_scale() == 2.0


def test_mark_experts_refuses_what_is_no_module():
    with pytest.raises(TypeError, match="model is list; it must be a torch.nn.Module"):
        mark_experts([])
