"""DeepEP's settings, events and memory without a call, and what bad arguments of a call raise."""

import re
from functools import partial

import numpy as np
import pytest
import torch
import torch.distributed as dist
from deep_ep_cases import BACKENDS
from exchange_cases import device_of
from on_ranks import on_ranks

from deepep_moe.compat.deep_ep import Buffer, Config, ElasticBuffer, EPBuffer, EventHandle, EventOverlap, HybridEPBuffer
from deepep_moe.compat.deep_ep.buffer import Runtime, _senders_of
from deepep_moe.errors import BufferDestroyedError, EPPeerError

FP8, X, COUNTS = torch.float8_e4m3fn, torch.zeros(2, 64, dtype=torch.bfloat16), torch.zeros(4, dtype=torch.int32)
IDX = torch.tensor([[0, 3], [2, 1]])


@pytest.fixture
def group(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_config():
    config = Config(24, 8, 256)
    assert (config.num_sms, config.num_max_nvl_chunked_send_tokens, config.num_max_nvl_chunked_recv_tokens) == (24, 8, 256)
    hints = [
        Config(num_sms=sms).get_nvl_buffer_size_hint(2 * hidden, ranks) for sms in (20, 24) for hidden in (512, 1024) for ranks in (2, 8)
    ]
    assert hints[0] > 0 and all(larger > hints[0] for larger in hints[1:])
    assert config.get_rdma_buffer_size_hint(4096, 8) == 0 and config.get_rdma_buffer_size_hint(4096, 16) > 0
    with pytest.raises(ValueError, match="num_sms is -2; it must be at least 0"):
        Config(num_sms=-2)


def test_num_sms(monkeypatch):
    monkeypatch.setattr(Buffer, "num_sms", 20)
    assert [_senders_of(config) for config in (None, *map(Config, (20, 24, 2, 0)))] == [None, None, 12, 1, 1]
    Buffer.set_num_sms(24)
    assert Buffer.num_sms == 24 == Buffer.get_dispatch_config(8).num_sms == Buffer.get_combine_config(8).num_sms
    with pytest.raises(ValueError, match="new_num_sms is 7"):
        Buffer.set_num_sms(7)


def test_events(group):
    one, other = (Buffer(group).get_dispatch_layout(IDX, 4)[4] for _ in range(2))  # a hook on one is not called by another
    one.register_hook_after_wait(lambda: pytest.fail("called"))
    other.current_stream_wait()
    assert one.event is None
    event = Buffer.capture()
    assert isinstance(event, EventOverlap) and isinstance(event.event, EventHandle)
    with event as inside:
        assert inside is event
    assert EventOverlap().event is None and EventOverlap().current_stream_wait() is None
    assert EventOverlap(EventHandle(), (torch.ones(1),)).extra_tensors is not None
    calls = []
    event.register_hook_after_wait(lambda: calls.append("hook"))
    with pytest.raises(ValueError, match="has a hook already"):
        event.register_hook_after_wait(print)
    event.current_stream_wait()
    event.current_stream_wait()
    assert calls == ["hook"] and event.event is not None
    with event(release_handle=True) as inside:
        assert inside is event and event.event is not None
    assert event.event is None and event.hook_after_wait is None
    event = EventOverlap(EventHandle())
    with event(release_handle=True), event(release_handle=False):
        pass
    assert event.event is not None, "the latest word counts, for one block"
    event.wait(release_handle=True)
    assert event.event is None


def test_questions(group):
    buffer = Buffer(group, num_nvl_bytes=64, num_rdma_bytes=32)
    assert (buffer.rank, buffer.group_size, buffer.group) == (0, 1, group)
    assert buffer.get_local_buffer_tensor(torch.float32).shape == (16,)
    assert buffer.get_local_buffer_tensor(torch.int8, use_rdma_buffer=True).zero_().numel() == 32
    assert buffer.get_local_buffer_tensor(torch.int8, torch.Size([4, 6]), 40).shape == (4, 6)
    with pytest.raises(ValueError, match=re.escape("size is [4, 7] of torch.int8 at offset 40; the buffer was made with 64 bytes")):
        buffer.get_local_buffer_tensor(torch.int8, torch.Size([4, 7]), 40)
    assert buffer.get_comm_stream() is not None
    runtime = buffer.runtime  # answers the questions that callers ask DeepEP's native object
    assert runtime.is_available() and not runtime.is_internode_available()
    assert (runtime.get_num_rdma_ranks(), runtime.get_rdma_rank(), runtime.get_root_rdma_rank(True)) == (1, 0, 0)
    assert runtime.get_local_buffer_tensor(torch.int8, 4).shape == (60,) and runtime.get_comm_stream() is not None
    assert (runtime.get_local_device_id() >= 0) == torch.cuda.is_available()
    buffer.destroy()
    assert buffer.runtime is None
    buffer.rank, buffer.group_size, buffer._buffers._num_hosts = 5, 8, 4
    with_nodes = Runtime(buffer)
    assert with_nodes.is_internode_available() and with_nodes.get_rdma_rank() == 2
    assert (with_nodes.get_root_rdma_rank(True), with_nodes.get_root_rdma_rank(False)) == (1, 0)


def version_1_calls(buffer, number):
    routing = {"topk_idx": IDX, "topk_weights": torch.ones(2, 2), "num_tokens_per_expert": COUNTS}
    config = Config(number(24), number(8), number(256))
    assert len(buffer.get_dispatch_layout(IDX, number(4))) == 5
    rows, *_, counts, handle, _ = buffer.dispatch(X, **routing, expert_alignment=number(8), config=config)
    assert counts == [8] * 4 and type(counts[0]) is int
    assert buffer.dispatch(X, **routing, num_worst_tokens=number(16))[0].shape == (16, 64)
    buffer.combine(rows, handle, config=config)
    for hint, sizes in (
        (config.get_nvl_buffer_size_hint, (128, 2)),
        (config.get_rdma_buffer_size_hint, (128, 16)),
        (Buffer.get_low_latency_rdma_size_hint, (8, 64, 1, 4)),
    ):
        assert type(hint(*map(number, sizes))) is int
    Buffer.set_num_sms(number(20))


def version_2_calls(buffer, number):
    sizes = {"num_experts": 4, "num_max_tokens_per_rank": 8, "expert_alignment": 4, "num_sms": 4}
    sizes = {name: number(size) for name, size in sizes.items()}
    rows, _, _, handle, _ = buffer.dispatch(X, IDX, torch.ones(2, 2), do_expand=True, do_cpu_sync=False, **sizes)
    assert len(rows) == 28 and handle.num_recv_tokens == 8 and type(handle.num_experts) is int
    buffer.combine(rows, handle, num_sms=number(4))


def hybrid_calls(buffer, number):
    sizes = {"num_of_experts": number(4), "num_permuted_tokens": number(8), "pad_multiple": number(2)}
    rows, *_, handle = buffer.dispatch_with_permute(hidden=X, topk_idx=IDX, **sizes)
    assert len(rows) == 8
    buffer.combine_with_unpermute(hidden=rows, handle=handle, pad_multiple=number(2))


KINDS = {
    "V1": (lambda group, number: Buffer(group, number(64), number(64)), version_1_calls),
    "V2": (lambda group, number: ElasticBuffer(group, None, 0, number(8), number(64), number(2)), version_2_calls),
    "V2_5": (lambda group, number: EPBuffer(group, None, number(8), number(64), number(2)), version_2_calls),
    "hybrid": (lambda group, number: HybridEPBuffer(group, number(64), number(8), number(4)), hybrid_calls),
}


@pytest.mark.parametrize("number", (np.int64, np.int32, torch.tensor), ids=("int64", "int32", "tensor"))
@pytest.mark.parametrize("kind", KINDS)
def test_numbers_of_any_kind(group, kind, number):
    construct, call = KINDS[kind]
    call(construct(group, number), number)


@on_ranks(2, name=("V1", "V2", "V2_5"))
def test_after_destroy(rank, name):
    """The rank that has destroyed its buffer learns so at once, and makes no other. Its peer hears that it is gone."""
    construct, _ = KINDS[name]
    buffer = construct(dist.group.WORLD, int)

    def dispatch(columns=64):
        routing = {"num_tokens_per_expert": COUNTS} if name == "V1" else {"num_experts": 4}
        return buffer.dispatch(X[:, :columns].contiguous(), topk_idx=IDX, **routing)

    def low_latency():
        return buffer.low_latency_dispatch(X, IDX, 8, 4, use_fp8=False)

    handle = dispatch()[4 if name == "V1" else 3]
    calls, more = [dispatch, partial(dispatch, 32)], [lambda: buffer.combine(X, handle)]
    if name == "V1":
        small = low_latency()[2]
        calls.insert(1, low_latency)
        more += [
            lambda: buffer.get_dispatch_layout(IDX, 4), lambda: buffer.get_local_buffer_tensor(torch.int8), buffer.low_latency_rejoin,
            lambda: buffer.low_latency_combine(X, IDX, torch.ones(2, 2), small), lambda: buffer.dispatch(None, handle),
            lambda: buffer.get_next_low_latency_combine_buffer(small), lambda: buffer.low_latency_update_mask_buffer(1, True),
            lambda: buffer.low_latency_query_mask_buffer(COUNTS[:2]),
        ]  # fmt: skip
    else:
        more += [buffer.barrier, lambda: buffer.dispatch(None)]
    dist.barrier()
    if rank == 0:
        buffer.destroy()
        buffer.destroy()
    dist.barrier()
    for call in (*calls, *more) if rank == 0 else calls:
        with pytest.raises(BufferDestroyedError if rank == 0 else EPPeerError, match="destroyed" if rank == 0 else "rank 0"):
            call()
    dist.barrier()


@on_ranks(2)
def test_outside_of_the_group(rank):
    group = dist.new_group([0])
    if rank == 1:
        for construct, _ in KINDS.values():
            with pytest.raises(ValueError, match="this process is not a member of the group"):
                construct(group, int)
    for construct, call in KINDS.values():
        with pytest.raises((TypeError, ValueError), match="group is"):
            construct(None, int)
        with pytest.raises(TypeError, match="group is 'all'"):
            construct("all", int)
        if rank == 0:
            call(construct(group, int), int)
    dist.barrier()


ROUTING = {"topk_idx": IDX, "num_tokens_per_expert": COUNTS}
BAD_DISPATCHES = [
    ({"topk_idx": IDX}, ValueError, "num_tokens_per_expert is missing"),
    ({"num_tokens_per_expert": COUNTS}, ValueError, "topk_idx and is_token_in_rank are missing"),
    (ROUTING | {"topk_idx": IDX[0]}, ValueError, r"topk_idx has shape \[2\]; it must be \[num_tok"),
    (ROUTING | {"num_tokens_per_expert": 4}, ValueError, "num_tokens_per_expert is 4; it must be a tensor"),
    ({"is_token_in_rank": IDX, "num_tokens_per_expert": COUNTS}, ValueError, "is_token_in_rank has .* dtype torch.int64"),
    ({"handle": (X,)}, TypeError, "handle is a tuple"),
    (ROUTING | {"previous_event": 1}, TypeError, "previous_event is a int"),
    (ROUTING | {"x": X[:, ::2]}, ValueError, "is not contiguous"),
    (ROUTING | {"x": (X.to(FP8), IDX[:, :1])}, TypeError, "x_scales has dtype"),
    ({"x": (X.to(FP8), IDX.int()), "topk_idx": IDX}, ValueError, r"x_scales of int32 has shape \[2, 2\]"),
    (ROUTING | {"topk_idx": IDX + 2}, ValueError, r"topk_idx\[0, 1\] is 5; it must be -1 \(no expert\) or 0 to 3"),
    (ROUTING | {"expert_alignment": 0}, ValueError, "expert_alignment is 0"),
]


def test_bad_dispatch(group):
    for arguments, error, message in BAD_DISPATCHES:
        with pytest.raises(error, match=message):
            Buffer(group).dispatch(**({"x": X} | arguments))


def test_what_is_refused(group):
    buffer = Buffer(group, low_latency_mode=True)
    for error, message, call in (
        (NotImplementedError, r"deep_ep\.Buffer's comm", lambda: Buffer(None, comm=object())),
        (NotImplementedError, "deep_ep.Buffer.internode_dispatch is not served", buffer.internode_dispatch),
        (NotImplementedError, "deep_ep.Buffer.internode_combine is not served", buffer.internode_combine),
        *((ValueError, f"rank_to_mask is {bad}", partial(buffer.low_latency_update_mask_buffer, bad, True)) for bad in (-1, 1, 0)),
    ):
        with pytest.raises(error, match=message):
            call()


@pytest.mark.parametrize("backend", BACKENDS)
def test_bad_layout(group, backend):
    device = device_of(backend, 0)
    with pytest.raises(ValueError, match="num_experts is 0; it must be a multiple of the group's 1 ranks"):
        Buffer(group).get_dispatch_layout(IDX.to(device), 0)
    with pytest.raises(ValueError, match=r"topk_idx has shape \[4\]"):
        Buffer(group).get_dispatch_layout(COUNTS.to(device), 4)
