"""The tuner on GPUs, or on the emulated one: one buffer in each rank's process for all settings."""

import argparse
from dataclasses import replace
from pathlib import Path

import emulated_gpu
import pytest
from exchange_cases import device_of
from on_ranks import on_ranks

from deepep_moe import Buffer
from deepep_moe.errors import EPError, EPMismatchError
from deepep_moe.exchange.backends.nvlink import NvlinkBackend
from deepep_moe.testing import run_ranks
from deepep_moe.tune import command, ranks, search
from deepep_moe.tune.ranks import Outcome, tune
from deepep_moe.tuning import Values

pytestmark = pytest.mark.gpu
SLOW = 40.0
"""Milliseconds by which every other setting is slower than `BEST` in the tests that find something."""
BEST = {"num_sms": 2, "num_work_blocks": 0}


def options(num_ranks: int, time_limit: float = 60.0, **changes) -> argparse.Namespace:
    sizes = {"num_tokens": 24, "hidden": 64, "num_experts": 4 * num_ranks, "num_topk": 2, "expert_alignment": 4}
    how = {"on_gpu": not emulated_gpu.is_chosen(), "dtype": "bf16"}
    return argparse.Namespace(**sizes | how | {"num_ranks": [num_ranks], "time_limit": time_limit} | changes)


def few_candidates() -> None:
    """Keeps a test short: two settings, two or three candidates each."""
    search.SENDERS, search.RECEIVERS, search.RINGS = (2, 3), (64,), ((6, 4),)
    search._SAMPLES, search.PAIRS = 1, 16


def tuned(rank: int, num_ranks: int, options: argparse.Namespace) -> tuple[Outcome, int]:
    """Tune with times of which all but those of `BEST` are longer; return what was found and the number of buffers."""
    device_of("nvlink", rank)
    few_candidates()
    buffers = []
    new, sample = ranks.TuneRank.new_buffer, ranks.TuneRank._sample

    def counted(self):
        buffers.append(new(self))
        return buffers[-1]

    def skewed(self, backend, calls, values, count):
        off = sum(getattr(values, name) != best for name, best in BEST.items())
        times = sample(self, backend, calls, values, count)
        return [min(us, 2e4) + 1e3 * SLOW * off for us in times]  # a busy machine may be late by more than the difference

    ranks.TuneRank.new_buffer, ranks.TuneRank._sample = counted, skewed
    return tune(rank, num_ranks, options), len(buffers)


def loads(rank: int, num_ranks: int, file: Path) -> Values | None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DEEPEP_MOE_PROFILE", str(file))
        device_of("nvlink", rank)
        buffer = Buffer(None, 20, 128, 4 * num_ranks, 2, backend="nvlink", timeout_s=60)
        assert buffer.profile is not None and buffer.calls.backend.tuning.num_sms == buffer.profile.values.num_sms
        return buffer.profile.values


def through_the_command(rank: int, num_ranks: int, options: argparse.Namespace) -> Outcome:
    options.on_gpu = not emulated_gpu.is_chosen()
    outcome, num_buffers = tuned(rank, num_ranks, options)
    assert num_buffers == 1
    return outcome


def test_command(tmp_path, monkeypatch, capsys):
    """The whole way from the command line to a buffer that uses the profile."""
    monkeypatch.setattr(command.torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(command, "tune", through_the_command)
    monkeypatch.delenv("RANK", raising=False)
    file = tmp_path / "profiles.json"
    sizes = ["--num-tokens", "24", "--hidden", "128", "--dtype", "fp8", "--num-experts", "8", "--num-topk", "2"]
    assert command.main(["--num-ranks", "2", *sizes, "--output", str(file)]) == 0
    said, wrote = capsys.readouterr().out.splitlines()
    assert said.startswith("EP2: faster: num_sms 2, ") and wrote.startswith("EP2: wrote a profile for ") and wrote.endswith(str(file))
    assert [values.num_sms for values in run_ranks(loads, 2, file)] == [2, 2]


@on_ranks(2)
def test_nothing_is_faster(rank: int, num_ranks: int) -> None:
    device_of("nvlink", rank)
    few_candidates()
    sample = ranks.TuneRank._sample
    ranks.TuneRank._sample = lambda self, *arguments: [100.0 for _ in sample(self, *arguments)]
    assert tune(rank, num_ranks, options(2)) == Outcome(ranks.NOTHING_FASTER, None)


def unlike_gpus(rank: int) -> None:
    machine = NvlinkBackend.machine
    if rank == 1:
        NvlinkBackend.machine = property(lambda self: replace(machine.fget(self), num_sms=1))


def other_bits(rank: int) -> None:
    """A setting with other results, which there must not be."""
    use, combine, in_use = NvlinkBackend.use, Buffer.combine, []
    NvlinkBackend.use = lambda self, values: (in_use.append(values), use(self, values))[1]
    Buffer.combine = lambda self, *args, **kwargs: combine(self, *args, **kwargs) + (in_use[-1].num_sms if in_use else 0)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        (unlike_gpus, EPMismatchError, ("ranks disagree on the GPU (rank 0: '", " with 1 SMs, 2 ranks")),
        (other_bits, EPError, ("combined_x with num_sms 2, ", "differs from that with the default settings")),
    ],
)
@on_ranks(2)
def test_what_ends_the_run(rank, num_ranks, change, error, words):
    device_of("nvlink", rank)
    change(rank)
    with pytest.raises(EPError) as raised:
        tuned(rank, num_ranks, options(2))
    assert type(raised.value) is error and all(word in str(raised.value) for word in words), raised.value
