"""Gradients of dispatch and combine against the reference, the operators under torch.compile, and gradients that are lazy."""

import contextlib
import itertools

import pytest
import torch
from error_cases import IDX, WEIGHTS, X, imaginary, make_buffer, negative
from exchange_cases import BACKENDS, Case, assert_all_same, assert_same, device_of, inputs_of, modes_of_calls, on_device, opened
from on_ranks import on_ranks
from scripts import run_python
from torch.utils.flop_counter import FlopCounterMode

from deepep_moe import Buffer, ops, reference
from deepep_moe.exchange.by_expert import combine_by_expert, dispatch_by_expert
from deepep_moe.ops.lanes import LanesOfMap
from deepep_moe.testing import run_ranks

LAYOUTS = ("expert", "rank")


SUMS = {
    "expert": {},
    "rank": {"layout": "rank"},
    "lanes": {"sums": "lanes"},
    "lanes_fma": {"sums": "lanes_fma"},
    "nodes": {"ranks_per_node": 2},
}
PLACES = [
    *itertools.product(("shm", "collective"), SUMS),
    *(pytest.param("nvlink", kind, marks=pytest.mark.gpu) for kind in SUMS if kind != "nodes"),
    pytest.param("nvshmem", "nodes", marks=pytest.mark.gpu),
]


@pytest.mark.parametrize(("backend", "kind"), PLACES)
@on_ranks(4, dtype=(torch.float32, torch.bfloat16))
def test_gradients_equal_reference(rank, num_ranks, backend, kind, dtype):
    """Every gradient has an exact definition in terms of the reference's dispatch and combine. So those of sums by lanes are the same on
    any number of ranks, and those of a dispatch are sums node by node."""
    num_topk = 3 if dtype == torch.float32 else 4  # four fp32 are whole pieces of 16 bytes
    case = Case([7, 0, 12, 9], num_topk=num_topk, dtype=dtype, pattern="masked", expert_alignment=2, **SUMS[kind])
    layout, sums = case.layout, {"sums": case.sums, "ranks_per_node": case.ranks_per_node}
    xs, idxs, weights = inputs_of(case)
    received = reference.dispatch(xs, idxs, weights, case.num_experts, layout=layout, expert_alignment=2)

    def draw(shape, r, offset):
        return torch.randn(shape, generator=torch.Generator().manual_seed(100 * offset + r))

    buffer, x, idx, weight = opened(case, backend, rank)
    x.requires_grad_()
    weight.requires_grad_()
    out = buffer.dispatch(x, idx, weight, layout=layout, expert_alignment=2)

    # dispatch: gradients come back by combine
    row_grads = [draw(there.recv_x.shape, r, 1).to(dtype) for r, there in enumerate(received)]
    weight_grads = [draw(there.recv_topk_weights.shape, r, 2) for r, there in enumerate(received)]
    torch.autograd.backward([out.recv_x, out.recv_topk_weights], on_device(backend, rank, row_grads[rank], weight_grads[rank]))
    assert_same("x.grad", x.grad, reference.combine(row_grads, received, case.num_tokens, **sums)[rank])
    if kind == "nodes" and dtype == torch.bfloat16 and rank == 2:
        at_once = reference.combine(row_grads, received, case.num_tokens)[rank]
        assert not torch.equal(x.grad.cpu(), at_once), "nodes make no difference in this case"
    assert_same("topk_weights.grad", weight.grad, reference.combine_lane_values(weight_grads, received, idxs)[rank])

    # combine: gradients go out by dispatch, and to the weights as inner products
    drawn = (draw(out.recv_x.shape, rank, 3).to(dtype), draw(out.recv_x.shape[:1], rank, 4), draw(x.shape, rank, 5).to(dtype))
    rows, row_weights, bias = (tensor.requires_grad_() for tensor in on_device(backend, rank, *drawn))
    grads = [draw(x.shape, r, 6).to(dtype) for r, x in enumerate(xs)]
    (grad,) = on_device(backend, rank, grads[rank])
    buffer.combine(rows, out.handle, row_weights, bias=bias).backward(grad)
    sent = reference.dispatch(grads, idxs, None, case.num_experts, layout=layout, expert_alignment=2)[rank].recv_x
    assert_same("rows.grad", rows.grad, (row_weights.detach().cpu()[:, None] * sent.float()).to(dtype))
    torch.testing.assert_close(row_weights.grad.cpu(), (sent.float() * rows.detach().cpu().float()).sum(1))
    assert_same("bias.grad", bias.grad, grads[rank])
    rows.grad = None
    buffer.combine(rows, out.handle).backward(grad)
    assert_same("rows.grad, unweighted", rows.grad, sent)


@on_ranks(2, backend=BACKENDS, sums=("ranks", "lanes"))
def test_asynchronous_calls_have_gradients(rank, backend, sums):
    """The sum of lanes on the buffer's thread is no part of autograd, and may end after an inference mode."""
    buffer, *inputs = opened(Case([9, 4], sums=sums), backend, rank)
    columns = torch.arange(buffer.hidden, device=inputs[0].device)

    def ended(output, how):
        if not how:
            return output
        y, done = output
        done() if "return_hook" in how else done.wait()
        return y

    def step(**how):
        x, idx, weight = (tensor.clone() for tensor in inputs)
        leaves = x.requires_grad_(), weight.requires_grad_(), torch.ones_like(x).requires_grad_()
        out = buffer.dispatch(x, idx, weight, **how)
        if how:
            (out.hook or out.event.wait)()
        y = ended(buffer.combine(out.recv_x * 1.5, out.handle, out.recv_topk_weights, bias=leaves[2], **how), how)
        gradients = torch.autograd.grad((y * columns).sum(), leaves)
        with torch.inference_mode():
            again = buffer.combine(out.recv_x.detach(), out.handle, **how)
        return y.detach(), *gradients, ended(again, how).clone()

    for mode, num_sms in itertools.product(("async_op", "return_hook"), (None, 0) if sums == "ranks" else (None,)):
        assert_all_same(f"with {mode}, num_sms {num_sms}", step(**{mode: True, "num_sms": num_sms}), step())


@on_ranks(2, layout=LAYOUTS)
def test_second_order(rank, layout):
    """The backward operators are differentiable themselves."""
    buffer, x, idx, weights = opened(Case([5, 4]), "shm", rank)
    x.requires_grad_()
    out = buffer.dispatch(x, idx, weights, layout=layout)
    (grad,) = torch.autograd.grad(out.recv_x.pow(3).sum(), x, create_graph=True)
    grad.sum().backward()
    copies = (idx >= 0).sum(1) if layout == "expert" else buffer.layout(idx).is_token_in_rank.sum(1)
    torch.testing.assert_close(x.grad, 6 * x.detach() * copies[:, None])


KINDS = {  # of a case, and of its dispatch
    "expert": ({}, {}),
    "rank": ({"layout": "rank"}, {}),
    "lanes": ({"sums": "lanes"}, {}),
    "bounded": ({}, {"num_recv_rows": 64}),
}


def compiled(rank, num_ranks, backend, compiler, kind):
    settings, bound = KINDS[kind]
    case = Case([6, 7], num_experts=4, num_topk=2, hidden=16, ranks_per_node=1 if backend == "nvshmem" else num_ranks, **settings)
    buffer, x, idx, weights = opened(case, backend, rank)
    (matrix,) = on_device(backend, rank, torch.randn(16, 16, generator=torch.Generator().manual_seed(0)))

    def layer(x, weights, matrix):
        out = buffer.dispatch(x, idx, weights, layout=case.layout, expert_alignment=2, **bound)
        y = torch.nn.functional.silu(out.recv_x @ matrix)
        row_weights = out.recv_topk_weights if case.layout == "expert" else out.recv_topk_weights.sum(1)
        again = buffer.dispatch(x, handle=out.handle)
        return buffer.combine(y + again.recv_x, out.handle, row_weights, bias=x)

    torch._dynamo.config.capture_dynamic_output_shape_ops = not bound  # as docs/guide.md says; newer versions need no word
    results = []
    for call in (layer, torch.compile(layer, fullgraph=True, backend=compiler)):
        leaves = [tensor.clone().requires_grad_() for tensor in (x, weights, matrix)]
        y = call(*leaves)
        y.square().sum().backward()
        results.append([y.detach(), *(leaf.grad for leaf in leaves)])
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-4)


@on_ranks(2, backend=("shm", "collective", *(pytest.param(name, marks=pytest.mark.gpu) for name in ("nvlink", "nvshmem"))))
def test_compile_traces_a_layer(rank, num_ranks, backend):
    """Where the number of rows is bounded, no shape is dynamic."""
    for kind in KINDS:
        torch._dynamo.reset()
        compiled(rank, num_ranks, backend, "aot_eager", kind)


@pytest.mark.gpu
def test_operators_save_no_copies():
    """A backward keeps the routing, the call's numbers and the whole memory of the handle, not parts of it."""
    case = Case([6], num_experts=4, num_topk=2, hidden=16)
    buffer, x, idx, _ = opened(case, "nvlink", 0)
    x, saved = x.requires_grad_(), []

    def layer(x):
        out = buffer.dispatch(x * 2, idx, num_recv_rows=16)
        return buffer.combine(out.recv_x * 2, out.handle)

    native = buffer.calls.native
    shapes = {(6, 2), (native.num_handle_numbers,), (native.num_handle_ints(6, True),)}
    for run, mode in (
        (torch.compile(layer, fullgraph=True, backend="aot_eager"), contextlib.nullcontext()),
        (layer, FlopCounterMode(display=False)),
    ):
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor), mode:
            y = run(x)
        (grad,) = torch.autograd.grad(y.sum(), x)
        assert torch.equal(grad, 4.0 * (idx >= 0).sum(1, keepdim=True).expand_as(x))
        assert {tuple(tensor.shape) for tensor in saved if not tensor.is_floating_point()} == shapes
        saved.clear()


def test_import_in_inference_mode():
    """The tensors that a backward saves are made then too."""
    line = "from deepep_moe.exchange.operators import _NO_MEMORY"
    code = f"import torch\nwith torch.inference_mode():\n    {line}\nassert not _NO_MEMORY.is_inference()"
    run_python("-c", code)


@pytest.mark.slow
def test_compile_with_inductor():
    run_ranks(compiled, 2, "shm", "inductor", "expert")


@pytest.mark.parametrize("is_compiled", [False, True], ids=["eager", "compiled"])
def test_num_sms_reaches_the_backend(is_compiled):
    """`num_sms` of a call holds for this call, in a compiled function too; gradients go by the buffer's."""
    buffer = Buffer(None, 8, 8, 4, 2, num_sms=9)
    modes, idx = modes_of_calls(buffer), torch.tensor([[0, 1], [2, -1]])

    def layer(x):
        out = buffer.dispatch(x, idx, num_sms=5)
        again = buffer.dispatch(x, handle=out.handle, num_sms=6)
        return buffer.combine(out.recv_x + again.recv_x, out.handle, num_sms=7) + buffer.combine(again.recv_x, out.handle)

    torch._dynamo.config.capture_dynamic_output_shape_ops = True
    run = torch.compile(layer, fullgraph=True, backend="aot_eager") if is_compiled else layer
    run(torch.ones(2, 8, requires_grad=True)).sum().backward()
    numbers = [mode.num_sms for mode in modes]
    assert numbers[:4] == [5, 6, 7, 9] and len(numbers) > 4 and set(numbers[4:]) == {9}
    assert not any(mode.is_async or mode.is_split for mode in modes)


def test_asynchronous_calls_stay_outside_graphs():
    buffer = Buffer(None, 8, 8, 4, 2)
    modes, idx = modes_of_calls(buffer), torch.tensor([[0, 1], [2, -1]])

    def layer(x):
        out = buffer.dispatch(x * 2, idx, num_sms=5, async_op=True)
        out.event.wait()
        combined_x, hook = buffer.combine(out.recv_x, out.handle, return_hook=True)
        hook()
        return combined_x + 1

    x = torch.arange(16.0).view(2, 8)
    assert torch.equal(torch.compile(layer, backend="eager")(x), layer(x))
    assert [(mode.num_sms, mode.is_async, mode.is_split) for mode in modes] == [(5, True, False), (None, False, True)] * 2
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="_call_outside_graph"):
        torch.compile(layer, fullgraph=True, backend="eager")(x)


@pytest.mark.parametrize("is_async", [False, True])
def test_layers_share_compiled_calls(is_async):
    """PyTorch does not compile again for the number of another layer."""
    buffer, idx, x = Buffer(None, 8, 8, 4, 2), torch.tensor([[0, 1], [2, -1]]), torch.ones(2, 8)
    torch._dynamo.reset()
    dispatch = torch.compile(buffer.dispatch, backend="eager", dynamic=False)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for layer in range(3):
            out = dispatch(x, idx, num_recv_rows=4, layer=layer, async_op=is_async)
            if is_async:
                out.event.wait()
            assert torch.equal(out.recv_x[:3], torch.ones(3, 8))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_operators_pass_opcheck(layout):
    """torch.library.opcheck: schema, fake implementation, autograd registration."""
    buffer = Buffer(None, 8, 8, 4, 2)
    x, weights = torch.randn(5, 8, requires_grad=True), torch.rand(5, 2, requires_grad=True)
    idx = torch.tensor([[0, 1], [2, -1], [3, 0], [-1, -1], [1, 2]])
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    number = buffer.calls.number
    torch.library.opcheck(torch.ops.deepep_moe.dispatch, (x, None, idx, weights, number, layout, 2, -1, None), test_utils=tests)
    handle = buffer.dispatch(x.detach(), idx, layout=layout, expert_alignment=2).handle
    tensors = [handle.topk_idx, handle.recv_row_idx, handle.recv_counts, handle.num_recv_tokens_per_expert, handle.call]
    rest = ([*tensors, torch.empty(0, dtype=torch.int32)], number, layout, 2, handle.num_rows, None)
    torch.library.opcheck(torch.ops.deepep_moe.dispatch_cached, (x, None, weights, *rest), test_utils=tests)
    rows = torch.randn(handle.num_rows, 8, requires_grad=True)
    row_weights = torch.rand(handle.num_rows, requires_grad=True)
    torch.library.opcheck(torch.ops.deepep_moe.combine, (rows, row_weights, x, None, *rest), test_utils=tests)


# ---- gradients whose values are not those of their memory, such as its negative, are read ----


def numbers(like):
    return torch.arange(1.0, like.numel() + 1, device=like.device).view(like.shape).to(like.dtype)


PAIRS = {  # gradients that are read, and the same ones in plain memory
    "negative": (lambda like: negative(numbers(like)), numbers),
    "imaginary": (lambda like: imaginary(numbers(like)), numbers),
    "zeros": (lambda like: torch._efficientzerotensor(like.shape, dtype=like.dtype, device=like.device), torch.zeros_like),
    "sparse": (lambda like: numbers(like).to_sparse(), numbers),
    "between pieces": (lambda like: torch.cat([like.new_zeros(1), numbers(like).flatten()])[1:].view(like.shape), numbers),
    "expanded": (lambda like: torch.ones((), dtype=like.dtype, device=like.device).expand(like.shape), torch.ones_like),
}


def gradients_of_layers(buffer, x, idx, weights, grad):
    """Backwards whose first gradient is `grad` of their output."""
    x, weights, row_weights = (tensor.clone().requires_grad_() for tensor in (x, weights, weights))
    out = buffer.dispatch(x, idx, weights)
    again = buffer.dispatch(x, handle=out.handle)
    rows = out.recv_x.detach().requires_grad_()
    row_weights = out.recv_topk_weights.detach().requires_grad_()
    combined, plain = buffer.combine(rows, out.handle, row_weights, bias=x), buffer.combine(rows, out.handle)
    parts, sent, handle = dispatch_by_expert(buffer, x, idx, weights)
    by_expert = combine_by_expert(buffer, parts, sent, handle)
    gradients = []
    for output, leaves in (
        (out.recv_x, (x,)), (out.recv_topk_weights, (weights,)), (again.recv_x, (x,)), (combined, (rows, row_weights, x)), (plain, (rows,)),
        (by_expert, (x, weights)), (parts[0], (x,)),
    ):  # fmt: skip
        grads = torch.autograd.grad(output, leaves, grad(output), retain_graph=True)
        gradients += [grad.to_dense() if grad.is_sparse else grad for grad in grads]  # that of a bias is the gradient itself
    return gradients


@on_ranks(2, backend=BACKENDS)
def test_gradients_of_the_exchange(rank, backend):
    device = device_of(backend, rank)
    buffer, inputs = make_buffer(backend), [tensor.to(device) for tensor in (X, IDX, WEIGHTS)]
    for name, (lazy, plain) in PAIRS.items():
        for is_one_rank in (False, True):  # lazy
            actual = gradients_of_layers(buffer, *inputs, plain if is_one_rank and rank == 0 else lazy)
            expected = gradients_of_layers(buffer, *inputs, plain)
            assert all(map(torch.equal, actual, expected)), name


def test_gradients_of_operations():
    logits, routing_map = torch.randn(5, 8), torch.rand(5, 8) > 0.7
    for name, (lazy, plain) in PAIRS.items():
        grads = []
        for grad in (lazy, plain):
            leaf = logits.clone().requires_grad_()
            actual = ops.gate_full(leaf, 2, dense=True, shares=True)
            lanes = LanesOfMap.apply(routing_map, leaf, 8)[1]
            for output in (actual.topk_weights, actual.probs, actual.shares, lanes):
                grads += torch.autograd.grad(output, leaf, grad(output), retain_graph=True)
        assert all(map(torch.equal, grads[:4], grads[4:])), name
    values = torch.rand(5, 8)
    assert all(map(torch.equal, *(LanesOfMap.apply(routing_map, each, 8) for each in (negative(values), values))))
    assert_all_same("fp8", ops.quantize_fp8(negative(X)), ops.quantize_fp8(X))
