"""V1's low-latency calls against the reference: bits of rows and sums, and where rows came from."""

import os
import signal
import time
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from exchange_cases import assert_same, device_of, on_device, poison_outputs
from low_latency_cases import BLOCK, Case, Expected, unpack_scales

from deepep_moe.compat.deep_ep import Buffer
from deepep_moe.errors import EPMismatchError, EPPeerError
from deepep_moe.testing import run_ranks

COUNT = (1 << 32) - 1
SMALL = Case([6, 8, 7], max_tokens=8, num_experts=9, num_topk=4, masked=0.1, hidden=256, combine_weights=True)
MASKED = 1
on_every_backend = pytest.mark.parametrize("backend", ("shm", pytest.param("nvlink", marks=pytest.mark.gpu)))


def make_buffer(backend, rank, **options):
    """The group is gloo's, on GPUs too, as callers have it."""
    device_of(backend, rank)
    poison_outputs()
    dist.barrier()
    buffer = Buffer(dist.group.WORLD, low_latency_mode=True, **options)
    buffer.test_device = device_of(backend, rank)
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
        told = [None] * count
        for source in range(case.num_ranks):
            begin, num_rows = int(layout_range[expert, source]) >> 32, int(layout_range[expert, source]) & COUNT
            for row in range(begin, begin + num_rows):
                told[row] = (source, int(src_info[expert, row]))
        assert told == [sources[first + row] for row in range(count)], f"expert {expert}"
        first += count


def check_received(case, rank, received, counts, expected, scale_format):
    mine = expected.received[rank]
    assert counts == mine.num_recv_tokens_per_expert
    rows, scales = received if case.fp8 else (received, None)
    assert rows.shape == (case.num_experts // case.num_ranks, case.num_ranks * case.max_tokens, case.hidden)
    assert rows.dtype == (torch.float8_e4m3fn if case.fp8 else torch.bfloat16)
    first = 0
    for expert, count in enumerate(counts):
        assert_same(f"rows of expert {expert}", rows[expert, :count], mine.recv_x[first : first + count])
        if case.fp8:
            assert scales.stride(1) == 1
            own = unpack_scales(scales[expert, :count].cpu(), scale_format, case.hidden // BLOCK)
            assert_same(f"scales of expert {expert}", own, mine.recv_x_scales[first : first + count])
        first += count


def expert_rows(case, rank, counts, expected):
    """NaN where nothing was received."""
    x = torch.full((len(counts), case.num_ranks * case.max_tokens, case.hidden), torch.nan, dtype=torch.bfloat16)
    first = 0
    for expert, count in enumerate(counts):
        x[expert, :count] = expected.outputs[rank][first : first + count]
        first += count
    return x


def run_case(buffer, case, rank, *, round_scale=False, use_ue8m0=False, zero_copy=False):
    case = replace(case, scale_format="ue8m0" if round_scale else "fp32")
    expected = Expected(case)
    received, counts, handle, event, hook = dispatch(buffer, case, rank, round_scale=round_scale, use_ue8m0=use_ue8m0)
    end(case, event, hook)
    counts = counts.tolist()
    check_received(case, rank, received, counts, expected, "ue8m0" if use_ue8m0 else "fp32")
    check_sources(case, rank, handle, counts, expected)
    rows = expert_rows(case, rank, counts, expected)
    if zero_copy:
        view = buffer.get_next_low_latency_combine_buffer(handle)
        assert view.shape == rows.shape and view.dtype == torch.bfloat16
        view[:, :, :] = rows
        rows = torch.full_like(rows, torch.nan)
    out = torch.full_like(expected.combined[rank], torch.nan, device=buffer.test_device) if zero_copy else None
    y, event, hook = combine(buffer, case, rank, rows, handle, zero_copy=zero_copy, out=out)
    end(case, event, hook)
    assert out is None or y is out
    assert_same("combined_x", y, expected.combined[rank])


# ---- what comes ----


def by_hand(rank, _, backend):
    """Rank 0 holds experts 0 and 1, rank 1 holds 2 and 3; every expert returns 10 * x."""
    buffer = make_buffer(backend, rank)
    x = torch.tensor([[[1.0], [2.0]], [[3.0], [4.0]]])[rank].expand(2, 8).bfloat16().contiguous()
    idx = torch.tensor([[[0, 2], [3, -1]], [[2, 3], [0, 1]]])[rank]
    weights = torch.tensor([[[0.5, 0.25], [2.0, 9.0]], [[1.0, 1.0], [3.0, 0.0]]])[rank]
    x, idx, weights = on_device(backend, rank, x, idx, weights)
    rows, counts, handle, event, hook = buffer.low_latency_dispatch(x, idx, 2, 4, use_fp8=False)
    assert hook is None and event.event is None
    assert counts.tolist() == [[2, 1], [2, 2]][rank] and counts.dtype == torch.int32
    assert handle[0].tolist() == [[[0, 1, -1, -1], [1, -1, -1, -1]], [[0, 0, -1, -1], [1, 0, -1, -1]]][rank]
    one, two = 1, 1 << 32 | 1
    assert handle[1].tolist() == [[[one, two], [0, one]], [[one, two], [one, two]]][rank]
    y, _, _ = buffer.low_latency_combine(rows * 10, idx, weights, handle)
    assert y.tolist() == [[[7.5] * 8, [40.0] * 8], [[60.0] * 8, [120.0] * 8]][rank]


@on_every_backend
def test_by_hand(backend):
    run_ranks(by_hand, 2, backend)


def check_cases(rank, _, backend, cases):
    buffer = make_buffer(backend, rank)
    for case, options in cases:
        buffer.clean_low_latency_buffer(case.max_tokens, case.hidden, case.num_experts)
        run_case(buffer, case, rank, **options)
    buffer.destroy()


@on_every_backend
@pytest.mark.parametrize("num_ranks", (1, 2, 4))
def test_equals_reference(num_ranks, backend):
    """Hidden sizes and numbers of experts a token as V1 takes them, in all formats and ways to call, through one buffer."""
    modes, cases = ("now", "hook", "async"), []
    for number, (hidden, num_topk) in enumerate(((2048, 1), (2560, 2), (4096, 8), (5120, 16), (7168, 3))):
        tokens = [5, 0, 3, 8][:num_ranks]
        case = Case(tokens, max_tokens=8, hidden=hidden, num_topk=num_topk, num_experts=24, combine_weights=True, seed=number)
        for nth, options in enumerate((None, {}, dict(round_scale=True), dict(round_scale=True, use_ue8m0=True))):
            formatted = replace(case, fp8=options is not None, mode=modes[(number + nth) % 3])
            cases.append((formatted, dict(options or {}, zero_copy=nth % 2 == 0)))
    run_ranks(check_cases, num_ranks, backend, cases)


def over_nodes(rank, _, cases):
    buffer = make_buffer("nvshmem", rank, ranks_per_node=cases[0][0].ranks_per_node)
    for case, options in cases:
        run_case(buffer, case, rank, **options)
    buffer.destroy()


@pytest.mark.gpu
@pytest.mark.parametrize("per_node", (1, 2))
def test_equals_reference_over_nodes(per_node):
    case = Case([5, 0, 3, 8], max_tokens=8, hidden=256, num_topk=5, ranks_per_node=per_node, combine_weights=True)
    formats = (None, {}, dict(round_scale=True), dict(round_scale=True, use_ue8m0=True))
    cases = [
        (
            replace(case, fp8=options is not None, mode=("now", "hook", "async")[nth % 3], seed=nth),
            dict(options or {}, zero_copy=nth % 2 == 0),
        )
        for nth, options in enumerate(formats)
    ]
    run_ranks(over_nodes, 4, cases)


def two_batches(rank, _, backend):
    """Double batching: two handles alive, two calls in flight."""
    buffer = make_buffer(backend, rank)
    cases = [replace(SMALL, mode="hook", seed=seed) for seed in range(2)]
    expected = [Expected(case) for case in cases]
    for _ in range(3):
        sent = [dispatch(buffer, case, rank) for case in cases]
        counts = []
        for case, told, (rows, num_rows, _, _, hook) in zip(cases, expected, sent, strict=True):
            hook()
            counts.append(num_rows.tolist())
            check_received(case, rank, rows, counts[-1], told, "fp32")
        back = [
            combine(buffer, cases[i], rank, expert_rows(cases[i], rank, counts[i], expected[i]), sent[i][2]) for i in range(2)
        ]  # fmt: skip
        for told, (y, _, hook) in zip(expected, back, strict=True):
            hook()
            assert_same("combined_x", y, told.combined[rank])


@on_every_backend
def test_two_batches(backend):
    run_ranks(two_batches, 3, backend)


def beside_large_batches(rank, _, backend):
    """One buffer serves both kinds of calls by turns, as servers use it."""
    buffer = make_buffer(backend, rank)
    x, idx, weights = inputs(buffer, SMALL, rank)
    for _ in range(2):
        *_, per_expert, in_rank, _ = buffer.get_dispatch_layout(idx, SMALL.num_experts)
        routing = {"is_token_in_rank": in_rank, "num_tokens_per_expert": per_expert, "topk_idx": idx, "topk_weights": weights}
        recv_x, *_, handle, _ = buffer.dispatch(x, **routing)
        run_case(buffer, SMALL, rank)
        y, _, _ = buffer.combine(recv_x, handle)
        assert_same("sums", y, (x.float() * in_rank.sum(1, keepdim=True) + 0.0).bfloat16())  # a sum of -0.0 is 0.0
    dist.barrier()  # what a rank sends would end with it


@on_every_backend
def test_beside_large_batches(backend):
    run_ranks(beside_large_batches, 3, backend)


# ---- sizes ----


def sizes_of_steps(rank, _, backend, hinted):
    """Each step asks for as many tokens as it has. One buffer serves all where the constructor was given the bytes for the most of them;
    else one replaces another, each at least twice as large, and the last one stays."""
    hint = Buffer.get_low_latency_rdma_size_hint(40, SMALL.hidden, SMALL.num_ranks, SMALL.num_experts)
    buffer = make_buffer(backend, rank, num_rdma_bytes=hint if hinted else 0)
    formats = (None, {}, dict(round_scale=True), dict(round_scale=True, use_ue8m0=True))
    seen, kept = set(), []
    for number, most in enumerate((8, 9, 20, 40, 13, 8, 17, 39)):
        options = formats[number % 4]
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
        y, event, hook = combine(buffer, replace(SMALL, mode="now"), rank, rows, handle)
        assert not y.any()


@on_every_backend
@pytest.mark.parametrize("hinted", (True, False))
def test_sizes_of_steps(hinted, backend):
    run_ranks(sizes_of_steps, 3, backend, hinted)


def numbers_of_any_kind(rank, _):
    buffer = make_buffer("shm", rank)
    x, idx, _ = inputs(buffer, SMALL, rank)
    for most in (8, np.int64(8), torch.tensor(8), np.int32(8)):
        rows, _, handle, _, _ = buffer.low_latency_dispatch(x, idx, most, np.int64(SMALL.num_experts), use_fp8=False)
        assert rows.shape == (3, 24, SMALL.hidden) and type(handle[2]) is int
    assert len(buffer._low_latency._buffers) == 1
    for most, error in (
        (8.0, TypeError),
        (True, TypeError),
        (0, ValueError),
        (-1, ValueError),
        (1 << 16, ValueError),
        (len(x) - 1, ValueError),
    ):
        with pytest.raises(error, match="num_max_dispatch_tokens_per_rank"):
            buffer.low_latency_dispatch(x, idx, most, SMALL.num_experts)
    run_case(buffer, SMALL, rank)


def test_numbers_of_any_kind():
    run_ranks(numbers_of_any_kind, 3)


def heard_in_the_next_size(rank, _):
    """A rank refuses its call of one size. Its peers are in a call of another one."""
    buffer = make_buffer("shm", rank)
    run_case(buffer, replace(SMALL, max_tokens=16), rank)
    bad = dict(use_nvfp4=True) if rank == 1 else {}
    began = time.monotonic()
    with pytest.raises(NotImplementedError if rank == 1 else EPPeerError, match="use_nvfp4 is not served"):
        dispatch(buffer, replace(SMALL, max_tokens=8 + (rank == 1)), rank, **bad)
    assert time.monotonic() - began < 30
    run_case(buffer, SMALL, rank)


def test_heard_in_the_next_size():
    run_ranks(heard_in_the_next_size, 3)


def too_small_on_a_rank(rank, _):
    """Rank 0 has room for one row of its expert, and two come."""
    buffer = make_buffer("shm", rank)
    x, idx = torch.ones(2, 8, dtype=torch.bfloat16), torch.zeros(2, 1, dtype=torch.int64)
    buffer.low_latency_dispatch(x, idx, 4, 2, use_fp8=False)
    x, idx = (x[:0], idx[:0]) if rank == 0 else (x, idx)
    if rank == 0:
        with pytest.raises(EPMismatchError, match="receives 3 rows and has room for 2; .* num_max_dispatch_tokens_per_rank"):
            buffer.low_latency_dispatch(x, idx, 1, 2, use_fp8=False)
    else:
        x, idx = torch.ones(3, 8, dtype=torch.bfloat16), torch.zeros(3, 1, dtype=torch.int64)
        buffer.low_latency_dispatch(x, idx, 3, 2, use_fp8=False)
    dist.barrier()


def test_too_small_on_a_rank():
    run_ranks(too_small_on_a_rank, 2)


def keeps_few_buffers(rank, _):
    """Calls of many hidden sizes and numbers of experts leave as many buffers as are allowed, and handles of the first ones go on."""
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


def test_keeps_few_buffers():
    run_ranks(keeps_few_buffers, 2)


# ---- what is counted ----


def counts_rows(rank, _, backend, mode):
    case = replace(SMALL, mode=mode)
    expected = Expected(case)
    buffer = make_buffer(backend, rank)
    told = torch.tensor(expected.received[rank].num_recv_tokens_per_expert)
    stats = torch.zeros(3, dtype=torch.int32, device=buffer.test_device)
    for calls in (1, 2):
        _, counts, _, event, hook = dispatch(buffer, case, rank, cumulative_local_expert_recv_stats=stats)
        if mode == "hook":
            assert torch.equal(stats.cpu(), told * (calls - 1))
        end(case, event, hook)
        assert torch.equal(counts.cpu(), told) and torch.equal(stats.cpu(), told * calls)


@on_every_backend
@pytest.mark.parametrize("mode", ("now", "hook", "async"))
def test_rows_are_counted(mode, backend):
    run_ranks(counts_rows, 3, backend, mode)


def counts_waits(rank, _, backend, mode):
    case = replace(SMALL, mode=mode)
    expected = Expected(case)
    buffer = make_buffer(backend, rank)
    dispatch_stats, combine_stats = (torch.zeros(3, dtype=torch.int64, device=buffer.test_device) for _ in range(2))
    _, counts, handle, event, hook = dispatch(buffer, case, rank)
    end(case, event, hook)
    rows = expert_rows(case, rank, counts.tolist(), expected)

    def late(stats, call):
        dist.barrier()
        time.sleep(0.6 if rank == 2 else 0)
        *_, event, hook = call()
        end(case, event, hook)
        if rank != 2:
            assert stats[2] > 3e8 and stats[rank] < stats[2] / 2, stats

    late(dispatch_stats, lambda: dispatch(buffer, case, rank, dispatch_wait_recv_cost_stats=dispatch_stats))
    late(combine_stats, lambda: combine(buffer, case, rank, rows, handle, combine_wait_recv_cost_stats=combine_stats))


@on_every_backend
@pytest.mark.parametrize("mode", ("now", "hook", "async"))
def test_waits_are_counted(mode, backend):
    run_ranks(counts_waits, 3, backend, mode)


# ---- ranks that are gone ----


def status(buffer):
    told = torch.full((3,), 7, dtype=torch.int32, device=buffer.test_device)
    buffer.low_latency_query_mask_buffer(told)
    return told.tolist()


def masks(rank, _, backend):
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


@on_every_backend
def test_masks(backend):
    run_ranks(masks, 3, backend)


def masked_first(rank, _, backend):
    """A mask that is set before the first call is in force in it."""
    buffer = make_buffer(backend, rank, enable_shrink=True)
    for other in (0, 2) if rank == MASKED else (MASKED,):
        buffer.low_latency_update_mask_buffer(other, True)
    if rank == MASKED:  # it takes part in making the buffer
        dispatch(buffer, SMALL, rank)
        assert status(buffer) == [1, 0, 1]
    else:
        assert status(buffer) == [0, 1, 0]
        run_case(buffer, replace(SMALL, without=MASKED), rank)


@on_every_backend
def test_mask_before_the_first_call(backend):
    run_ranks(masked_first, 3, backend)


def dies(rank, _, backend):
    """With enable_shrink, those that are left go on without a rank that ended."""
    buffer = make_buffer(backend, rank, enable_shrink=True)
    run_case(buffer, SMALL, rank)
    dist.barrier()
    if rank == MASKED:
        os.kill(os.getpid(), signal.SIGKILL)
    run_case(buffer, replace(SMALL, without=MASKED), rank)
    assert status(buffer) == [0, 1, 0]


@on_every_backend
def test_rank_that_dies(backend):
    run_ranks(dies, 3, backend, expected_dead=[MASKED])


# ---- what is refused ----


def refusals(rank, _, backend):
    buffer = make_buffer(backend, rank)
    x, idx, weights = inputs(buffer, SMALL, rank)
    rows, _, handle, _, _ = dispatch(buffer, SMALL, rank)
    for options, error, message in [
        (dict(use_nvfp4=True), NotImplementedError, "low_latency_dispatch: use_nvfp4 is not served, as rows do not travel in NVFP4"),
        (dict(x_global_scale=torch.ones(1)), NotImplementedError, "low_latency_dispatch: x_global_scale is not served"),
        (dict(async_finish=True, return_recv_hook=True), ValueError, "async_finish and return_recv_hook are both True; choose one"),
        (dict(use_ue8m0=True), ValueError, "use_ue8m0 is True without round_scale; .* pass round_scale=True"),
        (dict(cumulative_local_expert_recv_stats=torch.zeros(9, dtype=torch.int32)), ValueError, r"recv_stats has shape \[9\]; it must"),
        (
            dict(dispatch_wait_recv_cost_stats=torch.zeros(3)),
            TypeError,
            "dispatch_wait_recv_cost_stats has dtype float32; it must be int64",
        ),
    ]:
        with pytest.raises(error, match=message):
            buffer.low_latency_dispatch(x, idx, SMALL.max_tokens, SMALL.num_experts, **options)
    with pytest.raises(ValueError, match="topk_idx is None"):
        buffer.low_latency_dispatch(x, None, SMALL.max_tokens, SMALL.num_experts)
    for options, error, message in [
        (dict(use_logfmt=True), NotImplementedError, "low_latency_combine: use_logfmt is not served, .* pass use_logfmt=False"),
        (dict(overlap=True), NotImplementedError, "low_latency_combine: overlap is not served"),
        (dict(src_signals=torch.zeros(1)), NotImplementedError, "low_latency_combine: signals is not served"),
        (dict(comp_signal=torch.zeros(1)), NotImplementedError, "low_latency_combine: signals is not served"),
        (dict(handle=tuple(handle)), TypeError, "handle is a tuple; pass what low_latency_dispatch returned, not a copy"),
        (dict(topk_idx=idx[:2]), ValueError, r"topk_idx has shape \[2, 4\]; it must be"),
    ]:
        given = dict(x=rows, topk_idx=idx, topk_weights=weights, handle=handle) | options
        with pytest.raises(error, match=message):
            buffer.low_latency_combine(**given)
    run_case(buffer, SMALL, rank)


@on_every_backend
def test_what_is_refused(backend):
    run_ranks(refusals, 3, backend)


def refused_before_it_sends(rank, _, backend):
    """A wrong counter of one rank, in calls whose hooks nobody would get."""
    buffer = make_buffer(backend, rank)
    _, idx, weights = inputs(buffer, SMALL, rank)
    rows, _, handle, _, _ = dispatch(buffer, SMALL, rank)
    wrong = torch.zeros(5, device=buffer.test_device)
    calls = [
        lambda **options: dispatch(buffer, SMALL, rank, return_recv_hook=True, **options)[4],
        lambda **options: buffer.low_latency_combine(rows, idx, weights, handle, return_recv_hook=True, **options)[2],
    ]
    for number, name in (
        (0, "cumulative_local_expert_recv_stats"),
        (0, "dispatch_wait_recv_cost_stats"),
        (1, "combine_wait_recv_cost_stats"),
    ):
        for _ in range(3):
            # On GPUs the third rank may hear of it from the one that has refused because of the culprit.
            refused = f"{name} has dtype float32" if rank == 1 else f"{name} has dtype float32|rank 1 did not make its call"
            with pytest.raises(TypeError if rank == 1 else EPPeerError, match=refused):
                calls[number](**({name: wrong} if rank == 1 else {}))()
                native = handle.buffer  # on a GPU the next look says it
                torch.cuda.synchronize() if backend == "nvlink" else None
                native.check()
    run_case(buffer, SMALL, rank)


@on_every_backend
def test_refused_before_it_sends(backend):
    run_ranks(refused_before_it_sends, 3, backend)


def different_sizes(rank, _, backend):
    buffer = make_buffer(backend, rank)
    x, idx, _ = inputs(buffer, SMALL, rank)
    with pytest.raises(EPMismatchError, match="num_max_tokens_per_rank"):
        buffer.low_latency_dispatch(x, idx, 8 + rank, SMALL.num_experts)
    run_case(buffer, SMALL, rank)


@on_every_backend
def test_ranks_with_different_sizes(backend):
    run_ranks(different_sizes, 3, backend)


def hinted(rank, _, backend):
    """At least what is allocated."""
    hint = Buffer.get_low_latency_rdma_size_hint(SMALL.max_tokens, SMALL.hidden, 3, SMALL.num_experts)
    assert isinstance(hint, int)
    buffer = make_buffer(backend, rank)
    run_case(buffer, SMALL, rank)
    made = [native.workspace_bytes for native in buffer._low_latency._buffers.values()]
    assert len(made) == 1 and made[0] <= hint < 2 * made[0]


@on_every_backend
def test_size_hint(backend):
    run_ranks(hinted, 3, backend)
