"""Check on which stream DeepEP's calls run, what they wait for, and which memory outlives them, by recording fake streams."""

from types import SimpleNamespace

import pytest
import torch
from deep_ep_cases import Wanted
from exchange_cases import Case, assert_same

from deepep_moe.compat.deep_ep import Buffer, EventHandle, EventOverlap
from deepep_moe.compat.deep_ep.streams import CommStream


class Stream:
    def __init__(self, name, notes):
        self.name, self.notes = name, notes

    def wait_stream(self, other):
        self.notes.append(f"{self.name} waits for {other.name}")

    def wait_event(self, event):
        self.notes.append(f"{self.name} waits for {event.name}")


@pytest.fixture
def cuda(monkeypatch):
    """A GPU's streams: `cuda.now` is the current one, `cuda.notes` has what was asked of them."""
    cuda = SimpleNamespace(notes=[], events=0)
    cuda.now = Stream("caller's", cuda.notes)

    class Event:
        device = None

        def record(self):
            cuda.events += 1
            self.name = f"event {cuda.events}"
            cuda.notes.append(f"{self.name} on {cuda.now.name}")

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: Stream("own", cuda.notes))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: cuda.now)
    monkeypatch.setattr(torch.cuda, "set_stream", lambda stream: setattr(cuda, "now", stream))
    return cuda


class Rows(torch.Tensor):
    """Rows of a GPU, which note the streams that use them."""

    is_cuda = True

    def record_stream(self, stream):
        stream.notes.append(f"{self.title} used on {stream.name}")


def rows(title):
    tensor = torch.zeros(1).as_subclass(Rows)
    tensor.title = title
    return tensor


def call(cuda, stream, previous_event, is_async):
    begun = stream.begin(rows("x"), previous_event, is_async)
    cuda.notes.append(f"call on {cuda.now.name}")
    return begun.end((rows("x"), None), (rows("result"), None))


def test_synchronous_call(cuda):
    previous = Buffer.capture()
    assert call(cuda, CommStream(), previous, False).event is None
    assert cuda.notes == ["event 1 on caller's", "caller's waits for event 1", "call on caller's"]


def test_asynchronous_call(cuda):
    with call(cuda, CommStream(), None, True):
        assert cuda.notes[-1] == "result used on caller's"
    assert cuda.notes == [
        "own waits for caller's", "call on own", "event 1 on own", "x used on own", "result used on caller's", "caller's waits for event 1",
    ]  # fmt: skip
    assert cuda.now.name == "caller's"


@pytest.mark.parametrize(
    "kind", (lambda: EventOverlap(EventHandle()), EventHandle, lambda: EventHandle().recorded), ids=("V1", "V2", "PyTorch")
)
def test_previous_event(cuda, kind):
    call(cuda, CommStream(), kind(), True)
    assert cuda.notes[:3] == ["event 1 on caller's", "own waits for event 1", "call on own"]


def test_failed_call(cuda):
    stream = CommStream()
    with pytest.raises(ValueError), stream.begin(rows("x"), None, True):
        assert cuda.now.name == "own"
        raise ValueError
    assert cuda.now.name == "caller's"


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() == 0, reason="needs the streams of a GPU")
def test_other_stream_on_a_gpu(tmp_path):
    """Calls on the communication stream while the caller's computes: the same bits, and an event that is CUDA's."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        buffer, want = Buffer(torch.distributed.group.WORLD), Wanted(Case([64], hidden=1024, dtype=torch.bfloat16), 0)
        device = torch.device("cuda", torch.cuda.current_device())
        x, routing = want.x_on(device), want.routing(device)
        for _ in range(3):
            busy = torch.randn(2048, 2048, device=device)
            for _ in range(10):
                busy = busy @ busy / 64
            how = {"async_finish": True, "allocate_on_comm_stream": True}
            *_, per_expert, in_rank, event = buffer.get_dispatch_layout(routing["topk_idx"], 12, previous_event=Buffer.capture(), **how)
            recv_x, _, recv_weights, _, handle, event = buffer.dispatch(
                x, num_tokens_per_expert=per_expert, is_token_in_rank=in_rank, previous_event=event, **routing, **how
            )
            assert isinstance(event.event.recorded, torch.cuda.Event)
            event.current_stream_wait()
            doubled = recv_x * 2
            combined, back, event = buffer.combine(doubled, handle, recv_weights, previous_event=Buffer.capture(), **how)
            event.current_stream_wait()
            assert_same("combined weights", back, want.topk_weights)
            assert_same("combined_x", combined, want.combined(outputs=[want.mine.recv_x * 2]))
    finally:
        torch.distributed.destroy_process_group()
