"""DeepEP 2 and 2.5 against the reference: compact and expanded rows, on every backend."""

import os
from operator import attrgetter

import pytest
import torch
import torch.distributed as dist
from deep_ep_cases import BACKENDS, SIZES, Wanted, check_start, in_both_dtypes, in_both_modes, make, padded
from exchange_cases import Case, assert_same, device_of
from on_ranks import on_ranks

from deepep_moe.compat import deep_ep
from deepep_moe.testing import run_ranks

VERSIONS = ("ElasticBuffer", "EPBuffer")
in_both_layouts = pytest.mark.parametrize("layout", ("rank", "expert"), ids=("compact", "expanded"))


# ---- against the reference ----


def scenario(rank, num_ranks, backend, case, fp8, is_async, knows_counts):
    want = Wanted(case, rank, case.layout, fp8)
    buffer, device = make("ElasticBuffer", backend, rank, explicitly_destroy=True)
    most, x, routing = max(case.num_tokens) + 1, want.x_on(device), want.routing(device)

    def dispatch(**more):
        previous = {"previous_event": buffer.capture(), "previous_event_before_epilogue": deep_ep.EventOverlap()} if is_async else {}
        *results, event = buffer.dispatch(x, async_with_compute_stream=is_async, do_expand=case.layout == "expert", **previous, **more)
        assert (event.event is not None) == is_async
        event.current_stream_wait()
        return results

    sizes = {"num_experts": case.num_experts, "num_max_tokens_per_rank": most, "expert_alignment": case.expert_alignment}
    stats = torch.full((case.num_experts // num_ranks,), 100, dtype=torch.int32, device=device)
    fresh = dispatch(**routing, cumulative_local_expert_recv_stats=stats, do_cpu_sync=knows_counts, **sizes)
    assert stats.tolist() == [100 + count for count in want.mine.num_recv_tokens_per_expert]
    handle = fresh[3]
    check_received(want, fresh, knows_counts, most)
    again = dispatch(topk_weights=routing["topk_weights"], handle=handle, use_tma_aligned_col_major_sf=True)
    check_received(want, again, knows_counts, most)
    assert again[3] is handle and (not fp8 or again[0][1].stride(0) == 1)
    bare = dispatch(handle=handle)
    assert bare[2] is None

    if case.sums == "ranks":
        check_handle(want, handle, most)
    num_rows, (lanes, lanes_back) = len(bare[0][0] if fp8 else bare[0]), want.lanes(0.5)
    rows, lanes = (padded(values, num_rows).to(device) for values in (want.outputs[rank], lanes))
    for bias, added in want.biases(device):
        y, back, event = buffer.combine(rows, handle, lanes, bias, async_with_compute_stream=is_async)
        event.current_stream_wait()
        assert_same("combined_x", y, want.combined(added))
        assert_same("combined weights", back, lanes_back)
    y, back, _ = buffer.combine(rows, handle)
    assert_same("combined_x", y, want.combined())
    assert back is None
    buffer.destroy()


def check_received(want, results, knows_counts, most):
    recv_x, recv_topk_idx, recv_topk_weights, _ = results
    case, mine = want.case, want.mine
    rows = recv_x if want.scales is None else recv_x[0]
    num_local = case.num_experts // case.num_ranks
    num_rows = len(mine.recv_x)
    if not knows_counts:
        num_rows = case.num_ranks * most
        if case.layout == "expert":
            num_rows = num_rows * min(case.num_topk, num_local) + num_local * (case.expert_alignment - 1)
            num_rows -= num_rows % case.expert_alignment
    assert len(rows) == num_rows
    check_start("recv_x", rows, mine.recv_x)
    check_start("recv_topk_weights", recv_topk_weights, mine.recv_topk_weights)
    if want.scales is not None:
        check_start("scales", recv_x[1], mine.recv_x_scales)
    if case.layout == "expert":
        assert recv_topk_idx is None
    else:
        check_start("recv_topk_idx", recv_topk_idx, mine.recv_topk_idx, rest=-1)


def check_handle(want, handle, most):
    case, counts = want.case, want.mine.num_recv_tokens_per_expert
    expands, ends = case.layout == "expert", torch.tensor(want.num_rows_per_expert).cumsum(0)
    starts = ends - torch.tensor(want.num_rows_per_expert)
    sources = torch.tensor([source for source, _ in want.mine.tokens], dtype=torch.int64).bincount(minlength=case.num_ranks)
    assert handle.do_expand == expands and handle.num_experts == case.num_experts
    assert handle.num_recv_tokens_per_expert_list == (want.num_rows_per_expert if handle.has_counts_on_host else [])
    assert_same("psum per expert", handle.psum_num_recv_tokens_per_expert, (starts + torch.tensor(counts) if expands else ends).int())
    assert_same("psum per rank", handle.psum_num_recv_tokens_per_scaleup_rank, sources.cumsum(0).int())
    assert handle.num_unaligned_recv_tokens_per_expert.tolist() == list(counts)
    if handle.has_counts_on_host:
        assert handle.num_recv_tokens == len(want.mine.tokens)
        assert handle.num_expanded_tokens == (sum(want.num_rows_per_expert) if expands else 0)
    metadata = handle.recv_src_metadata
    assert metadata.dtype == torch.int32 and metadata.shape == (len(want.mine.tokens), 2 + case.num_topk)
    assert metadata[:, 0].tolist() == [source * most + token for source, token in want.mine.tokens]
    lanes = range(case.num_topk)
    rows = [[row.get(lane, -1) if expands else -1 for lane in lanes] for row in want.mine.row_of_lane]
    assert metadata[:, 2:].tolist() == rows
    assert_same("topk_idx", handle.topk_idx, want.topk_idx)


@pytest.mark.parametrize("knows_counts", (True, False), ids=("", "no sync"))
@in_both_modes
@in_both_dtypes
@in_both_layouts
@pytest.mark.parametrize("backend", BACKENDS)
def test_scenarios(backend, layout, fp8, is_async, knows_counts):
    run_ranks(scenario, 3, backend, Case([13, 0, 30], layout=layout, expert_alignment=8, **SIZES), fp8, is_async, knows_counts)


@pytest.mark.parametrize("knows_counts", (True, False), ids=("", "no sync"))
@pytest.mark.parametrize("sums", ("lanes", "lanes_fma"))
@pytest.mark.parametrize("backend", BACKENDS)
def test_sums_by_lanes(backend, sums, knows_counts):
    run_ranks(scenario, 3, backend, Case([13, 0, 30], layout="expert", expert_alignment=8, sums=sums, **SIZES), False, False, knows_counts)


@in_both_modes
@on_ranks(2, backend=BACKENDS)
def test_deferred_epilogue(rank, backend, is_async):
    buffer, device = make("EPBuffer", backend, rank, explicitly_destroy=True)
    want = Wanted(Case([13, 30], layout="expert", **SIZES), rank, "expert", fp8=True)
    x, topk_idx, topk_weights = want.x_on(device), *want.routing(device).values()
    how = {"async_with_compute_stream": is_async, "defer_epilogue": True}
    event = buffer.dispatch(x, topk_idx, topk_weights, num_experts=12, use_tma_aligned_col_major_sf=True, do_expand=True, **how)
    results = event.current_stream_wait()
    check_received(want, results, True, 0)
    assert event.wait() is results and results[3].topk_idx is topk_idx
    y, weights = buffer.combine(want.outputs[rank].to(device), results[3], None, **how).current_stream_wait()
    assert_same("combined_x", y, want.combined())
    assert weights is None


# ---- what callers ask, and what is refused ----


@on_ranks(2)
def test_questions(rank, num_ranks):
    for version in VERSIONS:
        kind = getattr(deep_ep, version)
        hint = kind.get_buffer_size_hint(dist.group.WORLD, 128, 7168, num_topk=8)
        assert hint % 2**21 == 0 and hint >= num_ranks * 128 * 7168 * 2
        buffer = kind(dist.group.WORLD, num_bytes=hint, num_allocated_qps=16, num_max_tokens_per_rank=128)
        assert (buffer.rank_idx, buffer.num_ranks, buffer.num_bytes, buffer.num_allocated_qps) == (rank, num_ranks, hint, 16)
        assert buffer.get_theoretical_num_sms(256, 8) == 12
        assert buffer.get_theoretical_num_qps(12) == 16
        assert buffer.get_physical_domain_size() == buffer.get_logical_domain_size() == (1, num_ranks)
        assert deep_ep.get_physical_domain_size(buffer) == deep_ep.get_logical_domain_size(buffer) == (1, num_ranks)
        assert (buffer.scaleout_rank_idx, buffer.scaleup_rank_idx) == (0, rank)
        assert isinstance(buffer.capture(), deep_ep.EventHandle)
        buffer.barrier()
        assert isinstance(buffer.get_comm_stream(), (torch.cuda.Stream, torch.cpu.Stream))
        buffer.destroy()
        buffer.destroy()
    assert deep_ep.get_physical_domain_size(dist.group.WORLD) == deep_ep.get_logical_domain_size(dist.group.WORLD) == (1, num_ranks)


@on_ranks(1)
def test_refusals(rank):
    group = dist.group.WORLD
    buffer, newer = deep_ep.ElasticBuffer(group), deep_ep.EPBuffer(group)
    x, topk_idx = torch.ones(2, 8), torch.tensor([[0, 1], [1, 0]])
    handle = buffer.dispatch(x, topk_idx, num_experts=2, do_expand=True)[3]
    assert handle.topk_idx is not topk_idx
    assert buffer.dispatch(x, topk_idx, num_experts=2, do_handle_copy=False)[3].topk_idx is topk_idx
    for error, message, call in (
        (NotImplementedError, "num_cpu_bytes=4096", lambda: deep_ep.ElasticBuffer(group, 8192, 4096)),
        (NotImplementedError, "lb_allocation_plan", lambda: deep_ep.EPBuffer(group, lb_allocation_plan_or_num_bytes=4096)),
        (ValueError, "has no load-balancing region", lambda: newer.lb_prefetch_weights(x, x, topk_idx)),
        (ValueError, "no tensor", lambda: deep_ep.EPBuffer(group, lb_allocation_plan_or_num_bytes=deep_ep.BufferAllocator())),
        (ValueError, "topk_idx and num_experts are needed without a handle", lambda: buffer.dispatch(x, topk_idx)),
        (ValueError, "do_cpu_sync is False", lambda: buffer.dispatch(x, topk_idx, num_experts=2, do_cpu_sync=False)),
        (ValueError, r"pass topk_idx.clone\(\)", lambda: newer.dispatch(x, topk_idx, num_experts=2, do_handle_copy=True)),
        (ValueError, "do_expand is False, and the handle's dispatch had True", lambda: buffer.dispatch(x, handle=handle)),
        (ValueError, "topk_idx and handle were both given", lambda: buffer.dispatch(x, topk_idx, handle=handle, do_expand=True)),
        (TypeError, "handle is a tuple", lambda: buffer.dispatch(x, handle=(1, 2))),
        (ValueError, "bias has 1 tensors", lambda: buffer.combine(torch.ones(4, 8), handle, bias=(torch.ones(2, 8),))),
    ):
        with pytest.raises(error, match=message):
            call()


@on_ranks(2, backend=("collective", pytest.param("nvlink", marks=pytest.mark.gpu)))
def test_load_balancing_region(rank, backend):
    """Weights and scales come into tensors of a plan; gradients are added to those at home."""
    device = device_of(backend, rank)
    plan = deep_ep.BufferAllocator()
    slots, scales = plan.allocate((2, 64), torch.uint8), plan.allocate((2, 16), torch.uint8)
    parts = plan.allocate((2, 16), torch.float32)
    buffer = deep_ep.EPBuffer(dist.group.WORLD, lb_allocation_plan_or_num_bytes=plan)
    mapping = torch.tensor([[3, -1], [0, 1]], dtype=torch.int32, device=device)
    weights = torch.arange(2, dtype=torch.uint8, device=device)[:, None].repeat(1, 64) + 2 * rank
    for tensor in (slots, scales):
        tensor.fill_(255)
    buffer.lb_prefetch_weights(slots, weights, mapping, previous_event=buffer.capture()).wait()
    assert slots[:, 63].tolist() == ([3, 255] if rank == 0 else [0, 1]) and (scales == 255).all()
    buffer.lb_prefetch_weights([slots.view(2, 4, 16), scales], [weights, weights[:, :16].contiguous()], mapping, num_sms=2).wait()
    assert scales[:, 15].tolist() == ([3, 255] if rank == 0 else [0, 1])
    parts.copy_(torch.full((2, 16), 2.0 + rank))
    grads = torch.full((2, 16), 0.5, device=device)
    assert buffer.lb_get_theoretical_num_sms() == 24
    buffer.lb_reduce_grads(parts, grads, mapping, num_sms=12).wait()  # as many as the emulated GPU has
    assert grads[:, 0].tolist() == ([3.5, 3.5] if rank == 0 else [0.5, 2.5])
    with pytest.raises(ValueError, match="another buffer has it already"):
        deep_ep.EPBuffer(dist.group.WORLD, lb_allocation_plan_or_num_bytes=plan)
    buffer.destroy()
    assert slots[:, 0].tolist() == ([3, 255] if rank == 0 else [0, 1])


def test_not_served():
    for name in ("ElasticBuffer.engram_write", "ElasticBuffer.all_gather", "EngramBuffer", "PPBuffer", "BucketBuffer"):
        with pytest.raises(NotImplementedError, match=f"^deep_ep.{name} is not served: .* use DeepEP itself for it"):
            attrgetter(name)(deep_ep)(1, some="thing")


@on_ranks(2)
def test_refusals_of_sums_by_lanes(rank):
    os.environ["DEEPEP_MOE_SUMS"] = "lanes_fma"
    x, idx = torch.ones(2, 8), torch.tensor([[0, 1], [1, 0]])
    buffer, hybrid = deep_ep.ElasticBuffer(dist.group.WORLD), deep_ep.HybridEPBuffer(dist.group.WORLD, 8, 2, 1)
    for dispatch in (lambda: buffer.dispatch(x, idx, num_experts=2), lambda: hybrid.dispatch(x, topk_idx=idx)):
        with pytest.raises(ValueError, match="DEEPEP_MOE_SUMS is 'lanes_fma', but of compact rows the caller adds up those of a token"):
            dispatch()
    handle = buffer.dispatch(x, idx, num_experts=2, do_expand=True)[3]
    for name in ("num_recv_tokens", "psum_num_recv_tokens_per_scaleup_rank", "recv_src_metadata"):
        with pytest.raises(NotImplementedError, match=f"{name} is not known with DEEPEP_MOE_SUMS=lanes_fma"):
            getattr(handle, name)
    handle = hybrid.dispatch_with_permute(hidden=x, topk_idx=idx)[4]
    assert handle[3] is None and handle[4] is None and handle[8] == 2
