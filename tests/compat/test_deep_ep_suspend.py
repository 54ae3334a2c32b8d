"""DeepEP's buffers that give their memory back for a while."""

import pytest
import torch
import torch.distributed as dist
from deep_ep_cases import BACKENDS, VERSIONS
from exchange_cases import device_of, poison_outputs
from on_ranks import on_ranks

from deepep_moe.errors import BufferDestroyedError, BufferSuspendedError


@on_ranks(2, name=("V1", "V2", "V2_5", "hybrid_permuted"), backend=BACKENDS)
def test_all_memory(rank, name, backend):
    device = device_of(backend, rank)
    poison_outputs()
    buffer, dispatch, combine = VERSIONS[name](dist.group.WORLD, 4, 2048)
    x = torch.arange(1.0, 5.0, device=device)[:, None].expand(4, 2048).contiguous()
    topk_idx = torch.tensor([[0, 2]], device=device).expand(4, 2).contiguous()

    def send():
        recv_x, _, handle = dispatch(x, topk_idx, torch.ones(4, 2, device=device))
        return recv_x, handle

    def send_low_latency():
        buffer.low_latency_dispatch(x.bfloat16(), topk_idx, 4, 4, use_fp8=False)

    calls = [send_low_latency, send] if name == "V1" else [send]
    *_, (recv_x, handle) = [call() for call in calls]
    before = buffer.memory()
    buffer.suspend()
    buffer.suspend()
    assert sum(buffer.memory()) == before.held and buffer.memory().suspended > 0
    for call in calls:
        with pytest.raises(BufferSuspendedError):
            call()
    buffer.resume()
    assert buffer.memory() == before
    assert torch.equal(combine(recv_x, handle)[0], 2 * x), "a handle from before"
    *_, (recv_x, handle) = [call() for call in calls]
    assert torch.equal(combine(recv_x, handle)[0], 2 * x)
    if name != "hybrid_permuted":
        buffer.suspend()
        buffer.destroy()
        with pytest.raises(BufferDestroyedError):
            buffer.resume()
