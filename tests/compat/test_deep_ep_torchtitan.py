"""torchtitan's expert parallelism on deepep_moe: the calls that its dispatchers make to DeepEP 2 and HybridEP, in their order. Experts
double their rows.

They were read in torchtitan/distributed/deepep of pytorch/torchtitan at commit b5bcd76c66d0acb1a08b176d9639425bc55e0b2a, and the flag of
dropped rows at 0276e6ed0bed9be143631e007342964c03a09b96.
"""

import torch
import torch.distributed as dist
from deep_ep_cases import BACKENDS, make
from on_ranks import on_ranks

from deepep_moe.compat.deep_ep import ElasticBuffer
from deepep_moe.compat.deep_ep.hybrid import indices_to_map

NUM_TOKENS, HIDDEN, NUM_EXPERTS, NUM_TOPK = 9, 16, 12, 3


def inputs(rank, device):
    """Return x, topk_idx, scores, of which some are 0, and the gradient of the sums."""
    draw = torch.Generator().manual_seed(rank)
    x, grad = (torch.randn(NUM_TOKENS, HIDDEN, generator=draw) for _ in range(2))
    scores, topk_idx = torch.rand(NUM_TOKENS, NUM_EXPERTS, generator=draw).topk(NUM_TOPK)
    scores[::4, 1] = 0
    return [tensor.to(device) for tensor in (x, topk_idx, scores, grad)]


def check(x, scores, grad, results):
    """results: the sums, and the gradients of x and the scores."""
    leaves = x.clone().requires_grad_(), scores.clone().requires_grad_()
    y = 2 * leaves[0] * leaves[1].sum(1, keepdim=True)
    y.backward(grad)
    for name, actual, want in zip(("sums", "x.grad", "scores.grad"), results, (y, *(leaf.grad for leaf in leaves)), strict=True):
        torch.testing.assert_close(actual, want.detach(), msg=lambda text, name=name: f"{name}: {text}")


@on_ranks(2, backend=BACKENDS)
def test_deepep_trains(rank, backend):
    """The dispatcher "deepep" with gradients: compact rows, which it sorts by expert itself."""
    group, most = dist.group.WORLD, 2 * NUM_TOKENS
    needed = ElasticBuffer.get_buffer_size_hint(group, most, HIDDEN, num_topk=NUM_TOPK, use_fp8_dispatch=False)
    sizes = {"num_bytes": needed, "num_max_tokens_per_rank": most, "hidden": HIDDEN, "num_topk": NUM_TOPK, "use_fp8_dispatch": False}
    buffer, device = make("ElasticBuffer", backend, rank, **sizes, deterministic=False, explicitly_destroy=True)
    assert buffer.group == group and buffer.num_bytes >= needed and buffer.num_max_tokens_per_rank == most
    x, topk_idx, scores, grad = inputs(rank, device)
    topk_idx = topk_idx.masked_fill(scores == 0, -1)
    recv_x, recv_topk_idx, recv_scores, handle, _ = buffer.dispatch(
        x, topk_idx=topk_idx, topk_weights=scores, num_experts=NUM_EXPERTS, num_max_tokens_per_rank=len(x),
        num_sms=buffer.get_theoretical_num_sms(NUM_EXPERTS, NUM_TOPK), do_expand=False, do_cpu_sync=True,
    )  # fmt: skip
    recv_x.requires_grad_(), recv_scores.requires_grad_()
    assert sum(handle.num_recv_tokens_per_expert_list) == (recv_topk_idx != -1).sum()
    sums = 2 * recv_x * (recv_scores * (recv_topk_idx != -1)).sum(1, keepdim=True)
    y, back, event = buffer.combine(sums.detach(), handle=handle, topk_weights=None, async_with_compute_stream=True)
    event.current_stream_wait()
    assert back is None
    grad_sums, *_ = buffer.dispatch(grad, handle=handle, num_sms=handle.num_sms, do_cpu_sync=False)
    sums.backward(grad_sums)
    grad_x, grad_scores, _ = buffer.combine(recv_x.grad, handle=handle, topk_weights=recv_scores.grad.float())
    x_sums = 2 * (x * grad).sum(1, keepdim=True)
    check(x, scores, grad, (y, grad_x, torch.where(topk_idx < 0, x_sums, grad_scores)))  # entries without an expert have no gradient
    dist.barrier()


@on_ranks(2, backend=BACKENDS, pad_multiple=(None, 8), capacity_factor=(None, 1.0, 0.25))
def test_hybridep_trains(rank, num_ranks, backend, capacity_factor, pad_multiple):
    """The dispatcher "hybridep" calls from custom operators, whose results must not share memory with each other or with arguments."""
    num_local = NUM_EXPERTS // num_ranks
    buffer, device = make(
        "HybridEPBuffer", backend, rank, hidden_dim=HIDDEN, max_num_of_tokens_per_rank=2 * NUM_TOKENS, num_local_experts=num_local,
        use_fp8=False, num_sms_dispatch_api=12, num_sms_combine_api=12, load_cached_kernels=True, use_shared_buffer=True,
        enable_custom_allgather=True,
    )  # fmt: skip
    config = buffer.configurer.buffer_config
    assert (config.hidden_dim, config.num_of_experts_per_rank, config.max_num_of_tokens_per_rank) == (HIDDEN, num_local, 2 * NUM_TOKENS)
    assert buffer.group == dist.distributed_c10d._resolve_process_group(dist.group.WORLD.group_name)
    x, topk_idx, scores, grad = inputs(rank, device)
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

    recv_x, recv_scores, counts = dispatch(x, topk_idx, scores)
    recv_x.requires_grad_(), recv_scores.requires_grad_()
    is_row = (torch.arange(len(recv_x), device=device) < counts.sum())[:, None]
    outputs = torch.where(is_row, 2 * recv_x * recv_scores.reshape(-1, 1), torch.nan)  # a grouped product writes no other rows
    y = combine(outputs.detach())
    outputs.backward(dispatch_gradient(grad, len(outputs)))
    grad_x, grad_probs = combine_gradient(recv_x.grad, recv_scores.grad)
    has_dropped = torch.zeros(1, dtype=torch.bool, device=device)
    if bound is not None:
        assert len(recv_x) == bound
        has_dropped.logical_or_(handles[0][-1])
    assert has_dropped.item() is (capacity_factor == 0.25)
    if not has_dropped:
        check(x, scores, grad, (y, grad_x, grad_probs.gather(1, topk_idx)))
    dist.barrier()
