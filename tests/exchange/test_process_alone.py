"""Buffers of a process without a group: they serve the kind of device that the first rows lie on."""

import logging

import pytest
import torch
from exchange_cases import device_of

from deepep_moe import Buffer, LowLatencyBuffer
from deepep_moe.errors import EPError

IDX = torch.tensor([[0, 1], [2, -1], [3, 1], [1, 0]])


def rows(device) -> torch.Tensor:
    return torch.randn(4, 128, generator=torch.Generator().manual_seed(1)).to(device)


def pass_through(buffer: Buffer, x: torch.Tensor) -> torch.Tensor:
    """Dispatch and combine, plain and along a handle: each token comes back as often as it has experts."""
    idx, num_experts = IDX.to(x.device), (IDX >= 0).sum(1, keepdim=True).to(x.device)
    out = buffer.dispatch(x, idx)
    assert torch.equal(out.recv_x[0], x[0]) and torch.equal(out.handle.num_rows_per_expert.cpu(), torch.tensor([2, 3, 1, 1]).int())
    again = buffer.dispatch(x, handle=out.handle)
    assert torch.equal(again.recv_x, out.recv_x)
    combined = buffer.combine(out.recv_x, out.handle)
    assert torch.equal(combined, x * num_experts) and combined.device == x.device
    return combined


def pass_through_low_latency(buffer: LowLatencyBuffer, x: torch.Tensor) -> None:
    for _ in range(2):
        out = buffer.dispatch(x, IDX.to(x.device))
        assert torch.equal(out.num_recv_tokens_per_expert.cpu(), torch.tensor([2, 3, 1, 1]).int())
        combined = buffer.combine(out.recv_x, out.handle)
        assert torch.equal(combined, x * (IDX >= 0).sum(1, keepdim=True).to(x.device))
    assert buffer.statistics().num_tokens_per_expert.sum() == 14


@pytest.mark.parametrize("has_gpu", (False, True))
def test_cpu_tensors_with_and_without_a_gpu(monkeypatch, has_gpu):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    buffer = Buffer(None, 8, 128, 4, 2)
    pass_through(buffer, rows("cpu"))
    pass_through_low_latency(LowLatencyBuffer(None, 8, 128, 4, 2), rows("cpu"))
    assert buffer.backend == "shm"
    with pytest.raises(ValueError, match="x is on meta; backend 'shm' moves tensors on cpu"):
        buffer.dispatch(torch.empty(4, 128, device="meta"), IDX.to("meta"))


def test_what_lies_somewhere_waits_for_the_first_rows(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    buffer = LowLatencyBuffer(None, 8, 128, 4, 2)
    for ask in (buffer.statistics, buffer.combine_input):
        with pytest.raises(EPError, match="does not know yet whether its rows lie on the GPU"):
            ask()
    pass_through_low_latency(buffer, rows("cpu"))
    assert buffer.combine_input(torch.float32).device.type == "cpu"


@pytest.mark.gpu
def test_gpu_tensors(caplog):
    device = device_of("nvlink", 0)
    with caplog.at_level(logging.INFO, logger="deepep_moe"):
        buffer = Buffer(None, 8, 128, 4, 2, max_sms=9)
        assert buffer.backend == "shm", "until the first rows come"
        pass_through(buffer, rows(device))
    assert buffer.backend == buffer.calls.backend.name == "nvlink" and buffer.calls.backend.tuning.max_sms == 9
    assert ["backend nvlink" in record.message for record in caplog.records].count(True) == 1
    x = rows(device).requires_grad_()
    pass_through(buffer, x).sum().backward()
    assert torch.equal(x.grad.cpu(), (IDX >= 0).sum(1, keepdim=True).float().expand(4, 128))
    pass_through(buffer, rows(device))
    buffer.destroy()
    low_latency = LowLatencyBuffer(None, 8, 128, 4, 2)
    pass_through_low_latency(low_latency, rows(device))
    assert low_latency.backend == "nvlink"


@pytest.mark.gpu
def test_gpu_tensors_in_other_first_calls():
    device = device_of("nvlink", 0)
    x = rows(device)
    bounded = Buffer(None, 8, 128, 4, 2)
    bounded.allow_excess()
    out = bounded.dispatch(x, IDX.to(device), num_recv_rows=5)  # of 7, which only GPUs leave out
    assert bounded.backend == "nvlink" and len(out.recv_x) == 5
    bounded.check()
    hooked = Buffer(None, 8, 128, 4, 2)
    out = hooked.dispatch(x, IDX.to(device), return_hook=True)
    out.hook()
    assert hooked.backend == "nvlink" and torch.equal(out.recv_x[0], x[0])
    wrong = Buffer(None, 8, 128, 4, 2)
    with pytest.raises(ValueError, match="topk_idx"):
        wrong.dispatch(x, IDX[:, :1].to(device))
    pass_through(wrong, x)


@pytest.mark.gpu
def test_a_first_call_is_not_captured(monkeypatch):
    x = rows(device_of("nvlink", 0))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    buffers = Buffer(None, 8, 128, 4, 2), LowLatencyBuffer(None, 8, 128, 4, 2)
    for buffer in buffers:
        with pytest.raises(ValueError, match="gets its memory in its first dispatch; make one before the capture"):
            buffer.dispatch(x, IDX.to(x.device))
    monkeypatch.undo()
    pass_through(buffers[0], x)
    pass_through_low_latency(buffers[1], x)
    assert [buffer.backend for buffer in buffers] == ["nvlink", "nvlink"], "a refused call decides nothing"
