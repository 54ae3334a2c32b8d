"""Errors of one rank where the ranks have no buffer yet: the others are told instead of left to wait for a deadline."""

import pytest
import torch
import torch.distributed as dist
from exchange_cases import device_of, in_environment

from deepep_moe.compat import deep_ep
from deepep_moe.errors import EPPeerError, EPTimeoutError
from deepep_moe.testing import run_ranks

NUM_EXPERTS, HIDDEN = 4, 128
BACKENDS = pytest.mark.parametrize("backend", ("shm", pytest.param("nvlink", marks=pytest.mark.gpu)))


def inputs(device):
    x = torch.ones(2, HIDDEN, dtype=torch.bfloat16, device=device)
    topk_idx = torch.tensor([[0, 3], [2, 1]], device=device)
    return x, topk_idx, torch.ones(2, 2, device=device)


def version_1(group, x, topk_idx, topk_weights):
    buffer = deep_ep.Buffer(group)
    counts = torch.zeros(NUM_EXPERTS, dtype=torch.int32, device=x.device)
    return (
        lambda bad: buffer.dispatch(x, topk_idx=topk_idx, topk_weights=topk_weights, num_tokens_per_expert=None if bad else counts),
        "ValueError: num_tokens_per_expert is missing",
    )


def of_another_shape(group, x, topk_idx, topk_weights):
    buffer = deep_ep.Buffer(group)
    counts = torch.zeros(NUM_EXPERTS, dtype=torch.int32, device=x.device)
    return (
        lambda bad: buffer.dispatch(x[0] if bad else x, topk_idx=topk_idx, topk_weights=topk_weights, num_tokens_per_expert=counts),
        r"ValueError: x has shape \[128\]; it must be \[num_tokens, hidden\]",
    )


def version_2(group, x, topk_idx, topk_weights):
    buffer = deep_ep.ElasticBuffer(group)
    return (
        lambda bad: buffer.dispatch(x, topk_idx, topk_weights, num_experts=None if bad else NUM_EXPERTS),
        "ValueError: topk_idx and num_experts are needed without a handle",
    )


def hybrid(group, x, topk_idx, topk_weights):
    buffer = deep_ep.HybridEPBuffer(group, HIDDEN, 2, NUM_EXPERTS // 2)
    routing_map = topk_idx.new_ones(2, NUM_EXPERTS, dtype=torch.bool)
    return (
        lambda bad: buffer.dispatch_with_permute(hidden=x, routing_map=routing_map[:1] if bad else routing_map),
        r"ValueError: routing_map has shape \[1, 4\]; it must be \[2, 4\]",
    )


def low_latency(group, x, topk_idx, topk_weights):
    buffer = deep_ep.Buffer(group, low_latency_mode=True)

    def call(bad):
        native = buffer.low_latency_dispatch(x, topk_idx, 2, NUM_EXPERTS, use_nvfp4=bad)[2].buffer
        if native.backend == "nvlink":  # which says it later
            torch.cuda.synchronize()
            native.check()

    return (
        call,
        "NotImplementedError: low_latency_dispatch: use_nvfp4 is not served",
    )


def refused_first(rank, _, backend, make):
    """Bad arguments of rank 1, twice: before there is a buffer, and then in it. All ranks go on."""
    device = device_of(backend, rank)
    call, message = make(dist.group.WORLD, *inputs(device))
    for _ in range(2):
        with pytest.raises((ValueError, NotImplementedError) if rank == 1 else EPPeerError) as caught:
            call(rank == 1)
        assert caught.match(message.split(": ", 1)[1] if rank == 1 else f"rank 1 did not make its call: {message}")
        dist.barrier()
        call(False)


@pytest.mark.parametrize("make", (version_1, of_another_shape, version_2, hybrid, low_latency))
@BACKENDS
def test_refused_first(backend, make):
    run_ranks(refused_first, 2, backend, make)


def new_sizes(rank, _):
    """A rank that is masked and does not come is named when sizes are new."""
    buffer = deep_ep.Buffer(dist.group.WORLD, low_latency_mode=True, enable_shrink=True)
    x, topk_idx, _ = inputs("cpu")
    buffer.low_latency_dispatch(x, topk_idx, 2, NUM_EXPERTS)
    dist.barrier()
    if rank == 1:
        return
    buffer.low_latency_update_mask_buffer(1, True)
    buffer.low_latency_dispatch(x, topk_idx, 2, NUM_EXPERTS)
    with pytest.raises(EPTimeoutError, match=r"'num_max_dispatch_tokens_per_rank': 3, .* are new, .* ranks \[1\] are masked"):
        buffer.low_latency_dispatch(x, topk_idx, 3, NUM_EXPERTS)


def test_new_sizes_without_a_rank():
    run_ranks(in_environment, 2, {"DEEPEP_MOE_TIMEOUT_S": "5"}, new_sizes)
