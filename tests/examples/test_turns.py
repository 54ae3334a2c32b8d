"""Two runs of an example alternate their steps. Also the figures of a CPU's timeline."""

import time

import pytest
import torch

pytest.importorskip("matplotlib")
import launch
import numpy as np
import pages
import report
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


@pytest.mark.parametrize(
    "num_runs, device, launched, order",
    (
        (1, "cpu", False, None), (2, "cpu", False, "steps by turns"), (2, "cuda", False, "one run after the other"),
        (3, "cpu", False, "one run after the other"), (2, "cpu", True, "one run after the other"),
    ),
)  # fmt: skip
def test_order_of_runs(num_runs, device, launched, order, monkeypatch):
    """The order that a page names is the order of the runs. A single run waits for nobody."""
    assert launch.Turn().take() == 0.0
    monkeypatch.setattr(launch, "is_launched", lambda: launched)
    monkeypatch.setattr(launch, "by_turns", lambda fn, num_ranks, runs, timeout_s, bind: "by turns")
    monkeypatch.setattr(launch, "on_ranks", lambda fn, num_ranks, run, timeout_s, bind: run)
    runs = list(range(num_runs))
    assert launch.order(num_runs, device) == ({"order": order} if order else {})
    done = launch.all_runs(steps, 1, runs, 60, device=device, bind=False)
    assert done == ("by turns" if order == "steps by turns" else runs)


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


def test_nodes_of_a_group(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    assert [launch.num_nodes(4, each) for each in (None, 1, 2, 8)] == [1, 4, 2, 1]
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert [launch.num_nodes(4, each) for each in (None, 1)] == [2, 4], "two hosts"


def test_what_a_run_showed():
    ours = report.Result("deepep_moe", losses=[5.0, 3.0], step_s=[0.010, 0.010], tokens_per_s=[1.0, 1.0])
    ours.scalars = [{"deepep_moe/layer_2/exchange_ms": 1.0, "deepep_moe/layer_3/exchange_ms": 2.0}] * 2
    theirs = report.Result("alltoall", losses=[5.0, 3.0], step_s=[0.020, 0.020], tokens_per_s=[1.0, 1.0])
    text = pages.showed([ours, theirs], 3.5)
    for words in (
        "trained to a loss of 4.000 in 2 steps, not yet below the 3.500", "all steps are equal to the bit",
        "A step took 10.0 ms with deepep_moe (3.0 ms in the exchange) and 20.0 ms with alltoall",
    ):  # fmt: skip
        assert words in text
    assert "below the 4.500 of a model without context. A step took 20.0 ms" in pages.showed([theirs], 4.5)
    ours.load = theirs.load = np.array([[[4, 0, 1, 3], [2, 2, 2, 2]]] * 2)  # steps, layers, experts
    table = pages._table([ours, theirs])
    assert not any("node" in column for column in table.columns), "there is one"
    assert [row[table.columns.index("busiest expert")] for row in table.rows] == [1.5] * 2
    ours.load = theirs.load = np.array([[[4, 2, 1, 1], [2, 2, 2, 2]]] * 2)
    for result in (ours, theirs):
        result.num_nodes = 2
    table = pages._table([ours, theirs])
    assert [row[table.columns.index("busiest node")] for row in table.rows] == [1.25] * 2, "6 of 8 tokens, and 4 of 8"
    assert result.of_nodes().tolist() == [[[6, 2], [4, 4]]] * 2


def test_every_chart_shows_both_runs(tmp_path, monkeypatch):
    from matplotlib.figure import Figure
    from matplotlib.text import Text

    runs = []
    for name in ("deepep_moe", "alltoall"):
        spans = (("_Dispatch" if name == "deepep_moe" else "_AllToAll", 0.0, 2.0), ("aten::mm", 2.0, 5.0))
        seen = timeline.Timeline([timeline.Kernel(kind, 0, begin, end) for kind, begin, end in spans], 1, 0, "cpu")
        run = report.Result(name, losses=[5.0, 3.0], step_s=[0.01, 0.01], tokens_per_s=[1.0, 1.0], timeline=seen)
        run.load = np.array([[[4, 0, 1, 3], [2, 2, 2, 2]]] * 2)
        runs.append(run)
    runs[0].scalars = [{"deepep_moe/layer_2/exchange_ms": 1.0}] * 2  # which nobody measures of the other
    words, save = {}, Figure.savefig

    def savefig(figure, path, **how):
        words[path.name] = {text.get_text() for text in figure.findobj(Text)}
        save(figure, path, **how)

    monkeypatch.setattr(Figure, "savefig", savefig)
    pages.write("A demo", runs, 3.5, tmp_path, {})
    assert set(words) == {"loss.png", "expert_load.png", "times.png", "timeline.png"} == {path.name for path in tmp_path.glob("*.png")}
    for name, seen in words.items():
        assert all(any(run.name in text for text in seen) for run in runs), f"{name}: {seen}"
    assert words["times.png"].isdisjoint({"exchange of a forward, ms"}) and "step, ms" in words["times.png"]
    assert {"time from the start of the step, ms", "dispatch", "all-to-all", "products"} <= words["timeline.png"]
    assert words["timeline.png"].isdisjoint({"combine", "other"}), "which did not happen"
