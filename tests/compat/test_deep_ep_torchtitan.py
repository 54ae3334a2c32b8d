"""torchtitan's expert parallelism on deepep_moe: the calls that its dispatchers make to DeepEP 2 and HybridEP, in their order.

They were read in torchtitan/distributed/deepep of pytorch/torchtitan at commit b5bcd76c66d0acb1a08b176d9639425bc55e0b2a, and the flag of
dropped rows at 0276e6ed0bed9be143631e007342964c03a09b96. torchtitan itself was not run.
"""

import pytest
import torch
import torch.distributed as dist
from deep_ep_cases import make, on_every_backend
from on_ranks import on_ranks

NUM_TOKENS, HIDDEN, NUM_EXPERTS, NUM_TOPK = 9, 16, 12, 3


def inputs(rank):
    """Return x, topk_idx, scores and the gradient of the sums. Some scores are 0."""
    draw = torch.Generator().manual_seed(rank)
    x, grad = (torch.randn(NUM_TOKENS, HIDDEN, generator=draw) for _ in range(2))
    scores = torch.rand(NUM_TOKENS, NUM_EXPERTS, generator=draw)
    scores, topk_idx = scores.topk(NUM_TOPK)
    scores[::4, 1] = 0
    return x, topk_idx, scores, grad


def experts():
    return torch.randn(NUM_EXPERTS, HIDDEN, generator=torch.Generator().manual_seed(99), requires_grad=True)


def wanted(rank, num_ranks):
    """Return the sums, the gradients of x and the scores, and those of all experts, by a model with all experts on one rank."""
    weights = experts()
    for other in range(num_ranks):
        x, topk_idx, scores, grad = inputs(other)
        x.requires_grad_(), scores.requires_grad_()
        y = (scores[..., None] * torch.tanh(x[:, None] * weights[topk_idx])).sum(1)
        y.backward(grad)
        if other == rank:
            mine = y.detach(), x.grad, scores.grad
    return *mine, weights.grad


def run_experts(rows, counts, weights):
    """Return the outputs of rows in groups by expert. Rows behind the last group become NaN, as a grouped product leaves them unwritten."""
    num_rows, counts = sum(counts.tolist()), counts.to(rows.device)
    outputs = torch.tanh(rows[:num_rows] * weights.repeat_interleave(counts, 0))
    return torch.cat([outputs, rows.new_full((len(rows) - num_rows, rows.shape[1]), torch.nan)])


def local_experts(rank, num_ranks, device):
    return experts().detach().to(device).chunk(num_ranks)[rank].clone().requires_grad_()


def check(actual, want, name):
    torch.testing.assert_close(actual.cpu(), want, msg=lambda text: f"{name}: {text}")


def make_elastic(backend, rank):
    from deepep_moe.compat.deep_ep import ElasticBuffer

    sizes = {"num_max_tokens_per_rank": 2 * NUM_TOKENS, "hidden": HIDDEN, "num_topk": NUM_TOPK, "use_fp8_dispatch": False}
    group, most = dist.group.WORLD, sizes["num_max_tokens_per_rank"]
    needed = ElasticBuffer.get_buffer_size_hint(group, most, HIDDEN, num_topk=NUM_TOPK, use_fp8_dispatch=False)
    buffer, device = make("ElasticBuffer", backend, rank, num_bytes=needed, **sizes, deterministic=False, explicitly_destroy=True)
    assert buffer.group == group and buffer.num_bytes >= needed and buffer.num_max_tokens_per_rank == most
    return buffer, device


def elastic_dispatch(buffer, x, topk_idx, scores, is_expanded):
    return buffer.dispatch(
        x, topk_idx=topk_idx.masked_fill(scores == 0, -1), topk_weights=scores, num_experts=NUM_EXPERTS, num_max_tokens_per_rank=len(x),
        num_sms=buffer.get_theoretical_num_sms(NUM_EXPERTS, NUM_TOPK), do_expand=is_expanded, do_cpu_sync=not is_expanded,
    )  # fmt: skip


@on_every_backend
@on_ranks(2)
def test_deepep_trains(rank, num_ranks, backend):
    """The dispatcher "deepep" with gradients: compact rows, which it sorts by expert itself."""
    buffer, device = make_elastic(backend, rank)
    x, topk_idx, scores, grad = (tensor.to(device) for tensor in inputs(rank))
    weights = local_experts(rank, num_ranks, device)
    recv_x, recv_topk_idx, recv_scores, handle, _ = elastic_dispatch(buffer, x, topk_idx, scores, False)
    recv_x.requires_grad_(), recv_scores.requires_grad_()
    counts = torch.tensor(handle.num_recv_tokens_per_expert_list, dtype=torch.int32)
    rows, lanes = (recv_topk_idx != -1).nonzero(as_tuple=True)
    order = recv_topk_idx[rows, lanes].argsort(stable=True)
    rows, lanes = rows[order], lanes[order]
    outputs = run_experts(recv_x[rows], counts, weights) * recv_scores[rows, lanes][:, None]
    sums = torch.zeros_like(recv_x).index_add(0, rows, outputs)
    y, back, event = buffer.combine(sums.detach(), handle=handle, topk_weights=None, async_with_compute_stream=True)
    event.current_stream_wait()
    assert back is None
    grad_sums, *_ = buffer.dispatch(grad, handle=handle, num_sms=handle.num_sms, do_cpu_sync=False)
    sums.backward(grad_sums)
    grad_x, grad_scores, _ = buffer.combine(recv_x.grad, handle=handle, topk_weights=recv_scores.grad.float())
    want_y, want_x, want_scores, want_weights = wanted(rank, num_ranks)
    check(y, want_y, "sums")
    check(grad_x, want_x, "gradient of x")
    check(grad_scores, want_scores.masked_fill(scores.cpu() == 0, 0), "gradient of the scores")
    check(weights.grad, want_weights.chunk(num_ranks)[rank], "gradient of the experts")
    dist.barrier()


@on_every_backend
@on_ranks(2)
def test_deepep_infers(rank, num_ranks, backend):
    """The dispatcher "deepep" without gradients and with `cudagraphable`: rows by expert, whose numbers only the device knows."""
    buffer, device = make_elastic(backend, rank)
    x, topk_idx, scores, _ = (tensor.to(device) for tensor in inputs(rank))
    with torch.no_grad():
        recv_x, _, recv_scores, handle, _ = elastic_dispatch(buffer, x, topk_idx, scores, True)
        ends = handle.psum_num_recv_tokens_per_expert
        counts = torch.diff(ends, prepend=ends.new_zeros(1)).to(torch.int32)
        outputs = run_experts(recv_x, counts, local_experts(rank, num_ranks, device)) * recv_scores.reshape(len(recv_x), -1).sum(1)[:, None]
        y, _, event = buffer.combine(outputs, handle=handle, topk_weights=None, async_with_compute_stream=True)
        event.current_stream_wait()
    check(y, wanted(rank, num_ranks)[0], "sums")
    dist.barrier()


@pytest.mark.parametrize("capacity_factor", (None, 1.0, 0.25))
@pytest.mark.parametrize("pad_multiple", (None, 8))
@on_every_backend
@on_ranks(2)
def test_hybridep_trains(rank, num_ranks, backend, capacity_factor, pad_multiple):
    """The dispatcher "hybridep" calls from custom operators, whose results must not share memory with each other or with arguments."""
    from deepep_moe.compat.deep_ep.hybrid_ep_buffer import indices_to_map

    num_local = NUM_EXPERTS // num_ranks
    buffer, device = make(
        "HybridEPBuffer", backend, rank, hidden_dim=HIDDEN, max_num_of_tokens_per_rank=2 * NUM_TOKENS, num_local_experts=num_local,
        use_fp8=False, num_sms_dispatch_api=12, num_sms_combine_api=12, load_cached_kernels=True, use_shared_buffer=True,
        enable_custom_allgather=True,
    )  # fmt: skip
    config = buffer.configurer.buffer_config
    assert (config.hidden_dim, config.num_of_experts_per_rank, config.max_num_of_tokens_per_rank) == (HIDDEN, num_local, 2 * NUM_TOKENS)
    assert buffer.group == dist.distributed_c10d._resolve_process_group(dist.group.WORLD.group_name)
    x, topk_idx, scores, grad = (tensor.to(device) for tensor in inputs(rank))
    bound = None
    if capacity_factor is not None:
        bound = int(NUM_TOKENS * num_ranks * min(num_local, NUM_TOPK) * capacity_factor)
        bound = -(-bound // (pad_multiple or 1)) * (pad_multiple or 1)
    handles = []

    @torch.library.custom_op("like_torchtitan::dispatch", mutates_args=())
    def dispatch(x: torch.Tensor, topk_idx: torch.Tensor, scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        routing_map, probs = indices_to_map(topk_idx, scores.float(), len(x), NUM_EXPERTS)
        rows, row_scores, _, counts, handle = buffer.dispatch_with_permute(
            hidden=x, routing_map=routing_map, probs=probs, scaling_factor=None, num_of_experts_per_rank=num_local,
            pad_multiple=pad_multiple, num_permuted_tokens=bound, non_blocking=bound is not None,
        )  # fmt: skip
        handles.append(handle)
        return rows, row_scores, counts if counts.device == x.device else counts.to(x.device)

    @torch.library.custom_op("like_torchtitan::combine", mutates_args=())
    def combine(rows: torch.Tensor) -> torch.Tensor:
        return buffer.combine_with_unpermute(hidden=rows, handle=handles[0])[0]

    @torch.library.custom_op("like_torchtitan::dispatch_bwd", mutates_args=())
    def dispatch_gradient(grad: torch.Tensor, num_rows: int) -> torch.Tensor:
        how = {"num_permuted_tokens": num_rows, "pad_multiple": pad_multiple}
        return buffer.dispatch_with_permute(hidden=grad, scaling_factor=None, handle=handles[0], **how)[0]

    @torch.library.custom_op("like_torchtitan::combine_bwd", mutates_args=())
    def combine_gradient(grad_rows: torch.Tensor, grad_scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return buffer.combine_with_unpermute(hidden=grad_rows, probs=grad_scores, handle=handles[0])

    weights = local_experts(rank, num_ranks, device)
    recv_x, recv_scores, counts = dispatch(x, topk_idx, scores)
    recv_x.requires_grad_(), recv_scores.requires_grad_()
    outputs = run_experts(recv_x, counts, weights) * recv_scores.reshape(-1, 1)
    y = combine(outputs.detach())
    outputs.backward(dispatch_gradient(grad, len(outputs)))
    grad_x, grad_probs = combine_gradient(recv_x.grad, recv_scores.grad)
    has_dropped = torch.zeros(1, dtype=torch.bool, device=device)
    if bound is not None:
        assert len(recv_x) == bound
        has_dropped.logical_or_(handles[0][-1])
    assert has_dropped.item() is (capacity_factor == 0.25)
    if not has_dropped:
        want_y, want_x, want_scores, want_weights = wanted(rank, num_ranks)
        check(y, want_y, "sums")
        check(grad_x, want_x, "gradient of x")
        check(grad_probs.gather(1, topk_idx), want_scores, "gradient of the scores")
        check(weights.grad, want_weights.chunk(num_ranks)[rank], "gradient of the experts")
    dist.barrier()
