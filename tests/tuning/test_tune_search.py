"""The tuner's search and statistics, on made-up times; its command line. No GPU."""

import math
import random
from dataclasses import replace

import pytest
from scripts import run_python

from deepep_moe.tune import command
from deepep_moe.tune.ranks import Outcome
from deepep_moe.tune.search import PAIRS, Meter, axes, compare, median_interval, search
from deepep_moe.tuning import Files, Machine, Profile, Shape, Values, load

MACHINE = Machine("made up", 132, 4, 1)
DEFAULT = Values(12, 14, 6, 4, 64, 0)


class MadeUp:
    """Times of a machine whose best settings are `best`: each setting that is off costs a share. A sample takes `seconds`."""

    def __init__(self, best: Values, noise: float = 0.0, seconds: float = 0.0, limit_s: float = 1e9):
        self.best, self.noise, self.seconds, self.now, self.random = best, noise, seconds, 0.0, random.Random(3)
        self.lines: list[str] = []
        self.measured: list[Values] = []
        self.meter = Meter(self.sample, lambda: self.now > limit_s, self.lines.append)

    def sample(self, values: Values, count: int) -> list[float]:
        self.measured.append(values)
        self.now += self.seconds * count
        off = sum(abs(math.log2((getattr(values, name) + 1) / (best + 1))) for name, best in vars(self.best).items())
        return [500 * (1 + 0.05 * off) * (1 + self.noise * self.random.random()) for _ in range(count)]


def test_search_finds_the_best():
    best = Values(24, 20, 8, 4, 96, 66)
    made_up = MadeUp(best, noise=0.02)
    assert search(DEFAULT, MACHINE, made_up.meter) == best
    assert made_up.lines and all(line.startswith("best so far ") for line in made_up.lines)
    assert any(" us: num_sms 24, " in line and line.endswith(" (of 13)") for line in made_up.lines)


def test_search_ends_in_time():
    made_up = MadeUp(Values(24, 20, 8, 4, 96, 66), seconds=1.0, limit_s=100)  # 8 s a setting
    search(DEFAULT, MACHINE, made_up.meter)
    assert 100 < made_up.now <= 108


@pytest.mark.parametrize(("num_ranks", "count"), [(2, 4), (4, 5)])
def test_axes(num_ranks, count):
    """Candidates fit the machine, and differ from where they start in one setting, or in the two of the ring."""
    machine = Machine("made up", 33, num_ranks, 1)
    searched = axes(machine)
    assert len(searched) == count
    for axis in searched:
        assert len({tuple(change) for change in axis}) == 1
        for change in axis:
            values = replace(DEFAULT, **change)
            assert len(change) == 1 or change.keys() == {"ring_warps", "ring_stages"}
            assert max(values.num_sms, values.num_sms_of_sums) <= 16 and values.num_work_blocks < 33


# ---- statistics ----


def test_interval_by_hand():
    """The range of 8 values misses the median with probability 2 / 256, the second to seventh with 18 / 256."""
    values = [float(n) for n in (5, 3, 8, 1, 7, 2, 6, 4)]
    assert median_interval(values, 0.99) == (1, 8) and median_interval(values, 0.92) == (2, 7)
    assert median_interval(values, 0.995) == (-math.inf, math.inf)


def test_compare_alternates():
    best = replace(DEFAULT, num_sms=24)
    made_up = MadeUp(best, noise=0.02)
    verdict = compare(DEFAULT, best, made_up.meter)
    assert 0 < verdict.low < verdict.gain < verdict.high and verdict.gain == pytest.approx(0.0451, abs=2e-3)
    assert made_up.measured[:4] == [DEFAULT, best, best, DEFAULT] and len(made_up.measured) == 2 * PAIRS
    assert compare(best, DEFAULT, MadeUp(best).meter).high < 0


# ---- command line ----


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """A folder on a machine of 4 GPUs, where nobody has launched ranks."""
    monkeypatch.setattr(command.torch.cuda, "device_count", lambda: 4)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_nothing_to_tune():
    assert run_python("-m", "deepep_moe", "tune").stdout == command.NOTHING_TO_TUNE + "\n"


@pytest.mark.parametrize(
    ("num_gpus", "arguments", "message"),
    [
        (1, ["--num-ranks", "3"], "--num-ranks 3 must be at least 2 and divide --num-experts 256"),
        (1, ["--num-ranks", "2"], "2 ranks share 1 GPUs, so no link is measured"),
        (2, ["--output", "damaged.json"], "a profile cannot be added to damaged.json: its format is None"),
        (2, ["--output", "damaged.json/profiles.json"], "a profile cannot be added to damaged.json/profiles.json: "),
    ],
)
def test_bad_arguments(num_gpus, arguments, message, capsys, monkeypatch, machine):
    """They are known before the run."""
    monkeypatch.setattr(command.torch.cuda, "device_count", lambda: num_gpus)
    (machine / "damaged.json").write_text("{}")
    with pytest.raises(SystemExit) as end:
        command.main(arguments)
    assert end.value.code == 2 and message in capsys.readouterr().err


PROFILE = Profile(MACHINE, Shape(4096, 7168, 8), DEFAULT, 0.04, "a test")


def test_outcomes_are_written(machine, capsys, monkeypatch):
    """Each EP size has its own profile; if nothing is faster, nothing is written."""
    outcomes = [Outcome("nothing is faster", None), Outcome("faster: all", PROFILE)]
    monkeypatch.setattr(command, "start", lambda measure, options: outcomes)
    assert command.main([]) == 0
    file = machine / "cache" / "deepep_moe" / "profiles.json"
    assert [entry.profile for entry in load(Files(file, None)).profiles] == [PROFILE]
    assert capsys.readouterr().out.splitlines() == [
        "EP2: nothing is faster", "EP4: faster: all", f"EP4: wrote a profile for {MACHINE}, {PROFILE.shape} to {file}",
    ]  # fmt: skip


def fails(*_):
    raise command.RankFailedError(1, "no such luck")


def test_failed_run(machine, capsys, monkeypatch):
    monkeypatch.setattr(command, "start", fails)
    assert command.main(["--num-ranks", "2"]) == 1 and "rank 1 failed: no such luck" in capsys.readouterr().err
    assert not list((machine / "cache").rglob("*.json"))
