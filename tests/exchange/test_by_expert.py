"""Rows in a tensor for each expert: the same as in one tensor, to the bit, in results and gradients."""

import contextlib
import itertools
import sys
from functools import partial

import pytest
import torch
import torch.distributed as dist
from by_expert_cases import doubled, equal, folded, ignored, in_one_tensor, in_parts, shifted, strided, tagged, unlike, watched
from error_cases import Wrapped
from exchange_cases import BACKENDS, NVLINK, Case, assert_all_same, assert_same, device_of, on_device, opened, poison_outputs
from fault_cases import allocations_fail
from on_ranks import on_ranks, refused
from torch.utils.checkpoint import checkpoint

from deepep_moe import Buffer
from deepep_moe.errors import BufferDestroyedError, EPPeerError
from deepep_moe.exchange.by_expert import combine_by_expert, dispatch_by_expert
from deepep_moe.ops.weighted import weighted_sum
from deepep_moe.testing import run_ranks


@on_ranks(3, backend=BACKENDS)
def test_parts_are_the_rows_of_one_tensor(rank, num_ranks, backend):
    kinds = (torch.float32, True, None), (torch.float32, False, 0), (torch.bfloat16, True, 0), (torch.bfloat16, False, None)
    for dtype, weighed, num_sms in kinds:  # 0: by copy engines
        case = Case([9, 0, 21], num_topk=4, dtype=dtype, pattern="masked", with_weights=weighed, num_sms=num_sms)
        equal(rank, num_ranks, backend, case, doubled)


@pytest.mark.parametrize("expert", (strided, shifted, folded, unlike, ignored), ids=lambda expert: expert.__name__)
@pytest.mark.parametrize("backend", BACKENDS)
def test_outputs_that_cannot_be_read_where_they_are(backend, expert):
    run_ranks(equal, 2, backend, Case([9, 14], num_topk=4, dtype=torch.bfloat16), expert)


def weighed_at_the_source(rank, num_ranks, backend, dtype, num_topk, expert, num_experts=6):
    """A row for each expert of a token there and back, weighted at the source: equal to copies of x and a sum, with its gradients."""
    device_of(backend, rank)
    poison_outputs()
    num_tokens = (1, 0, 7)[rank]
    case = Case([num_topk * count for count in (1, 0, 7)], num_topk=1, num_experts=num_experts, dtype=dtype)
    rows, idx, _ = on_device(backend, rank, *case.inputs(rank))
    x, weights = rows[:num_tokens].contiguous(), torch.rand(num_topk, num_tokens, device=rows.device)
    scale = torch.arange(1.0, 1 + num_experts // num_ranks, device=x.device).to(dtype) / 2
    buffer = Buffer(None, max(case.num_tokens), case.hidden, num_experts, 1, backend=backend)
    results = []
    for at_once in (False, True, watched):
        leaves = [tensor.clone().requires_grad_() for tensor in (x, weights, scale)]
        source_weights = leaves[1] if at_once else None
        with watched(rank) if at_once is watched else contextlib.nullcontext():
            sent_x = leaves[0] if at_once else leaves[0].expand(num_topk, *x.shape).reshape(-1, case.hidden).contiguous()
            parts, recv_weights, handle = dispatch_by_expert(buffer, sent_x, idx, None, source_weights=source_weights)
            y = [expert(part, s) for part, s in zip(parts, leaves[2], strict=True)]
            combined_x = combine_by_expert(buffer, y, recv_weights, handle, source_weights)
            if not at_once:
                combined_x = weighted_sum(combined_x.view(num_topk, num_tokens, case.hidden), leaves[1])
            combined_x.backward(x)
        results.append([combined_x, *(leaf.grad for leaf in leaves)])
    for combined_x, grad_x, *grads in results[1:]:
        assert_same("combined_x", combined_x, results[0][0])
        if num_topk <= 2:  # more are added in another order
            assert_same("x.grad", grad_x, results[0][1])
        torch.testing.assert_close([grad_x, *grads], results[0][1:], rtol=1e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-5)


@pytest.mark.parametrize("expert", (doubled, strided, unlike, tagged), ids=lambda expert: expert.__name__)
@on_ranks(3, backend=BACKENDS)
def test_rows_weighed_at_the_source(rank, num_ranks, backend, expert):
    for dtype, num_topk in itertools.product((torch.float32, torch.bfloat16), (1, 2, 5)):
        weighed_at_the_source(rank, num_ranks, backend, dtype, num_topk, expert)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("num_topk", "num_experts"), ((2, 120), (33, 6)))
def test_more_experts_than_kernels_take(backend, num_topk, num_experts):
    """If a rank has too many experts, rows are joined. If a token has, weights are applied after the combine."""
    run_ranks(weighed_at_the_source, 3, backend, torch.float32, num_topk, doubled, num_experts)


@on_ranks(2, backend=BACKENDS)
def test_what_cannot_be_combined(rank, backend):
    """Rank 1 refuses rows that cannot be combined; rank 0 learns of it instead of waiting."""
    buffer, x, idx, _ = opened(Case([4, 4], num_topk=2, num_experts=4), backend, rank)
    parts, _, handle = dispatch_by_expert(buffer, x, idx, None)
    one_more, one_fewer = torch.cat([parts[0], parts[0].new_zeros(1, buffer.hidden)]), parts[1][1:]
    shape = rf"the rows of local expert 0 have shape .* here {len(parts[0])} and {buffer.hidden}"
    wrong = (
        ([one_more, parts[1]], ValueError, shape),
        ([one_more, one_fewer], ValueError, shape),
        ([parts[0][:, 1:], parts[1]], ValueError, shape),
        ([parts[0], None], TypeError, "the rows of local expert 1 must be a torch.Tensor, not NoneType"),
        ([None, parts[1]], TypeError, "the rows of local expert 0 must be a torch.Tensor, not NoneType"),
        ([parts[0]], ValueError, "there are rows of 1 experts, and 2 local experts"),
    )
    learns = pytest.raises(EPPeerError, match="rank 1 did not make its call")
    for rows, error, message in wrong:
        with pytest.raises(error, match=message) if rank == 1 else learns if backend != "nvlink" else contextlib.nullcontext():
            combine_by_expert(buffer, rows if rank == 1 else parts, None, handle)
        if backend == "nvlink":  # a combine waits for nothing: the next call learns of it
            torch.cuda.synchronize()
            dist.barrier()
            with contextlib.nullcontext() if rank == 1 else learns:
                combine_by_expert(buffer, parts, None, handle)
        dist.barrier()
    buffer, x, idx, _ = opened(Case([4, 4], hidden=12, num_topk=2, num_experts=4), backend, rank)
    parts, _, handle = dispatch_by_expert(buffer, x, idx, None)
    with pytest.raises(ValueError, match="a row of x, 12 columns of bfloat16, has 24 bytes"):
        combine_by_expert(buffer, [part.bfloat16() for part in parts], None, handle)  # half as wide, as under autocast


@on_ranks(2, backend=BACKENDS)
def test_bad_dispatches(rank, backend):
    """Rank 1 refuses, or its kernels find an expert that is none. The buffer is as good as before, for the call after."""
    buffer, x, idx, weights = opened(Case([4, 4], num_topk=2, num_experts=4), backend, rank)
    routing = idx.clone()
    routing[2, 1] = 4
    for wrong, layer, error, message in (
        (routing, 0, ValueError, r"topk_idx\[2, 1\] is 4"),
        (idx, -1, ValueError, "layer is -1"),
        (idx, "one", TypeError, "layer is 'one'"),
    ):
        with refused(rank, 1, error, message):
            dispatch_by_expert(buffer, x, wrong if rank == 1 else idx, weights, layer=layer if rank == 1 else 0)
        dist.barrier()
    scale = torch.tensor([0.5, 2.0], device=x.device)
    assert_same("combined_x", in_parts(buffer, x, idx, weights, scale, doubled), in_one_tensor(buffer, x, idx, weights, scale, doubled))


@on_ranks(2, backend=[NVLINK])
def test_failures_of_one_rank(rank, backend):
    """Peers learn of a failure before a rank has entered its call, and of a number of multiprocessors that its GPU does not have. The
    memory of a destroyed buffer is freed, even if somebody keeps an error of its calls."""
    case = Case([4, 4], num_topk=2, num_experts=4)
    buffer, x, idx, weights = opened(case, backend, rank)
    with pytest.raises(ValueError, match="source_weights were given in a buffer for top-2; they need one for top-1"):
        dispatch_by_expert(buffer, x[:2].contiguous(), idx, None, source_weights=torch.ones(2, 2, device=x.device))
    fails = allocations_fail(torch.OutOfMemoryError("nothing is left"), lambda size, dtype: rank == 1)
    with fails, refused(rank, 1, torch.OutOfMemoryError, "nothing is left"):
        dispatch_by_expert(buffer, x, idx, weights)
    with pytest.raises((ValueError, EPPeerError)) as kept:
        dispatch_by_expert(buffer, x, idx + 4, None)
    communicator = buffer.calls.backend._native
    buffer.destroy()
    assert sys.getrefcount(communicator) == 2, "somebody keeps the communicator"  # beside this function and getrefcount
    assert kept.value is not None
    buffer = opened(case, backend, rank, num_sms=100000 if rank == 1 else 4)[0]
    with pytest.raises(ValueError if rank == 1 else EPPeerError, match="num_sms is 100000; this GPU has"):
        dispatch_by_expert(buffer, x, idx, None)


@on_ranks(2, backend=BACKENDS)
def test_a_buffer_that_is_gone(rank, backend):
    """A backward whose buffer is no more."""
    for is_destroyed, message in ((True, "this buffer was destroyed"), (False, "buffer . is gone")):
        buffer, x, idx, weights = opened(Case([4, 4], num_topk=2, num_experts=4), backend, rank)
        scale = torch.tensor([0.5, 2.0], device=x.device)
        combined_x = in_parts(buffer, x.requires_grad_(), idx, weights, scale, doubled)
        if is_destroyed:
            buffer.destroy()
        else:
            del buffer
        with pytest.raises(BufferDestroyedError, match=message):
            combined_x.sum().backward()
        dist.barrier()


@on_ranks(2, backend=("shm", NVLINK))
def test_gradients_of_gradients(rank, backend):
    """A gradient of a gradient: rows are joined then, and equal those of the calls that know one tensor only."""
    buffer, x, idx, _ = opened(Case([5, 6], num_topk=2, num_experts=4), backend, rank)
    scale = torch.arange(1.0, 3.0, device=x.device)
    grads = []
    for way in (in_one_tensor, in_parts):
        leaf = x.clone().requires_grad_()
        y = way(buffer, leaf, idx, None, scale, lambda rows, scale: rows * rows * scale)
        (grad,) = torch.autograd.grad(y.sum(), leaf, create_graph=True)
        grad.sum().backward()
        grads.append(leaf.grad)
    assert_same("x.grad", grads[1], grads[0])


@pytest.mark.gpu
@on_ranks(2)
def test_experts_that_write_into_their_rows(rank):
    """Experts that write into their rows: in C++ each expert's are a tensor of their own for autograd, though they lie in one."""
    buffer, x, idx, weights = opened(Case([5, 6], num_topk=2, num_experts=4), "nvlink", rank)
    scale = torch.arange(1.0, 3.0, device=x.device)
    results = []
    for expert in (doubled, torch.Tensor.mul_):
        leaves = [tensor.clone().requires_grad_() for tensor in (x, weights, scale)]
        combined_x = in_parts(buffer, leaves[0], idx, leaves[1], leaves[2], expert)
        combined_x.backward(x)
        results.append([combined_x, *(leaf.grad for leaf in leaves)])
    assert_all_same("combined_x, x.grad, topk_weights.grad, scale.grad", *results)


@on_ranks(2, backend=[NVLINK])
def test_what_calls_in_cpp_decline(rank, backend):
    """Arguments that calls in C++ decline, and ones that must not be mistaken for them."""
    buffer, x, idx, weights = opened(Case([5, 6], num_topk=1, num_experts=4), backend, rank)
    scale = torch.tensor([0.5, 2.0], device=x.device)

    def run(hook=None):
        leaves = [tensor.clone().requires_grad_() for tensor in (x, weights)]
        parts, recv_weights, handle = dispatch_by_expert(buffer, leaves[0], idx, leaves[1])
        if hook is not None:
            parts[0].register_hook(hook)
        combined_x = combine_by_expert(buffer, [doubled(*pair) for pair in zip(parts, scale, strict=True)], recv_weights, handle)
        if hook is not None:
            combined_x.register_hook(hook)
        combined_x.backward(x)
        return combined_x, [leaf.grad for leaf in leaves]

    plain, expected = run()
    assert_all_same("x.grad, topk_weights.grad", run(Wrapped)[1], expected)
    torch.vmap(torch.sin)(torch.ones(2, 2))  # which leaves something in this thread, as torch.compile does
    combined_x, _ = run()
    assert_same("combined_x", combined_x, plain)
    assert combined_x.grad_fn.name() == plain.grad_fn.name()


@on_ranks(2, backend=BACKENDS)
def test_rows_of_the_rank_layout(rank, backend):
    """Rows along a handle that are not by expert are joined, and nobody applies weights."""
    buffer, x, idx, _ = opened(Case([5, 6], num_topk=1, num_experts=4), backend, rank)
    out = buffer.dispatch(x, idx, layout="rank")
    parts = out.recv_x.split(out.handle.num_rows_per_expert_list)
    assert_same("combined_x", combine_by_expert(buffer, parts, None, out.handle), torch.where(idx < 0, torch.zeros_like(x), x))


@on_ranks(2, backend=BACKENDS, use_reentrant=(False, True))
def test_activation_checkpointing(rank, backend, use_reentrant):
    """Under activation checkpointing a forward is made once more, its dispatch and combine too."""
    buffer, x, idx, weights = opened(Case([6, 9], num_topk=2, num_experts=4, dtype=torch.bfloat16), backend, rank)
    scale = torch.tensor([0.5, 2.0], device=x.device)
    results = []
    for call in (in_parts, partial(checkpoint, in_parts, use_reentrant=use_reentrant)):
        leaves = [tensor.clone().requires_grad_() for tensor in (x, weights)]
        combined_x = call(buffer, leaves[0], idx, leaves[1], scale, doubled)
        combined_x.backward(x)
        results.append([combined_x, *(leaf.grad for leaf in leaves)])
    assert_all_same("combined_x, x.grad, topk_weights.grad", *results)
