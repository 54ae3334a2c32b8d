"""Two runs of an example alternate their steps. Also the figures of a CPU's timeline."""

import time

import pytest
import torch

pytest.importorskip("matplotlib")
import launch
import timeline

from deepep_moe.testing import RankFailedError


def steps(rank: int, num_ranks: int, run: tuple[str, str], turn) -> float:
    """Three steps, of which each writes when it begins and ends. Returns the seconds of waits."""
    name, file = run
    waited = 0.0
    for _ in range(3):
        waited += turn.take()
        with open(file, "a") as log:
            log.write(f"{name}\n")
        time.sleep(0.05)
        with open(file, "a") as log:
            log.write(f"{name}\n")
        turn.give()
    return waited


def fails(rank: int, num_ranks: int, run: str, turn) -> None:
    for _ in range(3):
        turn.take()
        if run == "second":
            raise ValueError("no such luck")
        turn.give()


def test_steps_by_turns(tmp_path):
    file = tmp_path / "log"
    waited = launch.by_turns(steps, 2, [("a", str(file)), ("b", str(file))], 120, bind=False)
    log = file.read_text().split()
    assert log == ["a"] * 4 + ["b"] * 4 + ["a"] * 4 + ["b"] * 4 + ["a"] * 4 + ["b"] * 4, "two ranks, a line at the begin and end of a step"
    assert all(seconds >= 0.05 for seconds in waited), "a wait for a step of the other"


def test_a_run_that_fails_ends_the_other():
    with pytest.raises(RankFailedError, match="no such luck|the other run has failed"):
        launch.by_turns(fails, 1, ["first", "second"], 120, bind=False)


def test_timeline_of_a_cpu():
    x = torch.randn(64, 64)
    seen = timeline.record_cpu(lambda: (x @ x).relu(), num_steps=3)
    kinds = [kernel.kind for kernel in seen.kernels]
    assert kinds.count("products") == 3 and set(kinds) == {"products", "other"} and seen.figures() == {"exchange_ms": 0.0}
    spans = (("_Dispatch", 0.0, 2.0), ("_DispatchBackward", 3.0, 4.0), ("other", 2.0, 6.0))
    kernels = [timeline.Kernel(name, 0, begin, end) for name, begin, end in spans]
    seen = timeline.Timeline(kernels, 2, 0, "cpu")
    assert [kernel.kind for kernel in kernels] == ["dispatch", "combine", "other"]
    assert str(seen) == "exchange 1.50 ms a step, 50% of it"
