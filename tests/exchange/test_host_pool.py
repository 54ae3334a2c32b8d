"""Memory of results in CPU tensors: who may free it, and when it serves again."""

import gc

import torch
from error_cases import IDX, WEIGHTS, X, make_buffer
from on_ranks import on_ranks

from deepep_moe import LowLatencyBuffer
from deepep_moe.host_pool import HostPool


def make(pool, num_elements=1000):
    return pool.empty((num_elements,), torch.float32)


def test_memory_serves_again():
    pool = HostPool()
    tensor = make(pool)
    address = tensor.data_ptr()
    assert make(pool).data_ptr() != address
    view = tensor[10:20]
    del tensor
    assert make(pool).data_ptr() != address, "a view uses it"
    storage = view.untyped_storage()
    del view
    assert make(pool).data_ptr() != address, "whoever has the storage uses it"
    del storage
    results = [make(pool) for _ in range(3)]
    assert address in [tensor.data_ptr() for tensor in results]
    assert len({tensor.data_ptr() for tensor in results}) == 3

    array = make(pool).fill_(1).numpy()
    make(pool).fill_(2)
    assert (array == 1).all()

    # A tensor that was sent to another process has memory that the other one maps.
    tensor = make(pool).fill_(1).share_memory_()
    address = tensor.data_ptr()
    del tensor
    assert make(pool).data_ptr() != address


def test_freed_and_resized():
    pool = HostPool()
    tensor = make(pool)
    tensor.untyped_storage().resize_(0)
    other = make(pool).fill_(1)
    tensor.untyped_storage().resize_(4000)
    tensor.fill_(2)
    assert other.eq(1).all() and tensor.eq(2).all()
    tensor.untyped_storage().resize_(0)
    del tensor, other
    gc.collect()
    assert make(pool).fill_(3).eq(3).all()


def test_pool_keeps_what_was_in_use():
    pool = HostPool()
    for num_elements in range(1000, 100_000, 1000):
        make(pool, num_elements)
    kept = sum(storage.nbytes() for storage in pool._storages)
    assert kept <= 2 * 4 * 100_000
    pool.trim()
    assert not pool._storages


@on_ranks(2, backend=("shm", "collective"))
def test_results_can_be_freed(rank, backend):
    buffer = make_buffer(backend)
    for layout in ("expert", "rank", "expert"):
        out = buffer.dispatch(X, IDX, WEIGHTS, layout=layout)
        combined_x = buffer.combine(out.recv_x, out.handle)
        for tensor in (out.recv_x, out.recv_topk_weights, combined_x):
            assert tensor.untyped_storage().nbytes() > 0
            tensor.untyped_storage().resize_(0)
        again = buffer.dispatch(X, handle=out.handle)
        counts = (IDX >= 0).sum(1, keepdim=True)
        if layout == "rank":
            counts = torch.stack([(IDX // 2).eq(of_rank).any(1) for of_rank in range(2)]).sum(0)[:, None]
        assert torch.allclose(buffer.combine(again.recv_x, out.handle), X * counts)


def test_low_latency_results_can_be_freed():
    buffer = LowLatencyBuffer(None, 8, 128, 4, 2)
    x, idx = torch.randn(4, 128), IDX
    for _ in range(3):
        out = buffer.dispatch(x, idx, fp8=True)
        recv_x = torch.ones(out.recv_x.shape)
        combined_x = buffer.combine(recv_x, out.handle)
        assert torch.equal(combined_x, (idx >= 0).sum(1, keepdim=True).expand(4, 128).float())
        for tensor in (out.recv_x, out.recv_x_scales, out.num_recv_tokens_per_expert, combined_x):
            tensor.untyped_storage().resize_(0)
