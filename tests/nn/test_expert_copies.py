"""Layers with copies of hot experts. Values are whole numbers, so that every order of adding gives the bits of the layer without copies."""

import copy
import time
from functools import partial

import pytest
import torch
import torch.distributed as dist
from exchange_cases import BACKENDS, device_of, look, plans_of_copies
from on_ranks import on_ranks

from deepep_moe import Buffer
from deepep_moe.errors import EPCapacityError, EPMismatchError, EPPeerError
from deepep_moe.nn import Balance, GroupedExperts, LocalExperts, Metrics, MoELayer, Router

HIDDEN, INNER, NUM_EXPERTS, NUM_TOPK = 8, 4, 8, 2


class Skewed(torch.nn.Module):
    """A router of fixed choices: the first experts have most of the tokens, and weights are powers of two. It counts its calls."""

    hidden, num_experts, num_topk = HIDDEN, NUM_EXPERTS, NUM_TOPK

    def __init__(self, rank, seed=0):
        super().__init__()
        self.generator = torch.Generator().manual_seed(100 * rank + seed)

    def forward(self, rows, mask=None):
        shares = torch.exp2(-torch.arange(NUM_EXPERTS).float())
        idx = torch.multinomial(shares.expand(max(len(rows), 1), -1), NUM_TOPK, generator=self.generator)[: len(rows)]
        return idx.to(rows.device), torch.tensor([1.0, 0.5], device=rows.device).expand(len(rows), -1).contiguous(), None


def layer_of(rank, num_ranks, balance, backend="shm", activation=torch.relu, **others):
    torch.manual_seed(7)
    full = [torch.randint(-2, 3, shape).float() for shape in ((NUM_EXPERTS, INNER, HIDDEN), (NUM_EXPERTS, HIDDEN, INNER))]
    num_local = NUM_EXPERTS // num_ranks
    experts = GroupedExperts(num_local, HIDDEN, INNER, gated=False, activation=activation)
    with torch.no_grad():
        for parameter, weight in zip((experts.up, experts.down), full, strict=True):
            parameter.copy_(weight[rank * num_local : (rank + 1) * num_local])
    experts.to(device_of(backend, rank))
    return MoELayer(Skewed(rank), experts, num_max_tokens_per_rank=64, backend=backend, balance=balance, **others)


def tokens_of(rank, step):
    """Uneven, and none on rank 1 in the first step."""
    num_tokens = 0 if (rank, step) == (1, 0) else 12 + 5 * rank
    return torch.randint(-3, 4, (num_tokens, HIDDEN), generator=torch.Generator().manual_seed(10 * rank + step)).float()


def train(layer, rank, num_steps=4, **options):
    """Return everything that the steps make: outputs, gradients of tokens and of weights, and the weights at the end."""
    seen, optimizer = [], torch.optim.SGD(layer.experts.parameters(), lr=2**-8)
    for step in range(num_steps):
        x = tokens_of(rank, step).to(layer.experts.up.device).requires_grad_()
        y = run(layer, x, **options)
        y.backward(torch.randint(-2, 3, y.shape, generator=torch.Generator().manual_seed(step)).to(y))
        seen += [y.detach(), x.grad, *(parameter.grad.clone() for parameter in layer.experts.parameters())]
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():  # whole numbers again, and small enough that fp32 holds all sums
            for parameter in layer.experts.parameters():
                parameter.copy_(parameter.round().clamp(-2, 2))
    return seen + [parameter.detach().clone() for parameter in layer.experts.parameters()]


def run(layer, x, recompute=None):
    if recompute is None:
        return layer(x)
    state = layer.router.generator.get_state()

    def forward(x):
        layer.router.generator.set_state(state)  # the same choices in the second forward
        return layer(x)

    return torch.utils.checkpoint.checkpoint(forward, x, use_reentrant=recompute)


@on_ranks((1, 2, 4, 8), backend=BACKENDS, num_slots=(1, 3))
def test_training_has_the_bits_of_a_layer_without_copies(rank, num_ranks, num_slots, backend):
    plain = train(layer_of(rank, num_ranks, None, backend), rank)
    balance, plans = Balance(num_slots, cost=1), plans_of_copies()
    layer = layer_of(rank, num_ranks, balance, backend)
    if num_ranks > 1:
        for slots in balance.of_layer(layer.experts, layer.buffer).weights:
            slots.fill_(torch.nan)
    assert all(map(torch.equal, train(layer, rank), plain))
    assert len(plans) == (0 if num_ranks == 1 else 4) and all((each.plan.copies >= 0).any() for each in plans)
    balance.destroy()


class Skewed128(Skewed):
    hidden = 128


def wide_layer(rank, num_ranks, balance, backend, **settings):
    """A layer in bf16 whose matrices are signed permutations: each product of a row has the row's digits, so fp8 holds it."""
    torch.manual_seed(3)
    experts = GroupedExperts(NUM_EXPERTS // num_ranks, 128, 128, gated=False, activation=torch.relu, dtype=torch.bfloat16)
    with torch.no_grad():
        for parameter in experts.parameters():
            matrices = torch.zeros(NUM_EXPERTS, 128, 128)
            for matrix in matrices:
                matrix[torch.arange(128), torch.randperm(128)] = torch.randint(0, 2, (128,)) * 2.0 - 1
            parameter.copy_(matrices.chunk(num_ranks)[rank])
    experts.to(device_of(backend, rank))
    return MoELayer(Skewed128(rank), experts, num_max_tokens_per_rank=64, backend=backend, balance=balance, **settings)


@on_ranks(2, backend=BACKENDS)
def test_fp8_copies_have_the_bits_of_home(rank, num_ranks, backend):
    """Three micro-batches: one quantizes the weights in its passes, one keeps copies at home, and one uses those. Once also with bounds."""
    device, plans = device_of(backend, rank), plans_of_copies()

    def use(balance, **bounds):
        layer = wide_layer(rank, num_ranks, balance, backend, fp8=True, **bounds)
        experts = layer.experts
        for slots in () if balance is None else balance.of_layer(experts, layer.buffer).weights:
            slots.fill_(torch.nan)
        seen, generator = [], torch.Generator().manual_seed(rank)
        for is_first in (None, True, False):
            x, grad = (torch.randint(-2, 3, (30 + 9 * rank, 128), generator=generator).to(device, torch.bfloat16) for _ in range(2))
            y = layer(x.requires_grad_(), is_first_microbatch=is_first)
            y.backward(grad)
            seen += [y.detach(), x.grad]
        return [*seen, experts.up.grad, experts.down.grad]

    check_equal(use)
    check_equal(lambda balance: use(balance, **({} if balance is None else {"num_recv_rows": 1024})))
    assert len(plans) == 6 and all((each.plan.copies >= 0).any() for each in plans)


@on_ranks(4, backend=BACKENDS)
def test_plans_keep_rows_within_a_bound(rank, num_ranks, backend):
    """There is room for the mean of all ranks' rows, and most are for experts of rank 0. Hooks of experts see the rows of copies too."""
    num_rows = [sum(NUM_TOPK * len(tokens_of(each, step)) for each in range(num_ranks)) for step in range(2)]
    bound = -(-max(num_rows) // num_ranks)

    def use(balance, is_hooked, **options):
        layer = layer_of(rank, num_ranks, balance, backend, num_recv_rows=balance and bound)
        if is_hooked:
            layer.experts.register_forward_hook(lambda module, args, y: y * 2)
        with torch.inference_mode():
            evaluated = layer(tokens_of(rank, 1).to(layer.experts.up.device))
        return [evaluated, *train(layer, rank, num_steps=2, **options)]

    for is_hooked, options in ((False, {}), (False, {"recompute": True}), (True, {})):
        assert all(map(torch.equal, use(Balance(2), is_hooked, **options), use(None, is_hooked)))
    with pytest.raises(EPMismatchError, match="ranks disagree on num_recv_rows"):
        layer_of(rank, num_ranks, Balance(2), backend, num_recv_rows=bound + rank)(tokens_of(rank, 1).to(device_of(backend, rank)))
    layer = layer_of(rank, num_ranks, None, backend, num_recv_rows=bound)
    with pytest.raises(EPCapacityError, match="rank 0 would receive"):
        layer(tokens_of(rank, 1).to(layer.experts.up.device))
        layer.buffer.check()
    dist.barrier()


@pytest.mark.gpu
@on_ranks(2, bound=(None, 120))
def test_sums_by_lanes_have_the_bits_of_a_layer_without_copies(rank, num_ranks, bound):
    """It holds for random values: a row has the same products on each rank, and a token adds its rows in one order."""

    def use(balance):
        layer = wide_layer(rank, num_ranks, balance, "nvlink", sums="lanes", num_recv_rows=balance and bound)
        generator = torch.Generator().manual_seed(rank)
        with torch.no_grad():
            for values in (*layer.experts.parameters(), x := torch.empty(40, 128), grad := torch.empty(40, 128)):
                values.copy_(torch.randn(values.shape, generator=generator))
        x = x.to(layer.experts.up).requires_grad_()
        y = layer(x)
        y.backward(grad.to(y))
        return [y.detach(), x.grad]

    check_equal(use)


@pytest.mark.gpu
@on_ranks(2)
def test_bounded_rows_in_a_cuda_graph(rank, num_ranks):
    """A replay follows the tokens and choices that are in the graph's inputs, with plans of its own."""
    device = device_of("nvlink", rank)
    x, grad = (torch.zeros(40, 128, dtype=torch.bfloat16, device=device) for _ in range(2))
    idx, weights = torch.zeros(40, NUM_TOPK, dtype=torch.int64, device=device), torch.tensor([[1.0, 0.5]] * 40, device=device)
    layers = [wide_layer(rank, num_ranks, balance, "nvlink", num_recv_rows=balance and 120) for balance in (None, Balance(4, cost=1))]
    for layer in layers:
        layer.router.forward = lambda rows, mask=None: (idx, weights, None)

    def step(layer):
        rows = x.detach().requires_grad_()
        y = layer(rows)
        return [y, *torch.autograd.grad(y, [rows, layer.experts.up, layer.experts.down], grad)]

    def draw(seed):
        generator, shares = torch.Generator().manual_seed(10 * seed + rank), torch.exp2(-(torch.arange(NUM_EXPERTS) - 2.0 * seed).abs())
        idx.copy_(torch.multinomial(shares.expand(40, -1), NUM_TOPK, generator=generator))
        for values in (x, grad):
            values.copy_(torch.randint(-3, 4, values.shape, generator=generator))

    draw(0)
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        step(layers[1])
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        results = step(layers[1])
    for seed in range(4):
        draw(seed)
        graph.replay()
        assert all(map(torch.equal, results, step(layers[0]))), seed
    layers[1].buffer.check()
    torch.cuda.synchronize()


def check_equal(use):
    """`use` returns the same tensors of layers without and with copies, which it makes."""
    plain, balanced = use(None), use(Balance(2, cost=1))
    assert len(plain) == len(balanced) > 0 and all(map(torch.equal, balanced, plain))


def recomputed(make, rank, is_reentrant):
    """Recomputed layers replay their plans."""
    layer = make()
    return train(layer, rank, recompute=is_reentrant if layer._balance else None)


def shared(make, rank):
    """The first layer's weights are fetched again for its backward, as the second layer has used the memory."""
    first, second = make(), make()
    with torch.no_grad():
        second.experts.up.mul_(2)
    x = tokens_of(rank, 1).requires_grad_()
    second(first(x)).sum().backward()
    return [x.grad, *(parameter.grad for layer in (first, second) for parameter in layer.experts.parameters())]


def frozen(make, rank, *names):
    """Weights without gradients, and evaluation."""
    layer, x = make(), tokens_of(rank, 1).requires_grad_()
    for name in names:
        getattr(layer.experts, name).requires_grad_(False)
    with torch.inference_mode():
        evaluated = layer(x)
    layer(x).sum().backward()
    wanted = [x, *(parameter for parameter in layer.experts.parameters() if parameter.requires_grad)]
    evaluated = torch.cat([evaluated.flatten(), *(torch.autograd.grad(layer(x).sum(), each)[0].flatten() for each in wanted)])
    return [evaluated, x.grad, *(parameter.grad for parameter in layer.experts.parameters() if parameter.requires_grad)]


def hooked(make, rank, is_forward):
    """Hooks of experts see the rows of copies."""
    layer, x = make(), tokens_of(rank, 1).requires_grad_()
    if is_forward:
        layer.experts.register_forward_hook(lambda module, args, y: y * 2)
    else:
        layer.experts.register_full_backward_hook(lambda module, grads, of_outputs: (grads[0] * 2, *grads[1:]))
    layer(x).sum().backward()
    return [x.grad, *(parameter.grad for parameter in layer.experts.parameters())]


def one_checkpoint(make, rank):
    """Two layers in one checkpoint: hooks of weights run once, and a copied layer shares the memory."""
    first, seen = make(), []
    second, x = copy.deepcopy(first), tokens_of(rank, 1).requires_grad_()
    for seed, layer in enumerate((first, second)):
        layer.router.forward = lambda rows, mask=None, seed=seed: Skewed(rank, seed)(rows)
    parameters = [*first.experts.parameters(), *second.experts.parameters()]
    for parameter in parameters:
        parameter.register_hook(lambda grad: seen.append(1) or grad / 2)
    torch.utils.checkpoint.checkpoint(lambda x: second(first(x)), x, use_reentrant=False).sum().backward()
    return [x.grad, torch.tensor(len(seen)), *(parameter.grad for parameter in parameters)]


def autocast_and_compiled(make, rank):
    """Whole numbers are the same in bf16. A compiled layer runs outside of the graph."""
    layer, x = make(), tokens_of(rank, 1).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        layer(x).float().sum().backward()
    grads = [x.grad, *(parameter.grad for parameter in layer.experts.parameters())]
    return [*grads, torch.compile(layer, backend="eager")(tokens_of(rank, 2))]


@on_ranks(2)
def test_uses_of_layers(rank, num_ranks):
    uses = [(recomputed, True), (recomputed, False), (shared,), (frozen,), (frozen, "up"), (frozen, "down"), (frozen, "up", "down")]
    for use, *options in (*uses, (hooked, True), (hooked, False), (one_checkpoint,), (autocast_and_compiled,)):
        check_equal(lambda balance: use(partial(layer_of, rank, num_ranks, balance), rank, *options))  # noqa: B023


@on_ranks(2, backend=BACKENDS, where=("router", "copies", "backward"))
def test_peers_learn_of_a_failure(rank, num_ranks, where, backend):
    calls, failing = [], 1 if where == "copies" else 0  # rank 0 has the hot experts, rank 1 their copies

    def fail(*_):
        raise ValueError("broken here")

    def activation(rows):
        y = torch.relu(rows)
        calls.append(1)
        if rank == failing and where == "copies" and len(calls) == 2:  # behind the rows at home
            fail()
        if rank == failing and where == "backward" and y.requires_grad:
            y.register_hook(fail)
        return y

    bound = 200 if where == "copies" else None
    layer = layer_of(rank, num_ranks, Balance(2, cost=1), backend, activation, num_recv_rows=bound)
    if rank == failing and where == "router":
        layer.router.forward = fail
    begin = time.monotonic()
    with pytest.raises(
        ValueError if rank == failing else EPPeerError, match="failed" if rank != failing and where == "backward" else "broken here"
    ):
        y = layer(tokens_of(rank, 1).to(layer.experts.up.device).requires_grad_())
        if where != "backward":
            look(layer.buffer)
        y.sum().backward()
        look(layer.buffer)
    assert time.monotonic() - begin < 30
    dist.barrier()  # until here the failing rank lives: a thread of autograd drops the pass that failed, which refuses the call


@on_ranks(2)
def test_by_hand(rank, num_ranks):
    """Rank 0 sends 4 tokens to expert 0, which is at home there. Rank 1 computes half of them."""
    balance = Balance(1, cost=1)
    experts = GroupedExperts(1, 8, 8, gated=False, activation=torch.relu)
    router = Router(8, 2, 1)
    router.forward = lambda rows, mask=None: (torch.zeros(len(rows), 1, dtype=torch.int64), torch.ones(len(rows), 1), None)
    layer = MoELayer(router, experts, num_max_tokens_per_rank=8, backend="shm", balance=balance)
    with torch.no_grad():
        experts.up.copy_(torch.eye(8)[None] * (rank + 1)), experts.down.copy_(torch.eye(8)[None])
    copies = balance.of_layer(experts, layer.buffer)
    _, out, planned = layer._dispatch(torch.ones(4 - 4 * rank, 8), None, copies)
    plan = planned.plan
    assert plan.copies.tolist() == [[-1], [0]] and plan.rows.tolist() == [[0], [2]]
    assert out.handle.num_rows_per_expert_list == [[2, 0], [0, 2]][rank]
    y = planned.fetch_in_backward(layer._combine(layer._run_experts(out, None, planned), None, out, planned))
    y.sum().backward()
    assert torch.equal(y, torch.ones(4 - 4 * rank, 8))
    assert torch.equal(experts.down.grad, torch.full((1, 8, 8), 4.0 * (1 - rank)))


@on_ranks(2)
def test_metrics_count_rows_where_they_are_computed(rank, num_ranks):
    """The busiest rank's load without copies is most of all rows; with a copy of each hot expert ranks differ by little."""
    loads = []
    for balance in (None, Balance(2, cost=1)):
        layer = layer_of(rank, num_ranks, balance)
        metrics = Metrics(layer)
        layer(tokens_of(rank, 1))
        loads.append(metrics.take()[0].max_rank_overload)
    assert loads[0] > 1.5 > 1.1 > loads[1]


@on_ranks(2)
def test_refusals(rank, num_ranks):
    with pytest.raises(ValueError, match="num_slots is 33; it must be at most 32"):
        Balance(33)
    with pytest.raises(ValueError, match="num_slots"):
        Balance(0)
    with pytest.raises(TypeError, match=r"balance is 4; pass deepep_moe.nn.Balance"):
        layer_of(rank, num_ranks, 4)
    balance = Balance(1)
    with pytest.raises(ValueError, match="GroupedExperts without biases"):
        MoELayer(Skewed(rank), LocalExperts([torch.nn.Identity()]), num_max_tokens_per_rank=8, backend="shm", balance=balance)
    layer_of(rank, num_ranks, balance)(tokens_of(rank, 1))
    for other, plan, message in (
        (GroupedExperts(NUM_EXPERTS // num_ranks, HIDDEN, 2 * INNER, gated=False), balance, "other experts"),
        (GroupedExperts(NUM_EXPERTS // num_ranks, HIDDEN, INNER, gated=False).double(), Balance(1), "2, torch.float64"),
    ):
        layer = MoELayer(Skewed(rank), other, num_max_tokens_per_rank=64, backend="shm", balance=plan)
        with pytest.raises(ValueError, match=message):
            layer(tokens_of(rank, 1).to(other.up.dtype))
    buffer = Buffer(None, 8, HIDDEN, NUM_EXPERTS, NUM_TOPK, backend="shm")
    with pytest.raises(ValueError, match="the buffer was made for"):
        MoELayer(Skewed(rank), GroupedExperts(NUM_EXPERTS // num_ranks, HIDDEN, INNER), buffer=buffer, balance=balance)
    dist.barrier()
