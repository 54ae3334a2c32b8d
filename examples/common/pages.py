"""The page that a training run leaves, report.html: what it showed, its figures and its pictures."""

from pathlib import Path

import numpy as np
import report
import timeline
from page import Page, Picture, Table
from report import Result


def write(title: str, results: list[Result], entropy: float, folder: Path, about: dict[str, str]) -> str:
    """Write report.html and its pictures of the first two runs to `folder`; a timeline has all that recorded one. Return what the runs
    showed."""
    files = {"Loss": "loss.png", "Tokens of each expert": "expert_load.png", "Time of each step": "times.png"}
    report.plot_loss(results[:2], entropy, folder / files["Loss"])
    report.plot_expert_load(results[:2], folder / files["Tokens of each expert"])
    report.plot_times(results[:2], folder / files["Time of each step"])
    if timelines := {result.name: result.timeline for result in results if result.timeline is not None}:
        files["What ran when in one step, under the profiler"] = "timeline.png"
        timeline.plot(timelines, folder / "timeline.png")
    pictures = [Picture.of_file(caption, folder / name) for caption, name in files.items()]
    summary = showed(results, entropy)
    Page(title, summary, about, [_table(results)], pictures).write(folder / "report.html")
    return summary


def showed(results: list[Result], entropy: float) -> str:
    """Return two sentences: what was learned, and how long a step took."""
    first, loss = results[0], last_loss(results[0])
    below = "below" if loss < entropy else "not yet below"
    summary = (
        f"{first.name} trained to a loss of {loss:.3f} in {len(first.losses)} steps, {below} the {entropy:.3f} of a model without context"
    )
    if len(results) > 1:
        summary += f"; compared with {results[1].name}, {report.agreement(results)}"
    return f"{summary}. A step took {' and '.join(_step(result) for result in results[:2])}, in the median."


def last_loss(result: Result) -> float:
    return float(np.mean(result.losses[-10:]))


def exchange_ms(result: Result) -> float | None:
    """Milliseconds of a step in the exchange: of a timeline forward and backward, else of the forwards; None where nobody measured."""
    if result.timeline is not None:
        return result.timeline.exchange_ms
    measured = result.of_layers("exchange_ms")
    return float(np.median(measured)) if any(measured) else None


def _step(result: Result) -> str:
    exchange = exchange_ms(result)
    of_it = "" if exchange is None else f" ({exchange:.1f} ms in the exchange)"
    return f"{1e3 * np.median(result.step_s):.1f} ms with {result.name}{of_it}"


def _table(results: list[Result]) -> Table:
    """The runs, a row each. On one node nothing is said of nodes."""
    rows: list[dict[str, str | float | None]] = []
    for result in results:
        row = {"run": result.name, "backend": result.backend, "steps": len(result.losses), "last loss": last_loss(result)}
        row |= {"tokens/s": float(np.median(result.tokens_per_s)), "step, ms": 1e3 * float(np.median(result.step_s))}
        row |= {"exchange, ms": exchange_ms(result), "busiest expert": report.busiest(result)}
        if result.num_nodes > 1:
            nodes = float(np.mean(result.nodes_per_token[-10:])) if result.nodes_per_token else None
            row |= {"nodes": result.num_nodes, "busiest node": report.busiest_node(result), "nodes per token": nodes}
        rows.append(row | {"seconds": result.seconds})
    return Table("Runs", list(rows[0]), [list(row.values()) for row in rows])
