"""V1's low-latency calls against the reference: bits of rows and sums, and where rows came from."""

import os
import signal
import time
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from deep_ep_cases import BACKENDS, make
from exchange_cases import assert_same
from low_latency_cases import Case, Expected, check_dispatch, combine_rows
from on_ranks import on_ranks

from deepep_moe.compat.deep_ep import Buffer
from deepep_moe.errors import EPMismatchError, EPPeerError
from deepep_moe.testing import run_ranks

COUNT = (1 << 32) - 1
SMALL = Case([6, 8, 7], max_tokens=8, num_experts=9, num_topk=4, masked=0.1, hidden=256, combine_weights=True)
MASKED = 1
FORMATS = (None, {}, {"round_scale": True}, {"round_scale": True, "use_ue8m0": True})


def make_buffer(backend, rank, **options):
    """The group is gloo's, on GPUs too, as callers have it."""
    dist.barrier()
    buffer, device = make("Buffer", backend, rank, low_latency_mode=True, **options)
    buffer.test_device = device
    return buffer


def inputs(buffer, case, rank):
    return [tensor.to(buffer.test_device) for tensor in case.inputs(rank)]


def dispatch(buffer, case, rank, **options):
    x, idx, _ = inputs(buffer, case, rank)
    options = dict(use_fp8=case.fp8, async_finish=case.mode == "async", return_recv_hook=case.mode == "hook") | options
    return buffer.low_latency_dispatch(x, idx, case.max_tokens, case.num_experts, **options)


def combine(buffer, case, rank, rows, handle, **options):
    _, idx, weights = inputs(buffer, case, rank)
    options = dict(async_finish=case.mode == "async", return_recv_hook=case.mode == "hook") | options
    return buffer.low_latency_combine(rows.to(buffer.test_device), idx, weights, handle, **options)


def end(case, event, hook):
    assert (hook is not None) == (case.mode == "hook")
    if case.mode == "hook":
        hook()
    elif case.mode == "async":
        event.current_stream_wait()


def check_sources(case, rank, handle, counts, expected):
    """The first two of the handle, as V1's test reads them."""
    src_info, layout_range, *sizes = handle
    assert len(handle) == 5 and sizes == [case.max_tokens, case.hidden, case.num_experts]
    assert handle[2] == case.max_tokens and torch.equal(handle[0], src_info) and torch.equal(handle[1], layout_range)
    assert src_info.dtype == torch.int32 and layout_range.dtype == torch.int64
    mine = expected.received[rank]
    sources = {row: mine.tokens[slot] for slot, rows in enumerate(mine.row_of_lane) for row in rows.values()}
    first = 0
    for expert, count in enumerate(counts):
        received = [None] * count
        for source in range(case.num_ranks):
            begin, num_rows = int(layout_range[expert, source]) >> 32, int(layout_range[expert, source]) & COUNT
            for row in range(begin, begin + num_rows):
                received[row] = (source, int(src_info[expert, row]))
        assert received == [sources[first + row] for row in range(count)], f"expert {expert}"
        first += count


def check_received(case, rank, received, counts, expected):
    """Check V1's results of a dispatch, and return them in the form of a LowLatencyBuffer's."""
    rows, scales = received if case.fp8 else (received, None)
    assert rows.shape == (case.num_experts // case.num_ranks, case.num_ranks * case.max_tokens, case.hidden)
    assert rows.dtype == (torch.float8_e4m3fn if case.fp8 else torch.bfloat16)
    assert counts.dtype == torch.int32
    out = SimpleNamespace(recv_x=rows, recv_x_scales=scales, num_recv_tokens_per_expert=counts)
    check_dispatch(case, rank, out, expected)
    return out


def run_case(buffer, case, rank, *, round_scale=False, use_ue8m0=False, zero_copy=False):
    expected = Expected(replace(case, scale_format="ue8m0" if round_scale else "fp32"))
    received, counts, handle, event, hook = dispatch(buffer, case, rank, round_scale=round_scale, use_ue8m0=use_ue8m0)
    end(case, event, hook)
    received = check_received(replace(case, scale_format="ue8m0" if use_ue8m0 else "fp32"), rank, received, counts, expected)
    check_sources(case, rank, handle, counts.tolist(), expected)
    rows, out = combine_rows(case, rank, received, expected), None
    if zero_copy:
        view = buffer.get_next_low_latency_combine_buffer(handle)
        assert view.shape == rows.shape and view.dtype == torch.bfloat16
        view[:, :, :] = rows
        rows = torch.full_like(rows, torch.nan)
        out = torch.full_like(expected.combined[rank], torch.nan, device=buffer.test_device)
    y, event, hook = combine(buffer, case, rank, rows, handle, zero_copy=zero_copy, out=out)
    end(case, event, hook)
    assert out is None or y is out
    assert_same("combined_x", y, expected.combined[rank])


# ---- what comes ----


@on_ranks(3, backend=BACKENDS)
def test_sums_by_lanes(rank, backend):
    """One setting gives the bits of DeepEP's own sum, a fused multiply-add for each lane, and rows lie where they did."""
    os.environ["DEEPEP_MOE_SUMS"] = "lanes_fma"
    buffer = make_buffer(backend, rank)
    run_case(buffer, replace(SMALL, sums="lanes_fma"), rank)
    run_case(buffer, replace(SMALL, sums="lanes_fma", fp8=True, mode="hook"), rank, zero_copy=True)


def in_all_formats(case, number=0):
    """Cases and options of calls, in all ways to call."""
    for nth, options in enumerate(FORMATS):
        mode = ("now", "hook", "async")[(number + nth) % 3]
        yield replace(case, fp8=options is not None, mode=mode, seed=number + nth), dict(options or {}, zero_copy=nth % 2 == 0)


def check_cases(rank, _, backend, cases):
    buffer = make_buffer(backend, rank, ranks_per_node=cases[0][0].ranks_per_node)
    for case, options in cases:
        buffer.clean_low_latency_buffer(case.max_tokens, case.hidden, case.num_experts)
        run_case(buffer, case, rank, **options)
    buffer.destroy()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("num_ranks", (1, 2, 4))
def test_equals_reference(num_ranks, backend):
    """Hidden sizes and numbers of experts a token as V1 takes them, in all formats and ways to call, through one buffer."""
    cases = []
    for number, (hidden, num_topk) in enumerate(((2048, 1), (2560, 2), (4096, 8), (5120, 16), (7168, 3))):
        case = Case([5, 0, 3, 8][:num_ranks], max_tokens=8, hidden=hidden, num_topk=num_topk, combine_weights=True)
        cases += in_all_formats(case, number)
    run_ranks(check_cases, num_ranks, backend, cases)


@pytest.mark.gpu
@pytest.mark.parametrize("per_node", (1, 2))
def test_equals_reference_over_nodes(per_node):
    case = Case([5, 0, 3, 8], max_tokens=8, hidden=256, num_topk=5, ranks_per_node=per_node, combine_weights=True)
    run_ranks(check_cases, 4, "nvshmem", [*in_all_formats(case)])


# ---- sizes ----


@on_ranks(3, hinted=(True, False), backend=BACKENDS)
def test_sizes_of_steps(rank, hinted, backend):
    """Each step asks for as many tokens as it has. One buffer serves all where the constructor was given the bytes for the most of them;
    else one replaces another, each at least twice as large, and the last one stays."""
    hint = Buffer.get_low_latency_rdma_size_hint(40, SMALL.hidden, SMALL.num_ranks, SMALL.num_experts)
    buffer = make_buffer(backend, rank, num_rdma_bytes=hint if hinted else 0)
    seen, kept = set(), []
    for number, most in enumerate((8, 9, 20, 40, 13, 8, 17, 39)):
        options = FORMATS[number % 4]
        case = replace(SMALL, max_tokens=most, fp8=options is not None, mode=("now", "hook", "async")[number % 3], seed=number)
        received, _, handle, event, hook = dispatch(buffer, case, rank)
        end(case, event, hook)
        assert all(part.is_contiguous() for part in (received[0] if case.fp8 else received, handle[0], handle[1]))
        run_case(buffer, case, rank, **(options or {}), zero_copy=number % 2 == 1)
        (native,) = buffer._low_latency._buffers.values()
        seen.add(native.num_max_tokens_per_rank)
        kept.append(handle)
    assert seen == ({40} if hinted else {8, 16, 32, 64})
    for number, handle in enumerate(kept[:2]):  # their buffers are there as long as they are
        rows = torch.zeros(3, SMALL.num_ranks * (8, 9)[number], SMALL.hidden, dtype=torch.bfloat16)
        y, event, hook = combine(buffer, replace(SMALL, mode="now", seed=number), rank, rows, handle)
        assert not y.any()


@on_ranks(3)
def test_sizes_of_any_kind(rank):
    buffer = make_buffer("shm", rank)
    x, idx, _ = inputs(buffer, SMALL, rank)
    for most in (8, np.int64(8), torch.tensor(8), np.int32(8)):
        rows, _, handle, _, _ = buffer.low_latency_dispatch(x, idx, most, np.int64(SMALL.num_experts), use_fp8=False)
        assert rows.shape == (3, 24, SMALL.hidden) and type(handle[2]) is int
        for index in (5, 7, -6):
            with pytest.raises(IndexError):
                handle[index]
    assert len(buffer._low_latency._buffers) == 1
    for most in (8.0, True, 0, -1, 1 << 16, len(x) - 1):
        with pytest.raises(TypeError if type(most) in (float, bool) else ValueError, match="num_max_dispatch_tokens_per_rank"):
            buffer.low_latency_dispatch(x, idx, most, SMALL.num_experts)
    run_case(buffer, replace(SMALL, max_tokens=16), rank)
    bad, began = {"use_nvfp4": True} if rank == 1 else {}, time.monotonic()
    with pytest.raises(NotImplementedError if rank == 1 else EPPeerError, match="use_nvfp4 is not served"):  # in calls of different sizes
        dispatch(buffer, replace(SMALL, max_tokens=8 + (rank == 1)), rank, **bad)
    assert time.monotonic() - began < 30
    run_case(buffer, SMALL, rank)


@on_ranks(2)
def test_too_small_on_a_rank_and_few_buffers(rank):
    """Rank 0 has room for two rows of its expert, and three come."""
    buffer = make_buffer("shm", rank)
    idx = torch.zeros(3, 1, dtype=torch.int64)
    x = torch.ones(3, 8, dtype=torch.bfloat16)
    buffer.low_latency_dispatch(x, idx, 4, 2, use_fp8=False)
    if rank == 0:
        with pytest.raises(EPMismatchError, match="receives 3 rows and has room for 2; .* num_max_dispatch_tokens_per_rank"):
            buffer.low_latency_dispatch(x[:0], idx[:0], 1, 2, use_fp8=False)
    else:
        buffer.low_latency_dispatch(x, idx, 3, 2, use_fp8=False)
    dist.barrier()

    # Calls of many hidden sizes and numbers of experts leave as many buffers as are allowed, and handles of the first ones go on.
    buffer, handles = make_buffer("shm", rank), []
    for hidden in range(8, 8 * 15, 8):
        x, idx = torch.full((1, hidden), float(rank + 1)).bfloat16(), torch.tensor([[1 - rank]])
        rows, _, handle, _, _ = buffer.low_latency_dispatch(x, idx, 2, 2, use_fp8=False)
        handles.append((rows, idx, handle))
    assert len(buffer._low_latency._buffers) == 8
    for rows, idx, handle in (handles[0], handles[-1]):
        y, _, _ = buffer.low_latency_combine(rows * 3, idx, torch.ones(1, 1), handle)
        assert (y == 3 * (rank + 1)).all()
    buffer.destroy()


# ---- what is counted ----


@on_ranks(3, mode=("now", "hook", "async"), backend=BACKENDS)
def test_statistics(rank, mode, backend):
    """Rows, over all calls, and how long rank 2 was waited for. The first call makes the buffer, in which all ranks wait."""
    case = replace(SMALL, mode=mode)
    expected, buffer = Expected(case), make_buffer(backend, rank)
    counted = torch.tensor(expected.received[rank].num_recv_tokens_per_expert)
    rows_stats = torch.zeros(3, dtype=torch.int32, device=buffer.test_device)
    for calls in (1, 2):
        dispatch_stats, combine_stats = (torch.zeros(3, dtype=torch.int64, device=buffer.test_device) for _ in range(2))
        dist.barrier()
        time.sleep(0.6 if rank == 2 else 0)
        counters = {"cumulative_local_expert_recv_stats": rows_stats, "dispatch_wait_recv_cost_stats": dispatch_stats}
        rows, counts, handle, event, hook = dispatch(buffer, case, rank, **counters)
        if mode == "hook":
            assert torch.equal(rows_stats.cpu(), counted * (calls - 1))
        end(case, event, hook)
        assert torch.equal(counts.cpu(), counted) and torch.equal(rows_stats.cpu(), counted * calls)
        rows = combine_rows(case, rank, check_received(case, rank, rows, counts, expected), expected)
        dist.barrier()
        time.sleep(0.6 if rank == 2 else 0)
        *_, event, hook = combine(buffer, case, rank, rows, handle, combine_wait_recv_cost_stats=combine_stats)
        end(case, event, hook)
    for stats in (dispatch_stats, combine_stats):
        assert rank == 2 or (stats[2] > 3e8 and stats[rank] < stats[2] / 2), stats


# ---- ranks that are gone ----


def status(buffer):
    mask = torch.full((3,), 7, dtype=torch.int32, device=buffer.test_device)
    buffer.low_latency_query_mask_buffer(mask)
    return mask.tolist()


@on_ranks(3, backend=BACKENDS)
def test_masks(rank, backend):
    first = make_buffer(backend, rank, enable_shrink=True)  # whose masks are set before its first call
    for other in (0, 2) if rank == MASKED else (MASKED,):
        first.low_latency_update_mask_buffer(other, True)
    assert status(first) == ([1, 0, 1] if rank == MASKED else [0, 1, 0])
    if rank == MASKED:  # it takes part in making the buffer
        dispatch(first, SMALL, rank)
        assert status(first) == [1, 0, 1]
    else:
        run_case(first, replace(SMALL, without=MASKED), rank)
    buffer = make_buffer(backend, rank, enable_shrink=True)
    assert status(buffer) == [0, 0, 0]
    run_case(buffer, SMALL, rank)
    if rank != MASKED:
        buffer.low_latency_update_mask_buffer(MASKED, True)
        assert status(buffer) == [0, 1, 0]
        run_case(buffer, replace(SMALL, without=MASKED), rank)
    dist.barrier()
    if rank == MASKED:
        buffer.low_latency_rejoin()
    else:
        buffer.low_latency_clean_mask_buffer()
    assert status(buffer) == [0, 0, 0]
    run_case(buffer, SMALL, rank)


@on_ranks(3, expected_dead=[MASKED], backend=BACKENDS)
def test_rank_that_dies(rank, backend):
    """With enable_shrink, the remaining ranks go on without a rank that ended."""
    buffer = make_buffer(backend, rank, enable_shrink=True)
    run_case(buffer, SMALL, rank)
    dist.barrier()
    if rank == MASKED:
        os.kill(os.getpid(), signal.SIGKILL)
    run_case(buffer, replace(SMALL, without=MASKED), rank)
    assert status(buffer) == [0, 1, 0]


# ---- what is refused ----


@on_ranks(3, backend=BACKENDS)
def test_what_is_refused(rank, backend):
    buffer = make_buffer(backend, rank)
    x, idx, weights = inputs(buffer, SMALL, rank)
    rows, _, handle, _, _ = dispatch(buffer, SMALL, rank)
    sent = {"x": x, "topk_idx": idx, "num_max_dispatch_tokens_per_rank": SMALL.max_tokens, "num_experts": SMALL.num_experts}
    returned = {"x": rows, "topk_idx": idx, "topk_weights": weights, "handle": handle}
    one = torch.zeros(1)
    for call, arguments, options, error, message in [
        (buffer.low_latency_dispatch, sent, dict(use_nvfp4=True), NotImplementedError, "use_nvfp4 is not served"),
        (buffer.low_latency_dispatch, sent, dict(x_global_scale=one), NotImplementedError, "x_global_scale is not served"),
        (buffer.low_latency_dispatch, sent, dict(async_finish=True, return_recv_hook=True), ValueError, "are both True; choose one"),
        (buffer.low_latency_dispatch, sent, dict(use_ue8m0=True), ValueError, "use_ue8m0 is True without round_scale"),
        (buffer.low_latency_dispatch, sent, dict(cumulative_local_expert_recv_stats=one.int()), ValueError, r"stats has shape \[1\]"),
        (buffer.low_latency_dispatch, sent, dict(dispatch_wait_recv_cost_stats=torch.zeros(3)), TypeError, "cost_stats has dtype float32"),
        (buffer.low_latency_dispatch, sent, dict(topk_idx=None), ValueError, "topk_idx is None"),
        (buffer.low_latency_combine, returned, dict(use_logfmt=True), NotImplementedError, "use_logfmt is not served"),
        (buffer.low_latency_combine, returned, dict(overlap=True), NotImplementedError, "overlap is not served"),
        (buffer.low_latency_combine, returned, dict(src_signals=one), NotImplementedError, "signals is not served"),
        (buffer.low_latency_combine, returned, dict(comp_signal=one), NotImplementedError, "signals is not served"),
        (buffer.low_latency_combine, returned, dict(handle=tuple(handle)), TypeError, "handle is a tuple; it must be the DispatchHandle"),
        (buffer.low_latency_combine, returned, dict(topk_idx=idx[:2]), ValueError, r"topk_idx has shape \[2, 4\]"),
    ]:
        with pytest.raises(error, match=message):
            call(**(arguments | options))
    run_case(buffer, SMALL, rank)


@on_ranks(3, backend=BACKENDS)
def test_refused_before_it_sends(rank, backend):
    """A wrong counter of one rank, in calls whose hooks nobody would get."""
    buffer = make_buffer(backend, rank)
    rows, _, handle, _, _ = dispatch(buffer, SMALL, rank)
    wrong = torch.zeros(5, device=buffer.test_device)
    sends = partial(dispatch, buffer, SMALL, rank, return_recv_hook=True)
    returns = partial(combine, buffer, SMALL, rank, rows, handle, return_recv_hook=True)
    for call, name in (
        (sends, "cumulative_local_expert_recv_stats"),
        (sends, "dispatch_wait_recv_cost_stats"),
        (returns, "combine_wait_recv_cost_stats"),
    ):
        for _ in range(3):
            # On GPUs the third rank may hear of it from the one that has refused because of the culprit.
            refused = f"{name} has dtype float32" + ("" if rank == 1 else "|rank 1 did not make its call")
            with pytest.raises(TypeError if rank == 1 else EPPeerError, match=refused):
                *_, hook = call(**({name: wrong} if rank == 1 else {}))
                hook()
                torch.cuda.synchronize() if backend == "nvlink" else None
                handle.buffer.check()  # on a GPU the next look says it
    run_case(buffer, SMALL, rank)


@on_ranks(3, backend=BACKENDS)
def test_ranks_with_different_sizes(rank, backend):
    buffer = make_buffer(backend, rank)
    x, idx, _ = inputs(buffer, SMALL, rank)
    with pytest.raises(EPMismatchError, match="num_max_tokens_per_rank"):
        buffer.low_latency_dispatch(x, idx, 8 + rank, SMALL.num_experts)
    run_case(buffer, SMALL, rank)
    hint = Buffer.get_low_latency_rdma_size_hint(SMALL.max_tokens, SMALL.hidden, 3, SMALL.num_experts)
    (native,) = buffer._low_latency._buffers.values()
    assert isinstance(hint, int) and native.workspace_bytes <= hint < 2 * native.workspace_bytes, "at least what is allocated"
