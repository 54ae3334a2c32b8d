"""DeepEP's buffers that give their memory back for a while."""

import pytest
import torch
from deep_ep_cases import make, on_every_backend
from on_ranks import on_ranks

from deepep_moe.errors import BufferDestroyedError, BufferSuspendedError

SIZES = {"Buffer": (), "ElasticBuffer": (), "EPBuffer": (), "HybridEPBuffer": (2048, 4, 2)}


@on_every_backend
@pytest.mark.parametrize("kind", SIZES)
@on_ranks(2)
def test_all_memory(rank, kind, backend):
    buffer, device = make(kind, backend, rank, *SIZES[kind])
    x = torch.arange(1.0, 5.0, device=device)[:, None].expand(4, 2048).contiguous()
    topk_idx = torch.tensor([[0, 2]], device=device).expand(4, 2).contiguous()
    weights = torch.ones(4, 2, device=device)

    def send():
        if kind == "Buffer":
            counts, _, experts, is_in_rank, _ = buffer.get_dispatch_layout(topk_idx, 4)
            recv_x, _, _, _, handle, _ = buffer.dispatch(
                x, None, counts, None, is_in_rank, experts, topk_idx, weights
            )  # fmt: skip
            return recv_x, handle
        if kind == "HybridEPBuffer":
            recv_x, *_, handle = buffer.dispatch_with_permute(hidden=x, topk_idx=topk_idx, topk_weights=weights)
            return recv_x, handle
        recv_x, _, _, handle, _ = buffer.dispatch(x, topk_idx, weights, num_experts=4)
        return recv_x, handle

    def sums(recv_x, handle):
        if kind == "HybridEPBuffer":
            return buffer.combine_with_unpermute(hidden=recv_x, handle=handle)[0]
        return buffer.combine(recv_x, handle)[0]

    def send_low_latency():
        return buffer.low_latency_dispatch(x.bfloat16(), topk_idx, 4, 4, use_fp8=False)[0] if kind == "Buffer" else None

    recv_x, handle = send()
    send_low_latency()
    before = buffer.memory()
    buffer.suspend()
    buffer.suspend()
    assert sum(buffer.memory()) == before.held and (buffer.memory().suspended > 0 or backend == "collective")
    with pytest.raises(BufferSuspendedError):
        send()
    if kind == "Buffer":
        with pytest.raises(BufferSuspendedError):
            send_low_latency()
    buffer.resume()
    assert buffer.memory() == before
    assert torch.equal(sums(recv_x, handle), 2 * x), "a handle from before"
    assert torch.equal(sums(*send()), 2 * x)
    send_low_latency()
    if kind != "HybridEPBuffer":
        buffer.suspend()
        buffer.destroy()
        with pytest.raises(BufferDestroyedError):
            buffer.resume()
