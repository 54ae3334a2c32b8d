"""The MoE layer against the same layer written with loops, on one rank and on two."""

import copy
import pickle
import runpy
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from exchange_cases import modes_of_calls
from left_graphs import assert_leaves_no_graph
from on_ranks import on_ranks

from deepep_moe import Buffer
from deepep_moe.errors import EPCapacityError, EPPeerError
from deepep_moe.nn import GroupedExperts, LocalExperts, MoELayer, Router, SwiGLU

HIDDEN, NUM_EXPERTS, NUM_TOPK = 16, 4, 2


def make_parts():
    torch.manual_seed(0)
    router = Router(HIDDEN, NUM_EXPERTS, NUM_TOPK, routed_scaling_factor=2.5)
    return router, [SwiGLU(HIDDEN, 24) for _ in range(NUM_EXPERTS)], SwiGLU(HIDDEN, 24)


def by_loops(router, experts, shared, x, mask=None):
    rows = x.reshape(-1, HIDDEN)
    idx, weights, _ = router(rows, mask)
    routed = [
        sum((w * experts[e](row[None])[0] for e, w in zip(lanes.tolist(), ws, strict=True) if e >= 0), torch.zeros(HIDDEN))
        for row, lanes, ws in zip(rows, idx, weights, strict=True)
    ]
    return (torch.stack(routed) + shared(rows)).view(x.shape)


def tokens(rank):
    """Rows of a rank, and a mask of one of them."""
    x = torch.randn(2, 5 + rank, HIDDEN, generator=torch.Generator().manual_seed(rank), requires_grad=True)
    return x, torch.arange(len(x) * x.shape[1]) == 3


@on_ranks((1, 2, 4), backend=("shm", "collective"))
def test_layer_equals_loops(rank, num_ranks, backend):
    router, experts, shared = make_parts()
    local = experts[rank * NUM_EXPERTS // num_ranks : (rank + 1) * NUM_EXPERTS // num_ranks]
    layer = MoELayer(router, local, shared, num_max_tokens_per_rank=64, backend=backend, expert_alignment=4)
    x, mask = tokens(rank)
    y = layer(x, mask)
    y.square().sum().backward()
    own_grads = [p.grad.clone() for p in layer.expert_parameters()]
    router_grad = router.weight.grad.clone()
    dist.all_reduce(router_grad)

    expected_grads = [torch.zeros_like(p) for p in layer.expert_parameters()]
    router.zero_grad()
    for other in range(num_ranks):
        x_of_other, mask = tokens(other)
        for parameter in layer.expert_parameters():
            parameter.grad = None
        expected = by_loops(router, experts, shared, x_of_other, mask)
        expected.square().sum().backward()
        for total, parameter in zip(expected_grads, layer.expert_parameters(), strict=True):
            total += 0 if parameter.grad is None else parameter.grad
        if other == rank:
            torch.testing.assert_close(y, expected)
            torch.testing.assert_close(x.grad, x_of_other.grad)
    torch.testing.assert_close(own_grads, expected_grads, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(router_grad, router.weight.grad, rtol=1e-4, atol=1e-5)


@on_ranks((1, 2))
def test_bound_on_rows(rank, num_ranks):
    """Room for every routing gives the same bits; too little room is an error on all ranks, after which the layer goes on."""
    router, _, shared = make_parts()
    experts = GroupedExperts(NUM_EXPERTS // num_ranks, HIDDEN, 24)
    most = num_ranks * 12 * min(NUM_TOPK, NUM_EXPERTS // num_ranks)
    x = torch.randn(9 + rank, HIDDEN, generator=torch.Generator().manual_seed(rank))
    results = []
    for num_recv_rows in (None, most):
        layer = MoELayer(router, experts, shared, num_max_tokens_per_rank=12, num_recv_rows=num_recv_rows)
        seen = []
        hook = experts.register_forward_pre_hook(lambda module, arguments, seen=seen: seen.append(len(arguments[0])))
        layer.zero_grad()
        leaf = x.clone().requires_grad_()
        y = layer(leaf)
        y.square().sum().backward()
        hook.remove()
        results.append([y.detach(), leaf.grad, *(p.grad.clone() for p in layer.parameters())])
        assert num_recv_rows is None or seen == [most]
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))
    layer.num_recv_rows = 1
    with pytest.raises(EPCapacityError, match="more than its num_recv_rows of 1"):
        layer(x)
    layer.num_recv_rows = most
    assert torch.equal(layer(x), results[0][0])


def test_layers_share_a_buffer():
    router, experts, shared = make_parts()
    buffer = Buffer(None, 8, HIDDEN, NUM_EXPERTS, NUM_TOPK)
    layers = [MoELayer(router, experts, shared, buffer=buffer) for _ in range(2)]
    x, modes = torch.randn(8, HIDDEN), modes_of_calls(buffer)
    torch.testing.assert_close(layers[1](layers[0](x)), by_loops(router, experts, shared, by_loops(router, experts, shared, x)))
    first, _, second, _ = [mode.layer for mode in modes]
    assert 0 < first < second, "a GPU's host guesses the rows of each layer apart"


def test_compiled_model_calls_layer_between_two_graphs():
    router, experts, shared = make_parts()
    layer = MoELayer(router, experts, shared, num_max_tokens_per_rank=8)
    x, modes, graphs = torch.randn(8, HIDDEN), modes_of_calls(layer.buffer), []

    def model(x):
        return layer(x.sin()).cos()

    compiled = torch.compile(model, backend=lambda graph, _: graphs.append(graph) or graph.forward)(x)
    assert len(graphs) == 2 and modes[0].layer > 0, "in a graph a call knows no layer"
    assert torch.equal(compiled, model(x))
    with pytest.raises(torch._dynamo.exc.Unsupported, match="forward"):
        torch.compile(model, fullgraph=True, backend="eager")(x)


class Returns(torch.nn.Module):
    def __init__(self, change):
        super().__init__()
        self.change = change

    def forward(self, x, *_):
        return self.change(x)


SAME, NO_RETURN, WIDE = Returns(lambda rows: rows), Returns(lambda rows: None), Returns(lambda rows: torch.cat((rows, rows), 1))


def buffer_for(num_topk):
    return Buffer(None, 8, HIDDEN, NUM_EXPERTS, num_topk)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda router, x: MoELayer(router, SAME)(x[:, :8]), ValueError, r"x has shape \[8, 8\]; its last dimension must be hidden, 16"),
        (lambda router, x: MoELayer(router, SAME)(x.to("meta")), ValueError, "x is on meta, so it has no values; give tokens on a CPU"),
        (lambda router, x: MoELayer(router.to("meta"), SAME)(x), ValueError, "the router's weight is on meta, so it has no values; load"),
        (lambda router, x: MoELayer(router, [SAME] * 4, num_recv_rows=8), ValueError, "num_recv_rows is given, .*; pass GroupedExperts"),
        (lambda router, x: MoELayer(router, [SAME] * 3), ValueError, "3 experts were given; this rank of 1 holds 4 of 4"),
        (lambda router, x: MoELayer(router, GroupedExperts(3, HIDDEN, 8)), ValueError, "3 experts were given; this rank of 1 holds 4 of 4"),
        (lambda router, x: MoELayer(router, SAME, buffer=buffer_for(1)), ValueError, r"made for .* \(16, 4, 1\), the router has"),
        (lambda router, x: MoELayer(router, SAME, buffer=buffer_for(2), backend="shm"), ValueError, "has its own backend; leave it out"),
        (lambda router, x: MoELayer(router, WIDE)(x), ValueError, r"the experts returned shape \[16, 32\] for rows of shape \[16, 16\]"),
        (lambda router, x: MoELayer(router, SAME, WIDE)(x), ValueError, r"the shared expert returned shape \[8, 32\] for rows"),
        (lambda router, x: MoELayer(router, SAME, NO_RETURN)(x), TypeError, "the shared expert must be a torch.Tensor, not NoneType"),
        (lambda router, x: MoELayer(router, NO_RETURN)(x), TypeError, "the experts must be a torch.Tensor, not NoneType"),
        (lambda router, x: MoELayer(router, [SAME, NO_RETURN, SAME, SAME])(x), TypeError, "local expert 1 must be a torch.Tensor"),
    ],
)  # fmt: skip
def test_misfits(call, error, message):
    with pytest.raises(error, match=message):
        call(make_parts()[0], torch.randn(8, HIDDEN))


def test_other_strides_and_dtypes():
    router, experts, _ = make_parts()
    transposed, x = torch.randn(HIDDEN, 8).t(), torch.randn(8, HIDDEN)
    torch.testing.assert_close(MoELayer(router, experts)(transposed), MoELayer(router, experts)(transposed.contiguous()))
    strided, half = Returns(lambda rows: rows.t().contiguous().t()), Returns(lambda rows: rows.bfloat16())
    assert torch.equal(MoELayer(router, strided, strided)(x), MoELayer(router, SAME, SAME)(x))
    assert MoELayer(router, half, SAME)(x).dtype == torch.bfloat16, "the dtype is that of the experts' outputs"


@on_ranks(2)
def test_peers_learn_what_failed(rank, num_ranks):
    """A failure on rank 1 is an error on both ranks, and nobody waits; then all go on."""
    router, experts, shared = make_parts()
    layer = MoELayer(router, experts[2 * rank : 2 * rank + 2], shared, num_max_tokens_per_rank=8)
    x = torch.randn(5, HIDDEN)
    not_finite = torch.full_like(x, torch.nan) if rank == 1 else x
    for tokens, hooked, why in (
        (not_finite, None, "ValueError: logits has -?nan for token"),
        (x[:, : HIDDEN - rank], None, "ValueError: x has shape .5, 15.; its last dimension must be hidden, 16"),
        (x, layer.experts.experts[1], "ArithmeticError: no module of rank 1"),
        (x, layer.shared_expert, "ArithmeticError: no module of rank 1"),
        (x, NO_RETURN, "TypeError: the output of the shared expert must be a torch.Tensor, not NoneType"),
    ):

        def fail(*_):
            raise ArithmeticError("no module of rank 1")

        hook = hooked.register_forward_pre_hook(fail) if hooked not in (None, NO_RETURN) and rank == 1 else None
        layer.shared_expert = NO_RETURN if hooked is NO_RETURN and rank == 1 else shared
        error, message = (EPPeerError, f"rank 1 did not make its call: {why}") if rank == 0 else (Exception, why.split(": ", 1)[1])
        began = time.monotonic()
        with pytest.raises(error, match=message):
            layer(tokens)
        assert time.monotonic() - began < 60, "far from the deadline of 300 s"
        layer.shared_expert = shared
        if hook is not None:
            hook.remove()
        assert layer(x).isfinite().all()


def test_copies_share_the_buffer_and_nobody_saves_it():
    router, experts, shared = make_parts()
    layer = MoELayer(router, experts, shared, num_max_tokens_per_rank=8)
    copied, x = copy.deepcopy(layer), torch.randn(5, HIDDEN)
    assert copied.buffer is layer.buffer and copied.router.weight is not layer.router.weight
    assert torch.equal(copied(x), layer(x))
    with pytest.raises(TypeError, match="a Buffer is memory of running processes and cannot be saved; save the state_dict"):
        pickle.dumps(layer)


def test_experts_without_rows_have_gradients():
    experts = LocalExperts([SwiGLU(8, 8), SwiGLU(8, 8)])
    experts(torch.randn(3, 8), torch.tensor([3, 0])).sum().backward()
    assert all(parameter.grad is not None for parameter in experts.parameters())


@pytest.mark.parametrize("fp8", (False, True))
def test_a_step_leaves_no_graph(fp8):
    torch.manual_seed(0)
    router, hidden = Router(128, NUM_EXPERTS, NUM_TOPK), 128
    experts = GroupedExperts(NUM_EXPERTS, hidden, 128) if fp8 else LocalExperts([SwiGLU(hidden, 128) for _ in range(NUM_EXPERTS)])
    layer = MoELayer(router, experts, SwiGLU(hidden, 128), fp8=fp8).bfloat16()
    x = torch.randn(6, hidden, requires_grad=True, dtype=torch.bfloat16)
    assert_leaves_no_graph(lambda: layer(x).sum().backward())


@on_ranks(2)
def test_example_learns(rank, num_ranks):
    example = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "train_moe.py"))
    losses = example["train"](rank, num_ranks, 120)
    assert rank > 0 or losses[-1] < 0.5 * losses[0]


class Scaled(torch.nn.Module):
    """An expert whose product does not depend on other rows."""

    def __init__(self, factor):
        super().__init__()
        self.factor = torch.nn.Parameter(torch.tensor(factor, dtype=torch.bfloat16))

    def forward(self, x):
        return x * self.factor


@on_ranks((2, 4), sums=("lanes", "lanes_fma"))
def test_same_bits_on_any_number_of_ranks(rank, num_ranks, sums):
    alone = [dist.new_group([r]) for r in range(num_ranks)][rank]
    torch.manual_seed(0)
    router = Router(HIDDEN, 8, 3)
    factors = torch.linspace(0.3, 2.9, 8).tolist()
    results = []
    for group, of_rank in ((alone, factors), (None, torch.tensor(factors).tensor_split(num_ranks)[rank].tolist())):
        layer = MoELayer(router, [Scaled(factor) for factor in of_rank], Scaled(0.7), group=group, num_max_tokens_per_rank=64, sums=sums)
        x = torch.randn(20, HIDDEN, generator=torch.Generator().manual_seed(rank)).bfloat16().requires_grad_()
        y = layer(x)
        y.float().square().sum().backward()
        results.append((y, x.grad, router.weight.grad.clone()))
        router.zero_grad()
    assert all(map(torch.equal, *results))


def test_sums_of_a_given_buffer():
    router, experts, _ = make_parts()
    buffer = Buffer(None, 8, HIDDEN, NUM_EXPERTS, NUM_TOPK, sums="lanes")
    with pytest.raises(ValueError, match="a buffer was given, which has its own sums"):
        MoELayer(router, experts, buffer=buffer, sums="lanes")
    assert MoELayer(router, experts, buffer=buffer).buffer.sums == "lanes"
    router = Router(128, NUM_EXPERTS, NUM_TOPK)
    with pytest.raises(ValueError, match="fp8 is True, whose experts weight the rows"):
        MoELayer(router, GroupedExperts(NUM_EXPERTS, 128, 128), fp8=True, sums="lanes")
