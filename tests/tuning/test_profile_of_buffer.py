"""The profile that a buffer of GPUs takes: agreed on by all ranks, overridden by arguments, without effect on results."""

import os
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from exchange_cases import Case, assert_same, device_of, inputs_of
from logs import heard
from on_ranks import on_ranks

from deepep_moe import Buffer, reference
from deepep_moe.errors import EPMismatchError
from deepep_moe.exchange.backends.nvlink import NvlinkBackend
from deepep_moe.tuning import Profile, Shape, Values
from deepep_moe.tuning.profiles import as_text

pytestmark = pytest.mark.gpu
VALUES = Values(2, 5, 4, 3, 7, 3)
HIDDEN, NUM_EXPERTS, NUM_TOPK = 72, 12, 3


def set_files(user: Path | None, named: Path | None) -> None:
    """Set the profile files of this rank. `user` is the folder of the user's cache."""
    os.environ["XDG_CACHE_HOME"] = str(user or "/nonexistent")
    os.environ.pop("DEEPEP_MOE_PROFILE", None)
    if named is not None:
        os.environ["DEEPEP_MOE_PROFILE"] = str(named)


def new_buffer(rank: int, **arguments) -> Buffer:
    device_of("nvlink", rank)
    return Buffer(None, 200, HIDDEN, NUM_EXPERTS, NUM_TOPK, backend="nvlink", timeout_s=60, **arguments)


def tuning_of(buffer: Buffer) -> Values:
    tuning = buffer.calls.backend.tuning
    return Values(**{name: getattr(tuning, name) for name in asdict(VALUES)})


def prepare(rank: int, folder: Path) -> tuple[Profile, Values]:
    """Make a profile of this machine; `other.json` has one of another. Return it and the settings without a profile."""
    set_files(None, None)
    buffer = new_buffer(rank)
    assert buffer.profile is None
    mine = Profile(buffer.calls.backend.machine, Shape(256, HIDDEN, NUM_TOPK), VALUES, 0.1, "a test")
    fitted, other = tuning_of(buffer), replace(mine, machine=replace(mine.machine, gpu="another GPU"))
    texts = {
        "other.json": [other],
        "given.json": [mine],
        "cache/deepep_moe/profiles.json": [replace(mine, values=replace(VALUES, num_sms=1))],
    }
    if rank == 0:
        for name, profiles in texts.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(as_text(profiles))
        (folder / "damaged.json").write_text('{"format": 7}')
    dist.barrier()
    return mine, fitted


@on_ranks(2)
def test_order_of_files(rank, tmp_path):
    mine, fitted = prepare(rank, tmp_path)
    assert fitted != VALUES
    lines = heard()
    set_files(tmp_path / "cache", None)
    assert tuning_of(new_buffer(rank)) == replace(VALUES, num_sms=1)
    set_files(tmp_path / "cache", tmp_path / "given.json")
    buffer = new_buffer(rank, num_sms=6, max_sms=9)
    assert buffer.profile == mine and tuning_of(buffer) == VALUES
    assert buffer.calls.own_mode.num_sms == 6 and buffer.calls.backend.tuning.max_sms == 9  # which native code puts before it
    set_files(tmp_path / "cache", tmp_path / "other.json")
    assert tuning_of(new_buffer(rank)) == replace(VALUES, num_sms=1)
    set_files(None, tmp_path / "damaged.json")
    for _ in range(2):
        buffer = new_buffer(rank)
        assert buffer.profile is None and tuning_of(buffer) == fitted
    names = [text.split()[1] for text in lines]
    assert names == ([str(tmp_path / "damaged.json")] if rank == 0 else [])
    assert rank or "its format is 7, this version of deepep_moe reads 1. Its profiles are not used" in lines[0]


@on_ranks(3)
def test_ranks_that_disagree(rank, tmp_path):
    prepare(rank, tmp_path)
    set_files(None, tmp_path / "given.json" if rank != 1 else None)
    with pytest.raises(EPMismatchError) as error:
        new_buffer(rank)
    message = str(error.value)
    assert "ranks disagree on num_sms of the profile (rank 0: 2, rank 1: None, rank 2: 2); give every rank the same files" in message
    set_files(tmp_path / "cache" if rank == 0 else None, None if rank == 0 else tmp_path / "given.json")
    with pytest.raises(EPMismatchError, match=r"num_sms of the profile \(rank 0: 1, rank 1: 2, rank 2: 2\)"):
        new_buffer(rank)
    set_files(None, tmp_path / "given.json")
    assert new_buffer(rank).profile is not None  # nothing is left behind


@on_ranks(2)
def test_unlike_gpus(rank, tmp_path):
    """Rank 1 has another GPU, for which the file has no profile."""
    prepare(rank, tmp_path)
    set_files(None, tmp_path / "given.json")
    lines, machine = heard(), NvlinkBackend.machine
    if rank == 1:
        NvlinkBackend.machine = property(lambda self: replace(machine.fget(self), gpu="a third GPU"))
    for _ in range(2):
        assert new_buffer(rank).profile is None
    NvlinkBackend.machine = machine
    assert new_buffer(rank).profile is not None
    assert len(lines) == (rank == 0)
    assert rank or "ranks have unlike GPUs or shares of them, so none uses a profile (rank 0: " in lines[0]
    assert rank or "; rank 1: a third GPU with" in lines[0]


@on_ranks(3, layout=("expert", "rank"))
def test_settings_may_change_between_calls(rank, num_ranks, layout):
    """One handle; the dispatch with some senders, each combine and cached dispatch with others, and with another division of the GPU."""
    case = Case([60, 0, 33], layout=layout, dtype=torch.bfloat16, expert_alignment=4)
    xs, idxs, weights = inputs_of(case)
    received = reference.dispatch(xs, idxs, weights, case.num_experts, layout=layout, expert_alignment=4)
    outputs = [case.expert_outputs(r, len(received[r].recv_x)) for r in range(num_ranks)]
    combined = reference.combine(outputs, received, case.num_tokens, None, None)
    device = device_of("nvlink", rank)
    x, idx, weight, output = (tensor.to(device) for tensor in (xs[rank], idxs[rank], weights[rank], outputs[rank]))
    buffer = Buffer(None, 60, case.hidden, case.num_experts, case.num_topk, backend="nvlink", timeout_s=60)
    backend, fitted = buffer.calls.backend, tuning_of(buffer)
    most = backend.machine.num_sms
    for num_sms in (5, most):
        out = buffer.dispatch(x, idx, weight, layout=layout, expert_alignment=4, num_sms=num_sms)
        assert_same("recv_x", out.recv_x, received[rank].recv_x)
        for other, values in ((1, fitted), (0, fitted), (most, VALUES), (None, VALUES), (3, Values(1, 1, 11, 6, 1, 1)), (None, fitted)):
            backend.use(values)
            assert_same(f"combined_x, {other} SMs", buffer.combine(output, out.handle, num_sms=other), combined[rank])
            again = buffer.dispatch(x, topk_weights=weight, handle=out.handle, num_sms=other)
            assert_same(f"recv_x, {other} SMs", again.recv_x, received[rank].recv_x)
