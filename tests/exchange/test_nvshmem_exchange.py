"""The nvshmem backend against the reference, bit for bit: nodes of one host, which on the emulated GPU a hostile network connects."""

import emulated_gpu
import pytest
import torch
import torch.distributed as dist
from exchange_cases import (
    NETWORK,
    ROUNDS,
    Case,
    assert_same,
    bytes_put,
    check_cases,
    check_each,
    device_of,
    in_environment,
    inputs_of,
    look,
    opened,
    poison_outputs,
    random_case,
)
from on_ranks import on_ranks

from deepep_moe import Buffer, reference
from deepep_moe.testing import run_ranks

pytestmark = pytest.mark.gpu

SPLITS = {"2x1": (2, 1), "2x2": (4, 2), "4x1": (4, 1), "3x2": (6, 2), "2x4": (8, 4), "8x1": (8, 1)}  # nodes x ranks: (ranks, of a node)
LAYOUTS = ("expert", "rank")
NUM_TOKENS = [9, 21, 0, 17, 1, 30, 5, 12]


def case_of(split, num_tokens=NUM_TOKENS, **settings):
    num_ranks, per_node = SPLITS[split]
    settings = {"num_experts": 24, "num_topk": 4, "dtype": torch.bfloat16} | settings
    return Case(num_tokens[:num_ranks], ranks_per_node=per_node, backends=("nvshmem",), **settings)


# ---- as the reference ----


@pytest.mark.parametrize("split", ("2x1", "2x2"))
def test_equals_reference(split):
    how = {"expert_alignment": 4, "with_bias": True}
    kinds = (("expert", "ranks"), ("rank", "ranks"), ("expert", "lanes"), ("expert", "lanes_fma"))
    cases = [case_of(split, layout=layout, sums=sums, **how) for layout, sums in kinds]
    cases += [case_of(split, num_tokens) for num_tokens in ([0, 0, 0, 0], [0, 0, 33, 0], [300, 1, 130, 0])]
    check_cases([*cases, *many_calls(split, 6)])


@pytest.mark.slow
@pytest.mark.parametrize("split", SPLITS)
def test_random_routings_over_nodes(split):
    num_ranks, per_node = SPLITS[split]
    check_cases([random_case(seed, num_ranks, ("nvshmem",), per_node) for seed in range(ROUNDS)], timeout_s=600 + ROUNDS / 10)


@pytest.mark.parametrize("num_sms", (0, 7))
def test_ways_to_send(num_sms):
    """SMs or copy engines within the node, at once or in halves: the results are the same."""
    how = {"num_sms": num_sms, "with_bias": True, "layout": "expert" if num_sms else "rank"}
    check_cases([case_of("2x2", [140, 37, 90, 5], mode=mode, **how) for mode in ("now", "async", "hook")])


def many_calls(split, num_calls):
    """Calls one after the other on one buffer, with other routings and row sizes each time: boxes are written again and again."""
    return [case_of(split, seed=seed, dtype=(torch.bfloat16, torch.float32)[seed % 2]) for seed in range(num_calls)]


@pytest.mark.slow
@pytest.mark.skipif(not emulated_gpu.is_chosen(), reason="is about the emulated network")
@pytest.mark.parametrize("seed", range(25))
def test_networks(seed):
    """Networks that delay, tear and reorder in other ways."""
    network = {NETWORK: f"seed={seed},stall_us={200 * (seed % 4)},flush={seed % 2}"}
    split = ("2x1", "2x2", "4x1", "3x2")[seed % 4]
    run_ranks(in_environment, SPLITS[split][0], network, check_each, many_calls(split, 4))


# ---- what else a call can do ----


@on_ranks(4, layout=LAYOUTS)
def test_cuda_graph(rank, layout):
    """A dispatch and a combine captured once and replayed with other rows and routings."""
    poison_outputs()
    device = device_of("nvshmem", rank)
    buffer = Buffer(None, 24, 72, 24, 4, backend="nvshmem", timeout_s=60, ranks_per_node=2)
    cases = [case_of("2x2", [24] * 4, layout=layout, seed=seed) for seed in range(4)]
    x, idx, weight = (tensor.to(device) for tensor in cases[0].inputs(rank))

    def step():
        out = buffer.dispatch(x, idx, weight, layout=layout, num_recv_rows=24 * 4 * 4)
        return out, buffer.combine(out.recv_x, out.handle)

    step()  # what is loaded when it is launched first cannot be captured
    torch.cuda.synchronize()
    dist.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, combined = step()
    for case in cases[1:]:
        xs, idxs, weights = inputs_of(case)
        for to, tensors in zip((x, idx, weight), (xs, idxs, weights), strict=True):
            to.copy_(tensors[rank])
        graph.replay()
        look(buffer)
        received = reference.dispatch(xs, idxs, weights, case.num_experts, layout=layout)
        assert_same("recv_x", out.recv_x[: len(received[rank].recv_x)], received[rank].recv_x)
        rows = [there.recv_x for there in received]
        assert_same("combined_x", combined, reference.combine(rows, received, case.num_tokens, ranks_per_node=2)[rank])
    buffer.destroy()


# ---- what crosses ----


@pytest.mark.skipif(not emulated_gpu.is_chosen(), reason="counts what the emulated network carries")
@on_ranks(4)
def test_one_row_crosses_for_each_token_and_node(rank, num_ranks):
    """Bytes that this rank puts into the network, and what one row for each (token, other node) would be, of a dispatch and a combine."""
    case = case_of("2x2", [16, 3, 0, 40], hidden=1024)
    idxs = [case.routing(r) for r in range(num_ranks)]
    buffer, x, idx, _ = opened(case, "nvshmem", rank)
    pe = (rank + 2) % 4

    def goes(source, node):
        return int(((idxs[source] // 12) == node).any(1).sum()) if len(idxs[source]) else 0

    node, message = rank // 2, 2**16
    begin = bytes_put(pe)
    out = buffer.dispatch(x, idx)
    middle = bytes_put(pe)
    buffer.combine(out.recv_x, out.handle)
    end = bytes_put(pe)
    row = 2 * case.hidden
    sent, returned = goes(rank, 1 - node) * row, goes(pe, node) * row
    assert sent <= middle - begin < sent + message and returned <= end - middle < returned + message, (begin, middle, end, sent, returned)
    buffer.destroy()
