"""A default device of the caller's, as of deferred initialization, changes nothing: constructions and calls use the devices of their
inputs."""

import contextlib
import itertools
from dataclasses import replace
from functools import partial

import low_latency_cases
import pytest
import torch
from exchange_cases import Case, assert_all_same, check_calls, make_buffer, on_device
from fault_cases import under
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


@on_ranks(2, backend=("shm", pytest.param("collective", marks=pytest.mark.slow), pytest.param("nvlink", marks=pytest.mark.gpu)), how=HOW)
def test_calls(rank, backend, how):
    kinds = itertools.product(("expert", "rank"), ("now", "async"), (None, 64))
    cases = [Case([6, 9], hidden=128, layout=layout, mode=mode, bound=bound, with_bias=True) for layout, mode, bound in kinds]
    x, idx, _ = on_device(backend, rank, *cases[0].inputs(rank))
    with default_device(how):
        buffer = make_buffer(cases[0], backend, rank)
    for case in cases:
        check_calls(rank, case, [under(partial(default_device, how), buffer)])
    results = []
    for device in (None, how):
        with default_device(device):
            out = buffer.dispatch(x, idx, fp8=True)
            results.append((out.recv_x, out.recv_x_scales, *buffer.layout(idx)))
    assert_all_same("fp8 and layout", *results)


@on_ranks(2, backend=low_latency_cases.BACKENDS, how=HOW)
def test_low_latency_calls(rank, backend, how):
    case = low_latency_cases.Case([9, 24], combine_weights=True)
    with default_device(how):
        buffer = low_latency_cases.make_buffer(case, backend, rank)
        assert buffer.combine_input(torch.float32).device.type != "meta"
    for mode, fp8 in (("now", False), ("async", True), ("hook", False)):
        low_latency_cases.run_case(under(partial(default_device, how), buffer), replace(case, mode=mode, fp8=fp8), rank, backend)


def test_gate_and_plans_of_copies():
    logits = torch.randn(16, 8, generator=torch.Generator().manual_seed(3))
    counts = torch.tensor([[40, 0, 1, 2], [40, 0, 1, 2]], dtype=torch.int32, device="cpu")

    def results():
        leaf = logits.clone().requires_grad_()
        idx, weights, _ = ops.gate(leaf, 2)
        weights.square().sum().backward()
        plan = ops.plan_copies(idx % 4, counts, 0, num_slots=1, cost=1)
        return [idx, weights, leaf.grad, plan.copies, plan.rows, plan.topk_idx]

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
