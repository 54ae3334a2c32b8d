"""Sums over nodes: the contract's third level by hand and against the reference, and which ranks are a node."""

from typing import Any

import pytest
import torch
from exchange_cases import Case, poison_outputs
from on_ranks import on_ranks

from deepep_moe import Buffer
from deepep_moe.errors import EPMismatchError, EPPeerError
from deepep_moe.group import rendezvous
from deepep_moe.testing import run_ranks

# ---- by hand ----


@on_ranks(4, backend=("shm", "collective"))
def test_by_hand(rank, backend):
    """One token of each rank goes to all four; rank r returns the r-th of four numbers. In bf16, with 8 bits, 256 + 1 is 256.

    One node: 1 + 256 + 1 = 258. Nodes of two: ranks 0 and 1 keep the exact sum 1 + 256 and get 258. For ranks 2 and 3 it is rounded to 256
    before it crosses: 256 + 1 = 257, which is 256 in bf16. Nodes of one: every number is exact when it crosses."""
    poison_outputs()
    sums = []
    for per_node in (4, 2, 1):
        buffer = Buffer(None, 1, 8, 4, 4, backend=backend, ranks_per_node=per_node)
        assert buffer.ranks_per_node == per_node
        out = buffer.dispatch(torch.zeros(1, 8, dtype=torch.bfloat16), torch.arange(4)[None])
        value = [1.0, 256.0, 1.0, 0.0][rank]
        y = buffer.combine(torch.full((4, 8), value, dtype=torch.bfloat16), out.handle)
        assert (y == y[0, 0]).all()
        sums.append(y[0, 0].item())
    assert sums == [258.0, 258.0 if rank < 2 else 256.0, 258.0]


# ---- which ranks are a node ----


def on_hosts(rank: int, _: int, hosts: str) -> Any:
    """Ranks that say they are on these hosts, a letter each: ranks of a node, or the error."""
    rendezvous.host_id = lambda: f"host {hosts[rank]}"
    try:
        return Buffer(None, 1, 8, len(hosts), 1, timeout_s=60).ranks_per_node
    except ValueError as error:
        return str(error)


@pytest.mark.parametrize(("hosts", "per_node"), [("aaaa", 4), ("aabb", 2), ("abcd", 1), ("a", 1)])
def test_ranks_of_a_host_are_a_node(hosts, per_node):
    assert run_ranks(on_hosts, len(hosts), hosts) == [per_node] * len(hosts)


@pytest.mark.parametrize(
    ("hosts", "places"), [("aaab", "ranks 0 to 2 on host a, rank 3 on host b"), ("abab", "rank 0 on host a, rank 1 on host b, rank 2 on")]
)
def test_hosts_that_are_no_nodes(hosts, places):
    (message,) = set(run_ranks(on_hosts, 4, hosts))
    assert f"ranks lie on hosts as {places}" in message and "pass ranks_per_node" in message


@on_ranks(2)
def test_bad_nodes(rank: int) -> None:
    for number, error, message in (
        (0, ValueError, "ranks_per_node is 0"),
        (3, ValueError, "ranks_per_node is 3; it must be None or divide the group's 2 ranks"),
        (-1, ValueError, "ranks_per_node is -1"),
        (True, TypeError, "ranks_per_node is True; it must be an int"),
        (1.0, TypeError, "ranks_per_node is 1.0; it must be an int"),
        (1, EPMismatchError, r"ranks disagree on ranks_per_node \(rank 0: 2, rank 1: 1\)"),
    ):
        with pytest.raises(error if rank == 1 or error is EPMismatchError else EPPeerError, match=message):
            Buffer(None, 1, 8, 4, 1, timeout_s=60, ranks_per_node=number if rank == 1 else 2)


# ---- what crosses ----


@on_ranks(4)
def test_one_row_crosses_for_each_token_and_node(rank: int, num_ranks):
    """One row for each (token, other node) leaves a source in a dispatch and comes back in a combine, however many experts it has there."""
    case = Case([5, 0, 17, 9], num_topk=4, ranks_per_node=2)
    idxs = [case.routing(r) for r in range(num_ranks)]
    buffer = Buffer(None, 17, case.hidden, case.num_experts, 4, backend="collective", ranks_per_node=2)
    backend, crossed = buffer.calls.backend, []
    stock = backend._all_to_all

    def counting(step: Any, *rest: Any) -> Any:
        if step.parts[0].shape[1] == case.hidden:  # rows, and not what leads them
            crossed.append(sum(number for peer, number in enumerate(step.num_sent) if peer // 2 != rank // 2))
        return stock(step, *rest)

    backend._all_to_all = counting
    out = buffer.dispatch(torch.zeros(case.num_tokens[rank], case.hidden), idxs[rank])
    buffer.combine(out.recv_x, out.handle)

    def goes(source: int, node: int) -> int:
        return int(((idxs[source] >= 6 * node) & (idxs[source] < 6 * node + 6)).any(1).sum())

    other = 1 - rank // 2
    assert crossed == [goes(rank, other), 0, 0, goes(2 * other + rank % 2, rank // 2)]
