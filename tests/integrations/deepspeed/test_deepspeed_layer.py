"""One swapped layer: what it says of its tokens, ranks without any, and where DeepSpeed's forward runs."""

from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from deepspeed_cases import HIDDEN, assert_equal, dispatches, logged, make_moe, most_experts, on_deepspeed_ranks, run_layer, sequential
from left_graphs import assert_leaves_no_graph
from torch import nn
from torch.utils.checkpoint import checkpoint

from deepep_moe.exchange.growing import GrowingBuffer
from deepep_moe.exchange.handle import DispatchHandle
from deepep_moe.integrations.common import warn_once
from deepep_moe.integrations.common.registry import all_buffers
from deepep_moe.integrations.deepspeed import replace_moe_layers, restore_moe_layers
from deepep_moe.nn import Metrics

pytest.importorskip("deepspeed")


class Times(nn.Module):
    """An expert that multiplies by a number."""

    def __init__(self):
        super().__init__()
        self.factor = nn.Parameter(torch.ones(()))

    def forward(self, x):
        assert x.dim() == 4 and x.shape[:2] == (1, 1), f"experts expect [1, 1, rows, hidden], got {list(x.shape)}"
        return x * self.factor


def times_layer(rank: int, **options):
    """Expert e of 4 multiplies by e + 1; a token goes where its first four columns are largest."""
    layer = make_moe(4, expert=Times(), **options)
    with torch.no_grad():
        layer.deepspeed_moe.gate.wg.weight.copy_(100 * torch.eye(4, HIDDEN))
        for i, expert in enumerate(layer.deepspeed_moe.experts.deepspeed_experts):
            expert.factor.fill_(rank * layer.num_local_experts + i + 1)
    replace_moe_layers(layer)
    return layer


@on_deepspeed_ranks()
def test_nodes_of_tokens(rank):
    """Two experts a rank, and a rank is a node. Tokens choose by hand, as two entries of a row say which two experts are the best."""
    layer = times_layer(rank, k=2, use_rts=False, top2_2nd_expert_sampling=False, capacity_factor=4.0)
    replace_moe_layers(layer, ranks_per_node=1)
    moe = layer.deepspeed_moe
    with pytest.raises(ValueError, match="call it first"):
        moe.nodes_per_token(2)
    x = torch.zeros(3, HIDDEN)
    for token, (best, second) in enumerate(((0, 1), (3, 0), (2, 3))):
        x[token, best], x[token, second] = 0.02, 0.01
    layer(x)
    assert moe.nodes_per_token(2).tolist() == [1, 2, 1] and moe.nodes_per_token(4).tolist() == [2, 2, 2]
    assert moe.nodes_per_token(1).tolist() == [1, 1, 1] and all_buffers()[0].ranks_per_node == 1


@on_deepspeed_ranks()
def test_metrics(rank):
    """All tokens go to rank 1's last expert, in each mode. Experts of other layers of DeepSpeed do not count, nor does an evaluation of a
    model that trains. A forward that a checkpoint repeats counts once."""
    for options in ({"exact": True}, {"exact": False}, {"exact": False, "grouped_experts": True}):
        layer = make_moe(4, k=1, use_rts=False, expert=sequential(bias=False), capacity_factor=4.0)
        with torch.no_grad():
            layer.deepspeed_moe.gate.wg.weight.copy_(100 * torch.eye(4, HIDDEN))
        replace_moe_layers(layer, **options)
        metrics, x = Metrics(layer), torch.eye(HIDDEN)[[3] * (2 + rank)]
        layer(x)[0].sum().backward()
        layer.eval()(x)
        (report,) = metrics.take()
        assert report.rows_per_expert == [0, 0, 0, 5] and report.exchange_ms > 0, options
        assert (report.rank_overload, report.max_rank_overload, report.max_vio) == (2.0, 2.0, 3.0), options
        checkpoint(layer.train(), x.requires_grad_(), use_reentrant=False)[0].sum().backward()
        assert metrics.take()[0].rows_per_expert == [0, 0, 0, 5], options
        serving = Metrics(layer.eval())
        layer(x)
        assert serving.take()[0].rows_per_expert == [0, 0, 0, 5], options
        restore_moe_layers(layer)
        assert not hasattr(layer.deepspeed_moe, "deepep_moe_is_counted")
    with pytest.raises(ValueError, match="has no MoE layer of deepep_moe"):
        Metrics(layer)
    layer = make_moe(4, with_groups=False)
    replace_moe_layers(layer)
    with pytest.raises(ValueError, match="^a PackedMOELayer has no expert-parallel group yet; make Metrics after deepspeed.initialize$"):
        Metrics(layer)


@on_deepspeed_ranks(1)
def test_repeats_of_experts_count_and_no_graph_is_left(rank):
    """Plays a GPU's host that finds that the rows have not fitted."""
    layer = make_moe(2, ep=1, k=1, expert=sequential(bias=False))
    replace_moe_layers(layer, exact=False, grouped_experts=True)
    metrics = Metrics(layer)
    with (
        mock.patch.object(DispatchHandle, "is_late", True),
        mock.patch.object(GrowingBuffer, "settle", lambda self, n, send, buffer, out: (buffer, send(buffer))),
    ):
        layer(torch.randn(3, HIDDEN))
    (report,) = metrics.take()
    assert report.num_repeats == 1 and sum(report.rows_per_expert) == 3

    layer = make_moe(4, ep=1)
    x = torch.randn(6, HIDDEN, requires_grad=True)
    for exact in (True, False):
        replace_moe_layers(layer, exact=exact)
        assert_leaves_no_graph(lambda: layer(x)[0].sum().backward())


@on_deepspeed_ranks()
def test_overflows_in_fp16_go_through(rank):
    """Logits of a token are NaN, or all -inf, for which top-2 chooses one expert twice. Only its output is not finite."""
    for k, exact in ((1, True), (2, True), (2, False), (3, False)):
        layer = times_layer(rank, k=k, use_rts=False, top2_2nd_expert_sampling=False, drop_tokens=False)
        replace_moe_layers(layer.half(), exact=exact)
        layer.deepspeed_moe.gate.wg.float().weight.data.add_(0.1)  # the sum of -inf and zeros would be NaN
        x = torch.rand(5, HIDDEN).half() / 100
        x[1], x[3] = torch.nan, -torch.inf
        y = layer(x.requires_grad_())[0]
        assert y.isfinite().all(1).tolist() == [True, False, True, False, True], (k, exact)
        y.float().sum().backward()
        assert not layer.deepspeed_moe.gate.wg.weight.grad.isfinite().all()


class Proud(nn.Module):
    """An expert that needs at least one row, and returns its input if there is none."""

    def __init__(self):
        super().__init__()
        self.factor, self.bias = nn.Parameter(torch.full((HIDDEN,), 1.5)), nn.Parameter(torch.ones(HIDDEN))

    def forward(self, x):
        return x if x.numel() == 0 else (x * self.factor / x.detach().abs().max().clamp(min=1) + self.bias).reshape(-1, HIDDEN)


@on_deepspeed_ranks()
def test_ranks_without_tokens_and_experts_without_rows(rank):
    """No rank has tokens; then one rank has none, under autocast."""
    layer = times_layer(rank, k=2)
    for exact in (True, False):
        replace_moe_layers(layer, exact=exact)
        layer.zero_grad()
        x = torch.empty(0, 5, HIDDEN, requires_grad=True)
        y, l_aux, counts = layer(x)
        assert y.shape == (0, 5, HIDDEN) and l_aux == 0 and counts.tolist() == [0] * 4
        assert layer.deepspeed_moe.gate.min_capacity == 4 and layer.deepspeed_moe.gate.ep_group is not None, "as they were"
        (y.sum() + l_aux).backward()
        for name, parameter in layer.named_parameters():
            assert torch.equal(parameter.grad, torch.zeros_like(parameter)), f"rank {rank}, exact {exact}: {name}"
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y, l_aux, _ = layer(torch.randn((20, 0)[rank], HIDDEN))
        (y.float().sum() + l_aux).backward()
        assert l_aux.dtype == torch.float32

    # All tokens go to one expert; then through a buffer that has room for a layer with more experts.
    layer, wider = make_moe(2, k=1, expert=Proud(), drop_tokens=False), make_moe(8, k=1)
    with torch.no_grad():
        layer.deepspeed_moe.gate.wg.weight.zero_()[1] = 1
    x, cotangent = torch.ones(2, 20, HIDDEN)
    want = run_layer(layer, x, cotangent)
    for exact in (True, False):
        assert replace_moe_layers(nn.ModuleList([layer, wider]), exact=exact) == 2
        assert_equal(run_layer(layer, x, cotangent), want, f"exact {exact}, rank {rank}", tolerance=1e-6)
        assert bool(layer.deepspeed_moe.experts.deepspeed_experts[0].bias.grad.any()) == (rank == 1), "gradients of zeros, not none"


# ---- where DeepSpeed's forward runs ----


@pytest.mark.skipif(most_experts() == 2, reason="DeepSpeed before 0.15 has no k above 2")
@on_deepspeed_ranks()
def test_a_layer_of_too_many_experts_leaves_the_others_alone(rank):
    layers = nn.ModuleList([make_moe(64, k=2), make_moe(64, k=4)])
    layers[1].deepspeed_moe.gate.k = 33
    replace_moe_layers(layers, exact=False)
    with dispatches(1), logged() as lines:
        for layer in layers:
            layer(torch.randn(20, HIDDEN))
    assert sum("own MoE forward" in line and "top-33" in line and "exact=True" in line for line in lines) == (rank == 0)


@on_deepspeed_ranks()
def test_where_deepspeeds_forward_runs_one_line_says_why(rank):
    from deepspeed.utils import groups

    from deepep_moe.integrations.deepspeed.native.layer import why_stock

    x, cotangent = torch.randn(20, HIDDEN), torch.randn(20, HIDDEN)
    layer = make_moe(k=2)
    moe = layer.deepspeed_moe
    layer.double()
    want = run_layer(layer, x.double(), cotangent.double())
    replace_moe_layers(layer)
    with logged() as lines:
        for _ in range(2):
            assert_equal(run_layer(layer, x.double(), cotangent.double(), num_forwards=0), want, "fp64")
        layer.float()
        alone = make_moe(k=1, ep=1, with_groups=False)
        replace_moe_layers(alone)
        alone(x)
    said = [line for line in lines if line.startswith("DeepSpeed's own MoE forward runs")]
    assert len(said) == 2 * (rank == 0) and all(map(str.__contains__, said, ("torch.float64", "no expert-parallel group")))

    assert why_stock(moe, x) is None
    groups.mpu = SimpleNamespace(get_tensor_model_parallel_world_size=lambda: 2)
    assert "tensor parallel over 2 ranks" in why_stock(moe, x)
    groups.mpu = None
    moe.use_tutel = True
    assert "use_tutel=True" in why_stock(moe, x)
    moe.use_tutel = False
    moe.experts.__class__ = type("OwnExperts", (type(moe.experts),), {})
    assert "experts are OwnExperts" in why_stock(moe, x)
    moe.experts.__class__ = type(moe.experts).__base__
    assert "the hidden size is 30; in torch.float32 it must be a multiple of 4" in why_stock(moe, x[:, :30])
    assert not all_buffers(), "nothing was exchanged"


# ---- experts ----


class Turned(nn.Module):
    """Returns rows whose columns do not lie beside each other, and something else."""

    def __init__(self):
        super().__init__()
        self.factor = nn.Parameter(torch.full((HIDDEN, 1), 1.5))

    def forward(self, x):
        return (x.transpose(2, 3).contiguous() * self.factor).transpose(2, 3), None


@on_deepspeed_ranks()
def test_experts_of_all_kinds(rank):
    """Two local experts of every kind; then one of them frozen, then that in both places."""
    x, cotangent = torch.randn(2, 40, HIDDEN, generator=torch.Generator().manual_seed(rank))
    for expert in (nn.Identity(), Turned()):
        torch.manual_seed(1)
        layer = make_moe(4, k=2, expert=expert)
        experts = layer.deepspeed_moe.experts.deepspeed_experts
        for change in (list, lambda modules: modules[0].requires_grad_(False), lambda modules: modules.__setitem__(1, modules[0])):
            change(experts)
            restore_moe_layers(layer)
            want = run_layer(layer, x, cotangent)
            for exact in (True, False):
                replace_moe_layers(layer, exact=exact)
                got = run_layer(layer, x, cotangent)
                assert_equal(got, want, f"{expert}, exact {exact}, rank {rank}", tolerance=1e-5)
                torch.manual_seed(0)
                with torch.no_grad():
                    assert torch.equal(layer(x)[0], got["output"])


@on_deepspeed_ranks()
def test_bf16_rows_are_weighed_like_deepspeed_does(rank):
    x, cotangent = torch.randn(2, 300, HIDDEN, generator=torch.Generator().manual_seed(rank)).bfloat16()
    for k in (k for k in (1, 2, 4) if k <= most_experts()):
        layer = make_moe(k=k, expert=Turned()).bfloat16()
        passes = [run_layer(layer, x, cotangent)]
        replace_moe_layers(layer)
        passes.append(run_layer(layer, x, cotangent))
        same = ("output", "l_aux", "counts", "deepspeed_moe.gate.wg.weight") + (("input gradient",) if k < 4 else ())
        assert_equal(*({name: run[name] for name in same} for run in passes), f"bf16, k {k}, rank {rank}", rounding=2e-2)
        assert_equal(*passes, f"bf16, k {k}, rank {rank}", tolerance=2e-2)


@on_deepspeed_ranks()
def test_what_is_around_the_experts_and_their_times(rank):
    """A replaced forward or a hook around all experts is not lost, or a log line names it."""
    from deepspeed.moe.experts import Experts

    stock = Experts.forward
    x = torch.randn(20, HIDDEN)
    layer = make_moe(4, k=1, capacity_factor=4.0)
    experts = layer.deepspeed_moe.experts
    for change, undo in (
        (lambda: setattr(experts, "forward", lambda *args: stock(experts, *args) * 3), lambda: delattr(experts, "forward")),
        (lambda: setattr(Experts, "forward", lambda *args: stock(*args) * 3), lambda: setattr(Experts, "forward", stock)),
    ):
        replace_moe_layers(layer)
        plain = layer(x)[0]
        warn_once.log_once.cache_clear()
        change()
        with logged() as lines:
            changed = layer(x)[0]
        undo()
        torch.testing.assert_close(changed, 3 * plain)
        assert len(lines) == (rank == 0) and all("the forward of the Experts module was replaced" in line for line in lines)
    hook = experts.register_forward_hook(lambda *_: None) if rank == 1 else None
    with logged() as lines:
        for _ in range(2):
            assert torch.equal(layer(x)[0], plain)
    assert len(lines) == (hook is not None) and all("hooks on the Experts of a MoE layer do not run" in line for line in lines)
    assert torch.equal(layer.deepspeed_moe(x, used_token=torch.zeros(20, dtype=torch.int64)), torch.zeros(20, HIDDEN))

    layer = make_moe(k=2)
    replace_moe_layers(layer)
    moe = layer.deepspeed_moe
    moe(torch.randn(20, HIDDEN))  # used_token may be left out
    assert (moe.time_moe, moe.time_falltoall, moe.time_salltoall) == (0.0, 0.0, 0.0)
    moe.wall_clock_breakdown = True
    layer(torch.randn(20, HIDDEN))
    assert moe.time_moe > moe.time_falltoall > 0 and moe.time_salltoall > 0, "milliseconds, for the engine's report"
