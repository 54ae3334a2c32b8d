"""Calls under watchers: tracers, transforms, forward-mode AD, modes, recomputation. Each call is right for them, or refused before
it is entered, and then the peers hear of it."""

import contextlib
import itertools
from functools import partial

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from error_cases import HIDDEN, IDX, NUM_EXPERTS, WEIGHTS, Wrapped, X, imaginary, make_buffer, negative
from exchange_cases import on_device
from fault_cases import outcome
from on_ranks import on_ranks, refused
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from deepep_moe import LowLatencyBuffer, library, ops
from deepep_moe.compat.deep_ep.widths import combine_with_lanes
from deepep_moe.errors import EPPeerError
from deepep_moe.exchange.by_expert import combine_by_expert, dispatch_by_expert
from deepep_moe.ops.lanes import LanesOfMap

LOGITS = torch.randn(4, NUM_EXPERTS, generator=torch.Generator().manual_seed(0))


# ---- tensors with a tangent of forward-mode AD; lazy negatives, whose values are not those of their memory; no plain tensors ----


def dual(tensor):
    return forward_ad.make_dual(tensor, torch.ones_like(tensor))


class Wrapper(Wrapped):
    """A tensor whose operations fail."""

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise TypeError(f"no rule for {func}")


def distributed(tensor):
    return DTensor.from_local(tensor, DeviceMesh("cpu", [0, 1], _init_backend=False), run_check=False)


def fake(tensor):
    with FakeTensorMode():
        return torch.empty(tensor.shape, dtype=tensor.dtype)


STRANGE = {  # how one is made of a plain tensor, and how it is refused
    "dual": (dual, NotImplementedError, "has a tangent of forward-mode AD"),
    "imaginary": (imaginary, ValueError, r"is a lazy negative .*resolve_neg\(\)"),
    "negative": (negative, ValueError, r"is a lazy negative .*resolve_neg\(\)"),
}
NOT_PLAIN = {
    "distributed": (distributed, TypeError, r"x is a DTensor; pass x.to_local\(\)"),
    "fake": (fake, TypeError, "x is a FakeTensor, which has no data; it must be a torch.Tensor with data"),
    "nested": (lambda x: torch.nested.nested_tensor([x, x]), TypeError, r"x is a nested tensor; it must be dense: pass x.values\(\)"),
    "jagged": (lambda x: torch.nested.nested_tensor([x, x], layout=torch.jagged), TypeError, "x is a nested tensor; it must be dense"),
    "sparse": (torch.Tensor.to_sparse, TypeError, r"x has layout torch.sparse_coo; it must be dense: pass x.to_dense\(\)"),
    "wrapper": (Wrapper, TypeError, "no rule for|x is a Wrapper, which wraps other tensors; it must be a plain torch.Tensor"),
}  # fmt: skip


def exchange_calls(buffer, x, idx, weights):
    """Calls of an exchange, and the tensor that may be strange in each. The last two read a lazy negative."""
    out = buffer.dispatch(x, idx, weights)
    rows, row_weights = out.recv_x.clone(), out.recv_topk_weights.clone()
    by_expert, sent, handle = dispatch_by_expert(buffer, x, idx, weights)
    return [
        (x, lambda x: buffer.dispatch(x, idx, weights)),
        (x.clone().requires_grad_(), lambda x: buffer.dispatch(x, idx, weights)),
        (x, lambda x: buffer.dispatch(x, idx, async_op=True)),
        (weights, lambda weights: buffer.dispatch(x, idx, weights)),
        (x, lambda x: buffer.dispatch(x, handle=out.handle)),
        (weights, lambda weights: buffer.dispatch(x, handle=out.handle, topk_weights=weights)),
        (rows, lambda rows: buffer.combine(rows, out.handle)),
        (row_weights, lambda weights: buffer.combine(rows, out.handle, weights)),
        (x, lambda bias: buffer.combine(rows, out.handle, bias=bias)),
        (row_weights, lambda lanes: combine_with_lanes(buffer, rows, out.handle, lanes)),
        (x, lambda x: dispatch_by_expert(buffer, x, idx, weights)),
        (by_expert[0], lambda first: combine_by_expert(buffer, [first, *by_expert[1:]], sent, handle)),
        (x, lambda x: buffer.dispatch(x, idx, fp8=True)),
    ]


def refuse_strange(rank, culprit, calls, kind):
    make_strange, error, message = (STRANGE | NOT_PLAIN)[kind]
    with forward_ad.dual_level() if kind == "dual" else contextlib.nullcontext():
        for tensor, call in calls:
            with refused(rank, culprit, error, message):
                call(make_strange(tensor) if rank == culprit else tensor)


@on_ranks(2, backend=("shm", "collective"), kind=(*STRANGE, *NOT_PLAIN))
def test_strange_tensors(rank, backend, kind):
    buffer = make_buffer(backend)
    calls = exchange_calls(buffer, X, IDX, WEIGHTS)
    refuse_strange(rank, 1, calls if kind == "dual" else calls[:-2] if kind in STRANGE else (calls[0], calls[4], calls[6]), kind)
    with forward_ad.dual_level():
        received = buffer.dispatch(X, IDX).recv_x  # nobody is dual here
        assert forward_ad.unpack_dual(received).tangent is None
    assert torch.equal(buffer.dispatch(negative(X).resolve_neg(), IDX).recv_x, received)


@pytest.mark.gpu
@on_ranks(1, kind=STRANGE)
def test_strange_tensors_on_a_gpu(rank, kind):
    """Calls in C++ leave them to Python, which refuses them."""
    x, idx, weights, logits = on_device("nvlink", rank, X, IDX, WEIGHTS, LOGITS)
    buffer, low_latency = make_buffer("nvlink"), LowLatencyBuffer(None, 8, HIDDEN, NUM_EXPERTS, 2, backend="nvlink", timeout_s=60)
    calls = [(logits, lambda logits: ops.gate(logits, 2)), (x, lambda x: low_latency.dispatch(x, idx))]
    calls += [*exchange_calls(buffer, x, idx, weights), (x, ops.quantize_fp8)]
    refuse_strange(rank, 0, calls if kind == "dual" else calls[:-3], kind)
    with Watch() as seen:
        ops.gate(logits, 2)
        buffer.dispatch(x, idx)
    assert {"deepep_moe.gate.default", "deepep_moe.dispatch.default"} <= set(seen.names)


@on_ranks(2, kind=(*STRANGE, *NOT_PLAIN))
def test_strange_tensors_in_low_latency(rank, kind):
    buffer = LowLatencyBuffer(None, 8, HIDDEN, NUM_EXPERTS, 2, timeout_s=60)
    out = buffer.dispatch(X, IDX, WEIGHTS)
    rows = out.recv_x.nan_to_num()
    calls = [
        (X, lambda x: buffer.dispatch(x, IDX)),
        (WEIGHTS, lambda weights: buffer.dispatch(X, IDX, weights)),
        (rows, lambda rows: buffer.combine(rows, out.handle)),
        (WEIGHTS, lambda weights: buffer.combine(rows, out.handle, topk_weights=weights)),
    ]
    refuse_strange(rank, 1, calls if kind in STRANGE else (calls[0], calls[2]), kind)
    assert torch.equal(buffer.dispatch(X, IDX).num_recv_tokens_per_expert, out.num_recv_tokens_per_expert), "all are in step"


@pytest.mark.parametrize("kind", STRANGE)
def test_strange_tensors_of_operations(kind):
    calls = [
        (LOGITS, lambda logits: ops.gate(logits, 2)),
        (torch.ones(NUM_EXPERTS), lambda bias: ops.gate(LOGITS, 2, expert_bias=bias)),
        (LOGITS, lambda logits: ops.gate_full(logits, 2, shares=True)),
    ]
    x, w1, w2 = torch.randn(4, 8), torch.randn(2, 8, 8), torch.randn(2, 8, 4)
    if kind == "dual":  # what is made of PyTorch's operators reads the others
        calls += [
            (X, ops.quantize_fp8),
            (x, lambda x: ops.grouped_mlp(x, [2, 2], w1, w2)),
            (w1, lambda w1: ops.grouped_mlp(x, [2, 2], w1, w2)),
            (x, lambda x: ops.clear_tail(x, [1, 2])),
        ]
    refuse_strange(0, 0, calls, kind)
    with forward_ad.dual_level():
        probs, _ = ops.to_dense(IDX, dual(WEIGHTS), NUM_EXPERTS)  # made of PyTorch's operators, which have rules
        assert torch.equal(forward_ad.unpack_dual(probs).tangent, (probs > 0).float())


# ---- transforms ----


def weighted(logits):
    weights = ops.gate(logits, 2).topk_weights
    return (weights * torch.tensor([1.0, 2.0])).sum()


def test_transforms_of_the_gate():
    for transform in (torch.func.grad(weighted), partial(torch.func.vjp, weighted), torch.func.jacrev(weighted)):
        with pytest.raises(TypeError, match=r"gate cannot be transformed by torch.func .*; use torch.autograd.grad or backward"):
            transform(LOGITS)
    for transform in (partial(torch.func.jvp, weighted, (LOGITS,)), torch.func.jacfwd(weighted)):
        with pytest.raises(NotImplementedError, match="tangent"):
            transform((LOGITS,)) if isinstance(transform, partial) else transform(LOGITS)
    both = torch.stack([LOGITS, -LOGITS]).requires_grad_()
    torch.func.vmap(weighted)(both).sum().backward()
    for grad, logits in zip(both.grad, (LOGITS, -LOGITS), strict=True):
        alone = logits.clone().requires_grad_()
        assert torch.equal(grad, torch.autograd.grad(weighted(alone), alone)[0])
    with pytest.raises(TypeError, match="cannot be transformed by .* is_grads_batched"):
        torch.autograd.functional.jacobian(lambda logits: ops.gate(logits, 2).topk_weights, LOGITS, vectorize=True)


@on_ranks(2, backend=("shm", "collective"))
def test_transforms_of_the_exchange(rank, backend):
    buffer, text = make_buffer(backend), "cannot be transformed by torch.func"

    def loss(x):
        return buffer.dispatch(x, IDX).recv_x.sum()

    for call in (torch.func.grad(loss), lambda x: torch.func.jvp(loss, (x,), (x,)), torch.func.vmap(loss)):
        with refused(rank, 1, TypeError, text):
            (call if rank == 1 else loss)(X)
    x = X.clone().requires_grad_()
    rows = buffer.dispatch(x, IDX).recv_x
    batch = torch.ones(2, *rows.shape)
    with refused(rank, 1, TypeError, text):
        torch.autograd.grad(rows, x, batch if rank == 1 else batch[0], is_grads_batched=rank == 1, retain_graph=True)
    assert torch.autograd.grad(rows.sum(), x)[0].shape == X.shape


# ---- modes and tracers ----


class Named:
    """The operators that a mode has seen."""

    def __init__(self):
        super().__init__()
        self.names = []


class Watch(Named, TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


class WatchFunctions(Named, TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.names.append(f"{func}.default")
        return func(*args, **(kwargs or {}))


def layer(buffer, x, weights):
    out = buffer.dispatch(x, IDX, weights)
    return buffer.combine(out.recv_x * 2, out.handle, out.recv_topk_weights)


@on_ranks(2, backend=("shm", "collective"))
def test_modes(rank, backend):
    """One rank watches. It has the same sums, and sees operators, not what is in them."""
    buffer = make_buffer(backend)
    expected = layer(buffer, X, WEIGHTS)
    rows, weights, handle = dispatch_by_expert(buffer, X, IDX, WEIGHTS)
    for mode in (Watch(), WatchFunctions()):
        with mode if rank == 1 else torch.no_grad():
            assert torch.equal(layer(buffer, X, WEIGHTS), expected)
            again, _, _ = dispatch_by_expert(buffer, X, IDX, WEIGHTS)
            combine_by_expert(buffer, rows, weights, handle)
            ops.gate(LOGITS, 2)
            buffer.layout(IDX)
        assert all(map(torch.equal, again, rows))
        if rank == 1:
            names = [name for name in mode.names if "deepep_moe" in name]
            calls = ("dispatch", "combine", "dispatch", "combine", "gate", "layout")
            assert names == [f"deepep_moe.{name}.default" for name in calls], mode.names
            assert not [name for name in mode.names if "zeros" in name or "empty" in name], mode.names


@pytest.mark.parametrize("pre_dispatch", (False, True))
@pytest.mark.parametrize("tracing_mode", ("real", "symbolic"))
def test_graphs_repeat_calls(tracing_mode, pre_dispatch):
    buffer, low_latency = make_buffer(), LowLatencyBuffer(None, 8, HIDDEN, NUM_EXPERTS, 2)
    trace = partial(make_fx, tracing_mode=tracing_mode, pre_dispatch=pre_dispatch)
    graph = trace(lambda x, idx: buffer.combine((out := buffer.dispatch(x, idx)).recv_x * 2, out.handle))(X, IDX)
    assert torch.equal(graph(-X, IDX.flip(0)), -2 * X * (IDX.flip(0) >= 0).sum(1, keepdim=True))
    for function, example in (
        (lambda logits: ops.gate(logits, 2).topk_idx, LOGITS),
        (lambda idx: buffer.layout(idx).num_tokens_per_expert, IDX),
        (lambda x: ops.quantize_fp8(x)[1], X),
        (lambda routing_map: LanesOfMap.apply(routing_map, routing_map.float(), 2)[0], LOGITS.median(1, keepdim=True).values < LOGITS),
    ):
        other = example.flip(0)
        assert torch.equal(trace(function)(example)(other), function(other))
    with pytest.raises(NotImplementedError, match="low-latency calls cannot be recorded in a graph"):
        trace(lambda x: low_latency.dispatch(x, IDX).recv_x)(X)


def test_torch_jit_trace():
    buffer, low_latency = make_buffer(), LowLatencyBuffer(None, 8, HIDDEN, NUM_EXPERTS, 2)
    trace = partial(torch.jit.trace, check_trace=False)
    for call in (lambda x: buffer.dispatch(x, IDX).recv_x, lambda x: low_latency.dispatch(x, IDX).recv_x):
        with pytest.raises(NotImplementedError, match="cannot be recorded in a graph"):
            trace(call, (X,))
    gate = trace(lambda logits: ops.gate(logits, 2).topk_idx, (LOGITS,))
    assert torch.equal(gate(-LOGITS), ops.gate(-LOGITS, 2).topk_idx)


@on_ranks(2, backend=("shm", "collective"))
def test_dry_runs_make_no_call(rank, num_ranks, backend):
    """Memory estimators run a layer for its shapes, on one rank. Where nothing depends on data they have them, and no peer hears of it."""
    buffer = make_buffer(backend)
    before = buffer.num_calls
    if rank == 1:
        with FakeTensorMode():
            x, idx, weights = torch.empty(4, HIDDEN), torch.empty(4, 2, dtype=torch.int64), torch.empty(4, 2)
            for layout in ("rank", "expert"):
                out = buffer.dispatch(x, idx, weights, layout=layout, num_recv_rows=40)
                assert out.recv_x.shape == (40, HIDDEN)
                assert buffer.combine(out.recv_x, out.handle).shape == x.shape
            assert ops.gate(torch.empty(4, NUM_EXPERTS), 2).topk_idx.shape == (4, 2)
            assert buffer.layout(idx).is_token_in_rank.shape == (4, num_ranks)
            error, _ = outcome(lambda: buffer.dispatch(x, idx))
            assert "DynamicOutputShape" in type(error).__name__, repr(error)
    assert buffer.num_calls == before
    layer(buffer, X, WEIGHTS)


@pytest.mark.parametrize("can_mark", sorted({False, library._CAN_MARK}))
def test_untraced_functions_run_between_graphs(can_mark, monkeypatch):
    monkeypatch.setattr(library, "_CAN_MARK", can_mark)
    graphs, double = [], library.untraced(lambda x: x * (1 if torch.compiler.is_compiling() else 2))
    compiled = torch.compile(lambda x: double(x.sin()).cos(), backend=lambda graph, _: graphs.append(graph) or graph.forward)
    for x in torch.randn(3, 8):
        assert torch.equal(compiled(x), (2 * x.sin()).cos())
    assert len(graphs) == 2


@pytest.mark.parametrize("is_captured", (False, True), ids=["default", "captured"])
@pytest.mark.parametrize("fullgraph", (False, True), ids=["parts", "whole"])
def test_layout_is_compiled(fullgraph, is_captured):
    buffer = make_buffer()
    torch._dynamo.reset()

    def count(idx):
        layout = buffer.layout(idx)
        return layout.num_tokens_per_expert * 2, layout.is_token_in_rank

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=is_captured):
        compiled = torch.compile(count, backend="aot_eager", fullgraph=fullgraph)
        for idx in (IDX, IDX.flip(0), IDX[:3]):
            assert all(map(torch.equal, compiled(idx), count(idx)))
        with pytest.raises(ValueError, match=r"topk_idx\[0, 1\] is 9"):
            compiled(torch.tensor([[0, 9]]))


# ---- recomputation ----


class EndsEarly(BaseException):
    """The exception by which some other checkpointing ends a recomputation."""


class Recomputed(torch.autograd.Function):
    """Runs `function` again in the backward, which goes on or ends where that ends early, and hands gradients on."""

    @staticmethod
    def forward(ctx, x, function, goes_on):
        ctx.function, ctx.goes_on = function, goes_on
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        with contextlib.suppress(EndsEarly) if ctx.goes_on else contextlib.nullcontext():
            ctx.function()
        return grad, None, None


class Ends(TorchDispatchMode):
    """Ends what runs at the first operator of this library."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if "deepep_moe" in str(func):
            raise EndsEarly
        return func(*args, **(kwargs or {}))


@on_ranks(2, backend=("shm", "collective"))
def test_what_ends_a_recomputation(rank, backend):
    """An exception that ends a recomputation is a failure only if it also ends the backward."""
    buffer = make_buffer(backend)

    def repeat():
        with Ends():
            buffer.dispatch(X, IDX)

    x = X.clone().requires_grad_()
    y = layer(buffer, x, WEIGHTS)
    before = buffer.num_calls
    (Recomputed.apply(y, repeat, True) if rank == 1 else y).sum().backward()
    assert buffer.num_calls == before + 2
    y = layer(buffer, X.clone().requires_grad_(), WEIGHTS)
    error, _ = outcome(lambda: (Recomputed.apply(y, repeat, False) if rank == 1 else y).sum().backward())
    if rank == 1:
        assert type(error) is EndsEarly
    else:
        assert type(error) is EPPeerError and error.rank == 1 and error.cause == "EndsEarly", repr(error)
    layer(buffer, X, WEIGHTS)


SAVED = {torch.ops.deepep_moe.dispatch.default, torch.ops.deepep_moe.combine.default}


def save_exchange(_context, operator, *_, **__):
    return CheckpointPolicy.MUST_SAVE if operator in SAVED else CheckpointPolicy.PREFER_RECOMPUTE


@on_ranks(2, backend=("shm", "collective"))
def test_checkpointing(rank, backend):
    """The recomputation makes no second exchange. One rank keeps something behind the combine, so its recomputation ends later."""
    buffer = make_buffer(backend)

    def block(has_tail, x, weights):
        y = layer(buffer, torch.tanh(x), weights)
        return y * y if has_tail else y

    for has_tail, early_stop in itertools.product((False, rank == 1), (True, False)):
        results = []
        for contexts in (None, partial(create_selective_checkpoint_contexts, save_exchange)):
            leaves = X.clone().requires_grad_(), WEIGHTS.clone().requires_grad_()
            before = buffer.num_calls
            if contexts is None:
                y = block(has_tail, *leaves)
            else:
                with torch.utils.checkpoint.set_checkpoint_early_stop(early_stop):
                    y = checkpoint(partial(block, has_tail), *leaves, use_reentrant=False, context_fn=contexts)
            y.sum().backward()
            assert buffer.num_calls - before == 4, (has_tail, early_stop)
            results.append([leaf.grad for leaf in leaves])
        assert all(map(torch.equal, *results))

    # Checkpoints in a checkpoint.
    run = partial(checkpoint, use_reentrant=False)
    results = []
    for call in (lambda x: layer(buffer, x.sin(), WEIGHTS), lambda x: run(lambda x: run(lambda x: layer(buffer, x.sin(), WEIGHTS), x), x)):
        x = X.clone().requires_grad_()
        results.append(torch.autograd.grad(call(x).square().sum(), x)[0])
    assert torch.equal(*results)


# ---- gradients of gradients ----


def test_second_order_of_lanes():
    """The backward of dense routing in lanes is differentiable itself."""
    routing_map = torch.tensor([[True, False, True], [False, True, False]])
    probs = torch.tensor([[0.5, 0.25, 2.0], [1.0, 3.0, 4.0]], requires_grad=True)
    lanes = LanesOfMap.apply(routing_map, probs, 2)[1]
    (grad,) = torch.autograd.grad(lanes.pow(3).sum(), probs, create_graph=True)
    grad.sum().backward()
    assert torch.equal(probs.grad, torch.where(routing_map, 6 * probs.detach(), 0.0))


def test_second_order_of_a_cleared_tail():
    values = torch.ones(3, 2, requires_grad=True)
    (grad,) = torch.autograd.grad(ops.clear_tail(values, [1, 1]).pow(3).sum(), values, create_graph=True)
    grad.sum().backward()
    assert values.grad.tolist() == [[6.0, 6.0], [6.0, 6.0], [0.0, 0.0]]
