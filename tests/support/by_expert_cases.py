"""Experts for rows in a tensor for each expert, and the comparison with rows in one tensor that runs on every rank."""

import contextlib

import torch
import torch.distributed as dist
from exchange_cases import assert_same, device_of, inputs_of, on_device, poison_outputs
from torch.utils.flop_counter import FlopCounterMode

from deepep_moe import Buffer, reference
from deepep_moe.exchange.by_expert import combine_by_expert, dispatch_by_expert


def doubled(rows, scale):
    return rows * scale


def strided(rows, scale):
    """Return scaled rows as a view with another memory order."""
    return (rows * scale).transpose(-1, -2).contiguous().transpose(-1, -2)


def shifted(rows, scale):
    """Contiguous, and not on a boundary of 16 bytes."""
    y = rows * scale
    return torch.cat([y.new_zeros(1), y.flatten()])[1:].view(y.shape)


def folded(rows, scale):
    """Rows in two dimensions."""
    y = rows * scale
    return y.view(*y.shape[:-2], 1, *y.shape[-2:]) if y.shape[-2] % 2 else y.view(*y.shape[:-2], 2, -1, y.shape[-1])


def unlike(rows, scale):
    """Return rows that can be read in place on even ranks only."""
    return (strided if dist.get_rank() % 2 else doubled)(rows, scale)


class Tagged(torch.Tensor):
    pass


def tagged(rows, scale):
    """Return doubled rows, on odd ranks as a subclass of Tensor."""
    y = doubled(rows, scale)
    return y.as_subclass(Tagged) if dist.get_rank() % 2 else y


def ignored(rows, scale):
    """An expert whose output does not depend on its rows."""
    return torch.zeros_like(rows) * scale


def in_one_tensor(buffer, x, idx, weights, scales, expert):
    out = buffer.dispatch(x, idx, weights)
    rows = out.recv_x.split(out.handle.num_rows_per_expert_list)
    y = torch.cat([expert(group, scale).reshape(-1, x.shape[1]) for group, scale in zip(rows, scales, strict=True)])
    return buffer.combine(y, out.handle, out.recv_topk_weights)


def in_parts(buffer, x, idx, weights, scales, expert):
    parts, recv_weights, handle = dispatch_by_expert(buffer, x, idx, weights, (1, 1))
    assert [part.shape for part in parts] == [(1, 1, count, x.shape[1]) for count in handle.num_rows_per_expert_list]
    y = [expert(part, scale) for part, scale in zip(parts, scales, strict=True)]
    return combine_by_expert(buffer, y, recv_weights, handle)


def equal(rank, num_ranks, backend, case, expert):
    device_of(backend, rank)
    poison_outputs()
    xs, idxs, all_weights = inputs_of(case)
    buffer = Buffer(None, max(case.num_tokens), case.hidden, case.num_experts, case.num_topk, backend=backend, num_sms=case.num_sms)
    num_local = case.num_experts // num_ranks
    scales = [torch.arange(1.0, num_local + 1).to(case.dtype) / 4 + r for r in range(num_ranks)]
    x, idx, weights, scale = on_device(backend, rank, xs[rank], idxs[rank], all_weights[rank], scales[rank])
    (grad,) = on_device(backend, rank, torch.randn(x.shape, generator=torch.Generator().manual_seed(rank)).to(case.dtype))
    results = []
    for way in (in_one_tensor, in_parts):
        leaves = [tensor.clone().requires_grad_() for tensor in (x, weights, scale)]
        combined_x = way(buffer, leaves[0], idx, leaves[1] if case.with_weights else None, leaves[2], expert)
        combined_x.backward(grad)
        results.append([combined_x, *(leaf.grad for leaf in leaves)])
    for name, value, expected in zip(("combined_x", "x.grad", "topk_weights.grad", "scale.grad"), results[1], results[0], strict=True):
        if value is None:
            assert expected is None and not case.with_weights, name
        elif name == "scale.grad":
            torch.testing.assert_close(value, expected)
        else:
            assert_same(name, value, expected)
    assert ("CombineFunction" in results[1][0].grad_fn.name()) is (backend == "nvlink")
    if expert is doubled:
        received = reference.dispatch(xs, idxs, all_weights if case.with_weights else None, case.num_experts)
        rows = [
            torch.cat([group * s for group, s in zip(there.recv_x.split(there.num_recv_tokens_per_expert), ours, strict=True)])
            for there, ours in zip(received, scales, strict=True)
        ]
        row_weights = [there.recv_topk_weights for there in received] if case.with_weights else None
        assert_same("combined_x", results[1][0], reference.combine(rows, received, case.num_tokens, row_weights)[rank])
    leaves = [tensor.clone().requires_grad_() for tensor in (x, weights, scale)]
    combined_x = in_parts(buffer, leaves[0], idx, leaves[1] if case.with_weights else None, leaves[2], expert)
    with watched(rank):
        combined_x.backward(grad)
    for name, leaf, expected in zip(("x.grad", "topk_weights.grad"), leaves, results[1][1:], strict=False):
        torch.testing.assert_close(leaf.grad, expected, msg=lambda text, name=name: f"watched {name}: {text}")
    with torch.no_grad():
        assert_same("combined_x", in_parts(buffer, x, idx, weights if case.with_weights else None, scale, expert), results[1][0])


def watched(rank):
    """Operations of one rank go through a mode, as of a profiler that counts them."""
    return FlopCounterMode(display=False) if rank == 0 else contextlib.nullcontext()
