"""A default device of the caller's, as of deferred initialization, changes nothing: constructions and calls use the devices of their
inputs."""

import contextlib

import pytest
import torch
from fault_cases import inputs, make, make_step
from on_ranks import on_ranks

from deepep_moe import ops
from deepep_moe.nn import MoELayer, Router


@contextlib.contextmanager
def default_device(how):
    if how == "set_default_device":
        torch.set_default_device("meta")
    with torch.device("meta") if how == "context" else contextlib.nullcontext():
        yield
    torch.set_default_device(None)


HOW = ("set_default_device", "context")
KINDS = ("shm", pytest.param("collective", marks=pytest.mark.slow), "low latency")


def results(buffer, x, idx, weights):
    """Return all results of calls, with gradients where they have some."""
    if buffer.backend == "shm" and hasattr(buffer, "capacity"):
        out = buffer.dispatch(x, idx, weights)
        again = buffer.dispatch(x, idx, weights, async_op=True)
        again.event.wait()
        hooked = buffer.dispatch(x, idx, weights, return_hook=True)
        hooked.hook()
        counts = out.num_recv_tokens_per_expert.tolist()  # nobody writes the rows behind them
        rows = [
            torch.cat([of_expert[:count] for of_expert, count in zip(recv_x, counts, strict=True)])
            for recv_x in (out.recv_x, again.recv_x, hooked.recv_x)
        ]
        y = buffer.combine(again.recv_x, again.handle)
        return [*rows, out.num_recv_tokens_per_expert, y, buffer.combine_input(torch.float32)[:, :0]]
    tensors = []
    for layout in ("expert", "rank"):
        leaves = [x.clone().requires_grad_(), weights.clone().requires_grad_()]
        out = buffer.dispatch(leaves[0], idx, leaves[1], layout=layout, expert_alignment=4 if layout == "expert" else 1)
        along = buffer.dispatch(x, handle=out.handle)
        bounded = buffer.dispatch(x, idx, weights, layout=layout, num_recv_rows=64, async_op=True)
        bounded.event.wait()
        scaled = buffer.dispatch(x, idx, layout=layout, fp8=True)
        y = buffer.combine(out.recv_x * 2, out.handle, out.recv_topk_weights if layout == "expert" else None, bias=x)
        (y.square().sum() + out.recv_topk_weights.sum()).backward()
        counted = buffer.layout(idx)
        tensors += [out.recv_x, out.recv_topk_weights, along.recv_x, bounded.recv_x, scaled.recv_x.float(), scaled.recv_x_scales, y]
        tensors += [leaf.grad for leaf in leaves]
        tensors += [out.num_recv_tokens_per_expert, counted.num_tokens_per_rank, out.handle.num_rows_per_expert]
    return tensors


@on_ranks(2, kind=KINDS)
def test_calls(rank, num_ranks, kind):
    buffer = make(kind, num_ranks, hidden=128)
    x, idx = inputs(buffer, 1)
    weights = (torch.arange(idx.numel(), dtype=torch.float32) + rank).view(idx.shape)
    expected = results(buffer, x, idx, weights)
    for how in HOW:
        with default_device(how):
            actual = results(buffer, x, idx, weights)
        torch.testing.assert_close(actual, expected, rtol=0, atol=0)
    make_step(buffer, 2)


@on_ranks(2, kind=KINDS)
def test_constructions(rank, num_ranks, kind):
    for step, how in enumerate(HOW):
        with default_device(how):
            buffer = make(kind, num_ranks)
        make_step(buffer, step)
        buffer.destroy()


def test_gate():
    logits = torch.randn(16, 8, generator=torch.Generator().manual_seed(3))

    def results():
        leaf = logits.clone().requires_grad_()
        idx, weights, _ = ops.gate(leaf, 2)
        weights.square().sum().backward()
        return [idx, weights, leaf.grad]

    expected = results()
    for how in HOW:
        with default_device(how):
            actual = results()
        assert all(map(torch.equal, actual, expected))


def layer_of(num_ranks, backend):
    torch.manual_seed(5)
    router = Router(16, 2 * num_ranks, 2)
    experts, shared = [torch.nn.Linear(16, 16) for _ in range(2)], torch.nn.Linear(16, 16)
    return MoELayer(router, experts, shared, num_max_tokens_per_rank=8, backend=backend)


@on_ranks(2, backend=("shm", pytest.param("collective", marks=pytest.mark.slow)))
def test_layers(rank, num_ranks, backend):
    """Make the model without memory and then allocate it, as torchtitan and FSDP do."""
    plain = layer_of(num_ranks, backend)
    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(rank))
    expected = plain(x)
    for how in HOW:
        with default_device(how):
            layer = layer_of(num_ranks, backend)
            layer.to_empty(device="cpu")
            layer.load_state_dict(plain.state_dict())
            actual = layer(x)
            actual.sum().backward()
        assert torch.equal(actual, expected) and all(p.grad is not None for p in layer.experts.parameters())
