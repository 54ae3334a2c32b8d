"""Low-latency calls over nodes against the reference, bit for bit: nodes of one host, on the emulated GPU by a hostile network."""

import time
from dataclasses import replace

import emulated_gpu
import pytest
import torch
import torch.distributed as dist
from exchange_cases import NETWORK, assert_same, bytes_put, device_of, in_environment, look
from low_latency_cases import (
    Case,
    Expected,
    check_cases,
    check_dispatch,
    combine_rows,
    combined_without,
    come_back,
    make_buffer,
    run_case,
    start_combine,
    start_dispatch,
)
from on_ranks import on_ranks

from deepep_moe import LowLatencyBuffer, reference
from deepep_moe.errors import EPMismatchError, EPPeerError, EPTimeoutError
from deepep_moe.testing import run_ranks

pytestmark = pytest.mark.gpu

# nodes x ranks: (ranks, of a node)
SPLITS = {"2x1": (2, 1), "2x2": (4, 2), "4x1": (4, 1), "3x2": (6, 2), "2x4": (8, 4), "4x2": (8, 2), "8x1": (8, 1)}
NUM_TOKENS = [9, 21, 0, 17, 1, 24, 5, 12]


def case_of(split, num_tokens=NUM_TOKENS, **settings):
    num_ranks, per_node = SPLITS[split]
    return Case(num_tokens[:num_ranks], ranks_per_node=per_node, **({"num_topk": 5} | settings))


# ---- as the reference ----


DTYPES = (torch.bfloat16, torch.float16, torch.float32)
FORMATS = (
    {"sums": "lanes"}, {"sums": "lanes_fma"}, {}, {"fp8": True}, {"wire": "fp8"}, {"fp8": True, "scale_format": "ue8m0"},
    {"fp8": True, "wire": "fp8"}, {"with_weights": False}, {"combine_weights": True}, {"combine_weights": True, "wire": "fp8"},
)  # fmt: skip


@pytest.mark.parametrize("split", SPLITS)
def test_equals_reference(split):
    """More calls than turns, in all modes, dtypes and formats: memory is written again and again."""
    modes = ("now", "hook", "async")
    cases = [
        case_of(split, seed=seed, dtype=DTYPES[seed % 3], mode=modes[seed % 3], index_dtype=(torch.int64, torch.int32)[seed % 2], **chosen)
        for seed, chosen in enumerate(FORMATS + FORMATS[-2:])
    ]
    run_ranks(check_cases, SPLITS[split][0], "nvshmem", cases)


def test_many_tokens():
    """Tokens of which a block looks at a part at a time."""
    many = case_of("2x1", [600, 1], max_tokens=600, hidden=8)
    network = {NETWORK: "depth=2048"}  # 600 tokens are 600 puts, which a busy network has all at once
    run_ranks(in_environment, 2, network, check_cases, "nvshmem", [many, replace(many, combine_weights=True)])


@pytest.mark.slow
@pytest.mark.skipif(not emulated_gpu.is_chosen(), reason="is about the emulated network")
@pytest.mark.parametrize("seed", range(18))
def test_networks(seed):
    """Networks that delay, tear and reorder, in other ways each."""
    network = {NETWORK: f"seed={seed},stall_us={200 * (seed % 4)}"}
    split = ("2x1", "2x2", "4x1", "3x2")[seed % 4] if seed < 16 else ("2x4", "4x2")[seed % 2]
    cases = [case_of(split, seed=number, fp8=number % 2 == 0, combine_weights=number % 3 == 0) for number in range(5)]
    run_ranks(in_environment, SPLITS[split][0], network, check_cases, "nvshmem", cases)


@pytest.mark.parametrize("split", ("2x2", "2x4", "8x1"))
def test_scales_of_two_warps(split):
    """Sums in fp8 whose scales have columns of two warps; with eight nodes, more rows than set out at once."""
    modes, settings = ("now", "hook", "async"), {"hidden": 640, "num_topk": 8, "wire": "fp8"}
    cases = [case_of(split, [4, 7, 0, 3, 1, 6, 2, 5], seed=i, dtype=DTYPES[i], mode=modes[i], **settings) for i in range(3)]
    run_ranks(check_cases, SPLITS[split][0], "nvshmem", cases)


@on_ranks(4, per_node=(1, 2))
def test_fp8_wire_by_hand(rank, per_node):
    """A token of each rank goes to all four, of which each returns its three columns. Each rank's scale is a power of two, so its sum is
    exact. Nodes of two: 1 + 0.0625 is exact on ranks 2 and 3. For ranks 0 and 1 it is rounded to 1: 448 in the same block makes its scale
    1, and e4m3 has 1 and 1.125. Nodes of one: no sum is rounded."""
    rows = torch.zeros(4, 128)
    rows[:, :3] = torch.tensor([[0.0, 3.5, 0.0], [448.0, 0.0, 0.0], [448.0, 1.0, 0.0], [0.0, 0.0625, 0.875]])
    idx = torch.arange(4)[None]
    there = reference.low_latency.dispatch([torch.zeros(1, 128)] * 4, [idx] * 4, None, 4)
    sums = reference.low_latency.combine([row.expand(4, 128) for row in rows], there, [1] * 4, fp8=True, ranks_per_node=per_node)
    device = device_of("nvshmem", rank)
    buffer = LowLatencyBuffer(None, 1, 128, 4, 4, backend="nvshmem", ranks_per_node=per_node, timeout_s=60)
    out = buffer.dispatch(torch.zeros(1, 128, device=device), idx.to(device))
    y = buffer.combine(rows[rank].expand(1, 4, 128).contiguous().to(device), out.handle, wire="fp8")
    assert_same("combined_x", y, sums[rank])
    assert y[0, :3].tolist() == [896.0, 4.5 if per_node == 2 and rank < 2 else 4.5625, 0.875]


# ---- hooks ----


@on_ranks(4)
def test_combine_is_sent_before_a_hook_or_behind_it(rank):
    """Some ranks send a combine while others already wait for the rows of a later dispatch."""
    first, second = (case_of("2x2", mode="hook", seed=seed) for seed in range(2))
    expected = [Expected(case) for case in (first, second)]
    buffer = make_buffer(first, "nvshmem", rank)
    for _ in range(3):
        out, hook = start_dispatch(buffer, first, rank, "nvshmem")
        hook()
        rows = combine_rows(first, rank, out, expected[0])
        later, later_hook = start_dispatch(buffer, second, rank, "nvshmem")
        if rank % 2:
            later_hook()
        back, back_hook = start_combine(buffer, first, rows, out.handle)
        if rank % 2 == 0:
            later_hook()
        back_hook()
        check_dispatch(second, rank, later, expected[1])
        assert_same("combined_x", back, expected[0].combined[rank])


@pytest.mark.parametrize(("split", "num_ranks"), (("2x2", 4), ("2x4", 8)))
@on_ranks(())
def test_cuda_graph(rank, num_ranks, split):
    """A dispatch and a combine with their hooks, captured once and replayed with other rows and routings."""
    cases = [case_of(split, [24] * 8, mode="hook", seed=seed) for seed in range(4)]
    buffer, device = make_buffer(cases[0], "nvshmem", rank), device_of("nvshmem", rank)
    x, idx, weights = (tensor.to(device) for tensor in cases[0].inputs(rank))

    def step():
        out = buffer.dispatch(x, idx, weights, return_hook=True)
        out.hook()
        combined, hook = buffer.combine(out.recv_x, out.handle, return_hook=True)
        hook()
        return out, combined

    step()
    torch.cuda.synchronize()
    dist.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, combined = step()
    for case in cases[1:]:
        for to, new in zip((x, idx, weights), case.inputs(rank), strict=True):
            to.copy_(new)
        out.recv_x.fill_(float("nan"))
        dist.barrier()
        graph.replay()
        look(buffer)
        expected = Expected(case)
        check_dispatch(case, rank, out, expected)
        expected.outputs = [there.recv_x for there in expected.received]
        assert_same("combined_x", combined, expected.combine()[rank])


# ---- ranks that are left out ----


MASKED = [("2x1", 2, (1,)), ("2x2", 4, (1,)), ("2x2", 4, (2,)), ("2x2", 4, (2, 3)), ("3x2", 6, (3,))]
MASKED += [pytest.param(*each, marks=pytest.mark.slow) for each in (("2x4", 8, (5,)), ("4x2", 8, (3,)))]


@pytest.mark.parametrize("mode", ("now", "hook"))
@pytest.mark.parametrize("split, num_ranks, masked", MASKED, ids=str)
@on_ranks(())
def test_masked_rank(rank, num_ranks, split, masked, mode):
    """One rank, or all of a node."""
    case = case_of(split, [6, 8, 7, 5, 9, 3, 4, 2], masked=0.0, mode=mode, num_topk=6)
    buffer = make_buffer(case, "nvshmem", rank)
    run_case(buffer, case, rank, "nvshmem")
    dist.barrier()
    if rank in masked:
        return  # gone, as far as others know
    for one in masked:
        buffer.mask_rank(one)
    assert set(masked) <= set(buffer.masked_ranks)
    without = replace(case, without=masked)
    for seed in range(5):
        settings = {"wire": (None, "fp8")[seed % 2], "combine_weights": seed > 2}
        run_case(buffer, replace(without, seed=seed, **settings), rank, "nvshmem")
    lost = [without.is_lost(rank, replace(case, seed=seed).inputs(rank)[1] // (case.num_experts // case.num_ranks)) for seed in range(5)]
    assert buffer.statistics().num_dropped.item() == sum(int(each.sum()) for each in lost)


@pytest.mark.parametrize("split, num_ranks, masked", (("2x1", 2, 1), ("2x2", 4, 1), ("2x2", 4, 2), ("3x2", 6, 3), ("2x4", 8, 5)))
@on_ranks(())
def test_taken_back(rank, num_ranks, split, masked):
    """Twice a rank is masked and comes back. Meanwhile it makes calls that it will repeat. The others make some calls, and the first
    half of a dispatch, or of the combine of a dispatch that it was in; they call that hook around the return."""
    case = case_of(split, [6, 8, 7, 5, 9, 3, 4, 2], masked=0.0, num_topk=6)
    without = replace(case, without=masked)
    buffer = make_buffer(case, "nvshmem", rank)
    for num_calls in (1, 3):
        run_case(buffer, case, rank, "nvshmem")
        whole, wait = start_dispatch(buffer, case, rank, "nvshmem")
        wait()
        rows = combine_rows(case, rank, whole, Expected(case))
        dist.barrier()
        if rank == masked:
            for seed in (7, 8):
                start_dispatch(buffer, replace(case, seed=seed, mode="hook"), rank, "nvshmem")
        else:
            buffer.mask_rank(masked)
            for seed in range(num_calls - 1):
                run_case(buffer, replace(without, seed=seed, wire=(None, "fp8")[seed % 2]), rank, "nvshmem")
            if num_calls == 1:
                combined, hook = start_combine(buffer, replace(without, mode="hook"), rows, whole.handle)
            else:
                out, hook = start_dispatch(buffer, replace(without, mode="hook"), rank, "nvshmem")
        look(buffer)
        is_early = rank != masked and num_calls > 1 and rank % 2 == 0  # others do it in another order
        if is_early:
            dist.barrier()
            hook()
            buffer.mask_rank(masked, False)
        else:
            come_back(buffer, rank, masked)
        if rank == masked:
            time.sleep(0.3)  # the others wait for what it sends now, and do not take what it sent then
        elif not is_early:
            hook()
        if rank != masked and num_calls == 1:
            assert_same("combined_x", combined, combined_without(case, masked)[rank])
        elif rank != masked:
            check_dispatch(without, rank, out, Expected(without))
        for seed in range(5):
            run_case(buffer, replace(case, seed=seed, mode=("now", "hook")[seed % 2], combine_weights=seed > 2), rank, "nvshmem")


@on_ranks(4)
def test_rank_that_does_not_come_back_in_time(rank):
    case = case_of("2x2", [6, 8, 7, 5], masked=0.0)
    buffer = make_buffer(case, "nvshmem", rank, timeout_s=8)
    run_case(buffer, case, rank, "nvshmem")
    dist.barrier()
    without = replace(case, without=1)
    if rank == 1:
        dist.barrier()
        with pytest.raises(EPTimeoutError, match="rank . did not deliver within the deadline of 8000 ms; phase 'rejoining'"):
            buffer.rejoin()
        dist.barrier()
        buffer.rejoin()
    else:
        buffer.mask_rank(1)
        if rank == 3:  # the one of its rail hears of it
            with pytest.raises(EPTimeoutError, match="rank 1 did not deliver within the deadline of 8000 ms; phase 'rejoining'"):
                buffer.mask_rank(1, False)
            assert buffer.masked_ranks == [1]
        else:
            buffer.mask_rank(1, False)
            buffer.mask_rank(1)
        dist.barrier()
        run_case(buffer, without, rank, "nvshmem")
        dist.barrier()
        time.sleep(0.2 * (rank != 3))  # what they said the first time counts no more
        buffer.mask_rank(1, False)
    for seed in range(3):
        run_case(buffer, replace(case, seed=seed), rank, "nvshmem")


# ---- what crosses ----


@pytest.mark.skipif(not emulated_gpu.is_chosen(), reason="counts what the emulated network carries")
@on_ranks(4, fp8=(False, True))
def test_one_row_crosses_for_each_token_and_node(rank, fp8):
    """Bytes that this rank puts to the rank of its rail in the next node, of a dispatch and a combine."""
    split = "2x2"
    case = case_of(split, [16, 3, 0, 24], hidden=1024, fp8=fp8)
    _, per_node = SPLITS[split]
    buffer = make_buffer(case, "nvshmem", rank)
    node, pe = rank // per_node, (rank + per_node) % case.num_ranks

    def goes(source, to):
        idx = case.inputs(source)[1]
        return int(((idx // (case.num_experts // case.num_ranks * per_node) == to) & (idx >= 0)).any(1).sum())

    begin = bytes_put(pe)
    out, _ = start_dispatch(buffer, case, rank, "nvshmem")
    middle = bytes_put(pe)
    x = torch.zeros(out.recv_x.shape, dtype=torch.bfloat16, device=out.recv_x.device)
    buffer.combine(x, out.handle, wire="fp8" if fp8 else None)
    end = bytes_put(pe)
    row_bytes = 1024 + 4 * 8 if fp8 else 2048
    sent, returned = goes(rank, 1 - node) * row_bytes, goes(pe, node) * row_bytes
    message = 4 * case.num_experts // 2 + 8 * case.num_tokens[rank] * case.num_topk
    assert sent + message <= middle - begin < sent + message + 16, (begin, middle, sent, message)
    assert end - middle == returned, (middle, end, returned)


# ---- when something is wrong: refusals, different calls, ranks that are late or gone ----


CASE = Case([6, 8, 7, 5], max_tokens=8, num_topk=5, ranks_per_node=2)
CULPRIT = 2


def check_usable(buffer, rank):
    for seed in range(3):
        run_case(buffer, replace(CASE, seed=seed), rank, "nvshmem")
    look(buffer)


def raises(rank, error, message):
    """`error` on the culprit, and on the others an EPPeerError."""
    return pytest.raises(error if rank == CULPRIT else EPPeerError, match=message)


def rows_for(out):
    return torch.zeros(out.recv_x.shape, dtype=torch.bfloat16, device=out.recv_x.device)


@on_ranks(4)
def test_refused_calls(rank):
    """All ranks of all nodes learn of a refusal in the refused call, also of several in a row, and stay in step."""
    buffer = make_buffer(CASE, "nvshmem", rank)
    run_case(buffer, CASE, rank, "nvshmem")
    for mode in ("now", "hook"):
        for _ in range(5):
            with raises(rank, ValueError, "scale_format is 'e8'") as caught:
                case = replace(CASE, mode=mode, scale_format="e8" if rank == CULPRIT else "fp32")
                _, wait = start_dispatch(buffer, case, rank, "nvshmem")
                wait()
                look(buffer)
            assert rank == CULPRIT or caught.value.rank == CULPRIT
        check_usable(buffer, rank)

    # The GPU finds bad indices, and tells why. Along a dispatch that has failed on every rank, nobody waits for a deadline.
    device = device_of("nvshmem", rank)
    x, idx, weights = (tensor.to(device) for tensor in CASE.inputs(rank))
    for wrong, message, some in (
        (idx * 0 + 24, r"is 24; it must be -1 \(no expert\) or 0 to 23", None),
        (idx * 0, "twice", weights),
    ):
        with raises(rank, ValueError, message) as caught:
            out = buffer.dispatch(x, wrong if rank == CULPRIT else idx, weights)
            look(buffer)
        assert rank == CULPRIT or caught.value.rank == CULPRIT
        with pytest.raises((ValueError, EPPeerError), match="handle"):
            buffer.combine(rows_for(out), out.handle, topk_weights=some)
            look(buffer)
        check_usable(buffer, rank)

    # Ranks of the node name the culprit. Those of the other node name the rank that told them, or with weights perhaps the culprit.
    out, _ = start_dispatch(buffer, CASE, rank, "nvshmem")
    for weights in (None, CASE.inputs(rank)[2].to(out.recv_x.device)):
        with raises(rank, ValueError, "wire is 'fp4'|its call: EPPeerError") as caught:
            buffer.combine(rows_for(out), out.handle, wire="fp4" if rank == CULPRIT else None, topk_weights=weights)
            look(buffer)
        if rank != CULPRIT:
            assert caught.value.rank in {0: (2,), 1: (3,) if weights is None else (2, 3), 3: (2,)}[rank], (rank, caught.value)
        check_usable(buffer, rank)


@on_ranks(4)
def test_different_calls(rank):
    buffer = make_buffer(CASE, "nvshmem", rank)
    text = "ranks make different calls: .*sent as fp8"
    with pytest.raises(EPMismatchError, match=text):
        start_dispatch(buffer, replace(CASE, fp8=rank == CULPRIT), rank, "nvshmem")
        look(buffer)
    check_usable(buffer, rank)
    outputs = [start_dispatch(buffer, CASE, rank, "nvshmem")[0] for _ in range(2)]
    rows = rows_for(outputs[0])
    weights = CASE.inputs(rank)[2].to(rows.device)
    for some in (None, weights):
        with pytest.raises((EPMismatchError, EPPeerError), match="combine with the handle of call"):
            buffer.combine(rows, outputs[rank // 2].handle, topk_weights=some)
            look(buffer)
        check_usable(buffer, rank)
    out, _ = start_dispatch(buffer, CASE, rank, "nvshmem")
    for have_weights in ((CULPRIT,), (0, 1), (0, 1, 3)):
        with pytest.raises((EPMismatchError, EPPeerError), match="combine of bfloat16, with topk_weights"):
            buffer.combine(rows, out.handle, topk_weights=weights if rank in have_weights else None)
            look(buffer)
        check_usable(buffer, rank)


@on_ranks(4, mode=("now", "hook"))
def test_who_is_late_to_a_dispatch(rank, mode):
    """Statistics of all other ranks, also of the other node, say so."""
    buffer = make_buffer(CASE, "nvshmem", rank)
    run_case(buffer, CASE, rank, "nvshmem")
    buffer.reset_statistics()
    dist.barrier()
    time.sleep(2 if rank == CULPRIT else 0)
    _, wait = start_dispatch(buffer, replace(CASE, mode=mode), rank, "nvshmem")
    wait()
    look(buffer)
    waited = buffer.statistics().wait_ns
    assert rank == CULPRIT or (waited[CULPRIT] > 1e9 and waited[rank] < 1e9), waited


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks, masked", ((2, 1), (4, CULPRIT)))
@on_ranks(())
def test_rank_that_stalls(rank, num_ranks, masked):
    """A rank that stalls is masked, and so are rows that came by it, on its own node and on others. Later calls go on without it."""
    case = replace(CASE, masked=0.0, num_tokens=CASE.num_tokens[:num_ranks], ranks_per_node=num_ranks // 2)
    buffer = make_buffer(case, "nvshmem", rank, timeout_s=5, mask_stalled=True)
    run_case(buffer, case, rank, "nvshmem")
    dist.barrier()
    if rank != masked:
        start_dispatch(buffer, case, rank, "nvshmem")
        look(buffer)
        assert masked in buffer.masked_ranks, buffer.masked_ranks
        began = time.monotonic()
        for seed in range(3):
            run_case(buffer, replace(case, without=masked, seed=seed), rank, "nvshmem")
        assert time.monotonic() - began < 60
    dist.barrier()
    buffer.destroy()


@pytest.mark.slow
@on_ranks(4)
def test_rank_that_stalls_in_a_combine_with_weights(rank):
    """A rank that sends no weights is masked, and what came by it; ranks that wait for those who wait for it are not."""
    case = replace(CASE, masked=0.0, combine_weights=True)
    buffer = make_buffer(case, "nvshmem", rank, timeout_s=5, mask_stalled=True)
    out, _ = start_dispatch(buffer, case, rank, "nvshmem")
    look(buffer)
    rows = rows_for(out)
    dist.barrier()
    if rank != CULPRIT:
        buffer.combine(rows, out.handle, topk_weights=CASE.inputs(rank)[2].to(rows.device))
        look(buffer)
        assert buffer.masked_ranks == ([0, CULPRIT] if rank == 3 else [CULPRIT]), buffer.masked_ranks
        for seed in range(3):
            run_case(buffer, replace(case, without=CULPRIT, seed=seed), rank, "nvshmem")
    dist.barrier()
    buffer.destroy()
