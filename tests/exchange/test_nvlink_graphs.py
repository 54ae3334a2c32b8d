"""Calls of the nvlink backend in CUDA graphs."""

import time
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from error_cases import on_gpus
from exchange_cases import assert_all_same, assert_same, device_of, look
from on_ranks import on_ranks

from deepep_moe import Buffer
from deepep_moe.errors import EPCapacityError

pytestmark = pytest.mark.gpu


@on_ranks(2, layout=("expert", "rank"))
def test_cuda_graph(rank, num_ranks, layout):
    device = device_of("nvlink", rank)
    buffer = Buffer(None, 64, 128, 8, 2, backend="nvlink", timeout_s=60)
    x = torch.zeros(64, 128, device=device, requires_grad=True)
    weights = torch.zeros(64, 2, device=device, requires_grad=True)
    idx = torch.zeros(64, 2, dtype=torch.int64, device=device)

    def step():
        out = buffer.dispatch(x, idx, weights, layout=layout, num_recv_rows=64 * 2 * num_ranks)
        row_weights = out.recv_topk_weights if layout == "expert" else out.recv_topk_weights.sum(1)
        y = buffer.combine(out.recv_x * 1.5, out.handle, row_weights)
        return y, *torch.autograd.grad((y * y).sum(), (x, weights))

    def draw(seed):
        generator = torch.Generator(device=device).manual_seed(seed * 10 + rank)
        with torch.no_grad():
            x.copy_(torch.randn(x.shape, generator=generator, device=device))
            weights.copy_(torch.rand(weights.shape, generator=generator, device=device))
            idx.copy_(torch.rand(64, 8, generator=generator, device=device).argsort(1)[:, :2])

    draw(0)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        results = step()
    for seed in range(1, 4):
        draw(seed)
        for result in results:
            result.detach().fill_(float("nan"))
        graph.replay()
        assert_all_same("a replay", results, step())
    torch.cuda.synchronize()


@on_ranks(2)
def test_cuda_graph_without_room(rank):
    """A replay in which rank 1 has too little room: nobody looks before `check`, which raises on all ranks. Later replays are right."""
    buffer, x, idx = on_gpus(rank)  # of whose routing rank 1 receives 8 rows

    def step():
        out = buffer.dispatch(x, idx, num_recv_rows=(64, 8)[rank])
        return buffer.combine(out.recv_x, out.handle)

    stream, graph, fitting = torch.cuda.Stream(), torch.cuda.CUDAGraph(), idx.clone()
    with torch.cuda.stream(stream):
        expected = step()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        combined_x = step()
    for num_replays in (1, 2, 8):
        idx.copy_(fitting)
        idx[3, 1] = 3 if rank == 0 else -1  # one row more for rank 1
        for _ in range(num_replays):  # a rank that has failed may overtake its peer
            graph.replay()
        torch.cuda.synchronize()
        with pytest.raises(EPCapacityError, match="rank 1 would receive 9 rows, more than its num_recv_rows of 8") as info:
            buffer.check()
        assert info.value.rank == 1
        idx.copy_(fitting)
        graph.replay()
        look(buffer)
        assert_same("combined_x", combined_x, expected)


@on_ranks(2)
def test_what_waits_is_no_part_of_a_cuda_graph(rank):
    buffer, x, idx = on_gpus(rank)
    rows = buffer.dispatch(x, idx).recv_x
    torch.cuda.synchronize()
    refused = partial(pytest.raises, ValueError)
    with refused(match="waits for its counts cannot be captured in a CUDA graph"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        buffer.dispatch(x, idx)
    out = buffer.dispatch(x, idx)
    assert_same("recv_x", out.recv_x, rows)
    with refused(match="num_sms=0 cannot be captured in a CUDA graph"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        buffer.combine(rows, out.handle, num_sms=0)
    assert_same("combined_x", buffer.combine(rows, out.handle, num_sms=0), buffer.combine(rows, out.handle))


@on_ranks(1)
def test_cuda_graph_between_calls(rank):
    """A call follows the buffer's last one on another stream, also when a graph was captured on a third in between."""
    buffer, x, idx = on_gpus(rank)
    streams, pool = [torch.cuda.Stream() for _ in range(3)], torch.cuda.graph_pool_handle()

    def capture():
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(streams[1]):
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            out = buffer.dispatch(x, idx, num_recv_rows=16)
            graph.capture_end()
        return graph, out

    for stream in streams:  # kernels that are loaded, and memory that is allocated, when they are used first may wait for the GPU
        with torch.cuda.stream(stream):
            buffer.dispatch(x, idx, num_recv_rows=16)
    before = capture()[0]  # whose memory the next one takes
    torch.cuda.synchronize()
    with torch.cuda.stream(streams[0]):
        torch.cuda._sleep(int(8e9))  # cycles: four seconds
        first = buffer.dispatch(x, idx, num_recv_rows=16)
    graph, captured = capture()
    with torch.cuda.stream(streams[2]):
        second = buffer.dispatch(x, idx, num_recv_rows=16)
        done = torch.cuda.Event()
        done.record()
    time.sleep(0.2)
    assert not streams[0].query(), "the first call has not ended, else this says nothing"
    assert not done.query()
    torch.cuda.synchronize()
    graph.replay()
    torch.cuda.synchronize()
    for out in (second, captured):
        assert_same("recv_x", out.recv_x, first.recv_x)
    before.reset()


@on_ranks(2)
def test_cuda_graph_given_up_on_one_rank(rank):
    """Calls that are captured on one rank only are not counted: calls made later find their handles again."""
    buffer, x, idx = on_gpus(rank)
    out = buffer.dispatch(x, idx, num_recv_rows=64)
    expected = buffer.combine(out.recv_x, out.handle)
    torch.cuda.synchronize()
    gives_up = pytest.raises(RuntimeError, match="no more") if rank == 0 else nullcontext()
    with gives_up, torch.cuda.graph(torch.cuda.CUDAGraph()):
        out = buffer.dispatch(x, idx, num_recv_rows=64)
        if rank == 0:
            raise RuntimeError("no more")
        buffer.combine(out.recv_x, out.handle)
    for _ in range(2):
        out = buffer.dispatch(x, idx)
        assert_same("combined_x", buffer.combine(out.recv_x, out.handle), expected)
