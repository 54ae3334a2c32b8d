"""The nvlink backend against the reference, bit for bit; several ranks share a GPU where there are fewer."""

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist
from exchange_cases import Case, check_case, device_of

from deepep_moe import Buffer
from deepep_moe.errors import EPCapacityError, EPPeerError, EPTimeoutError
from deepep_moe.testing import run_ranks

pytestmark = pytest.mark.gpu
LAYOUTS = ("expert", "rank")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16), ids=str)
@pytest.mark.parametrize("num_tokens", ([13], [9, 21], [5, 0, 17], [300, 1, 130, 0]), ids=str)
def test_equals_reference(num_tokens, dtype, layout):
    case = Case(num_tokens, dtype=dtype, layout=layout, expert_alignment=4, with_bias=True, backends=("nvlink",))
    run_ranks(check_case, case.num_ranks, case)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("pattern", ("one_expert", "one_rank", "skewed", "masked", "nobody"))
def test_uneven_routings(pattern, layout):
    case = Case([140, 3, 0], pattern=pattern, layout=layout, dtype=torch.bfloat16, index_dtype=torch.int32, backends=("nvlink",))
    run_ranks(check_case, case.num_ranks, case)


@pytest.mark.parametrize("hidden", (8, 72, 2880, 7168))
def test_hidden_sizes(hidden):
    run_ranks(check_case, 2, Case([33, 20], hidden=hidden, dtype=torch.bfloat16, backends=("nvlink",)))


# ---- errors ----

IDX = [[0, 2], [1, 3], [3, 0], [2, -1]]


def make_buffer(rank, timeout_s=20.0):
    device_of("nvlink", rank)
    buffer = Buffer(None, 8, 16, 4, 2, backend="nvlink", timeout_s=timeout_s)
    return buffer, torch.randn(4, 16, device="cuda"), torch.tensor(IDX, device="cuda")


def bad_arguments(rank, num_ranks):
    buffer, x, idx = make_buffer(rank)
    for changes, error, message in [
        (dict(x=x.double()), TypeError, "x has dtype float64"),
        (dict(x=x.cpu()), ValueError, "x is on cpu; backend 'nvlink' moves tensors on cuda"),
        (dict(topk_idx=idx[:3]), ValueError, r"topk_idx has shape \[3, 2\]"),
        (dict(topk_idx=idx + 1), ValueError, r"topk_idx\[[12], [01]\] is 4; it must be -1 \(no expert\) or 0 to 3"),
        (dict(topk_idx=idx * 0), ValueError, "names expert 0 twice"),
    ]:
        with pytest.raises(error if rank == 0 else EPPeerError, match=message if rank == 0 else "rank 0 refused its arguments"):
            buffer.dispatch(**(dict(x=x, topk_idx=idx) | (changes if rank == 0 else {})))
        out = buffer.dispatch(x, idx)
        assert torch.isfinite(buffer.combine(out.recv_x, out.handle)).all(), "usable afterwards"


def test_bad_arguments():
    run_ranks(bad_arguments, 2)


def late_peer(rank, num_ranks):
    buffer, x, idx = make_buffer(rank, timeout_s=1.0)
    buffer.dispatch(x, idx)
    if rank == 1:
        time.sleep(4)
        return
    with pytest.raises(EPTimeoutError, match="rank 1 did not deliver .*phase 'entry into the call', expected 2, seen 1") as info:
        buffer.dispatch(x, idx)
    assert (info.value.rank, info.value.phase) == (1, "entry into the call")
    assert (x + 1).isfinite().all(), "the GPU stays usable"


def test_late_peer():
    run_ranks(late_peer, 2)


def dead_peer(rank, num_ranks):
    buffer, x, idx = make_buffer(rank, timeout_s=2.0)
    handle = buffer.dispatch(x, idx).handle
    torch.cuda.synchronize()
    dist.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    buffer.combine(torch.zeros(handle.num_rows, 16, device="cuda"), handle)
    torch.cuda.synchronize()
    with pytest.raises(EPTimeoutError, match="rank 1 did not deliver"):
        buffer.combine(torch.zeros(handle.num_rows, 16, device="cuda"), handle)
    assert (x + 1).isfinite().all(), "the GPU stays usable"


def test_dead_peer():
    run_ranks(dead_peer, 2, expected_dead=[1])


def exceeded_bound(rank, num_ranks):
    buffer, x, idx = make_buffer(rank)
    with pytest.raises(EPCapacityError, match="rank 0 would receive 7 rows, more than its num_recv_rows of 3"):
        buffer.dispatch(x, idx, num_recv_rows=3)
    buffer.dispatch(x, idx)


def test_exceeded_bound():
    run_ranks(exceeded_bound, 1)
