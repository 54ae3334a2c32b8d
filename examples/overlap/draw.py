"""The timeline of a rank, as text and as a picture."""

from pathlib import Path

from deepep_moe.nn import Span

# Letter and colour of each stage of computing and of the exchange. Colour-blind readers can tell the colours apart.
STAGES = {
    "attention": ("A", "#1f5fa8"),
    "router": ("R", "#7fb2e5"),
    "shared expert": ("S", "#f2c14e"),
    "experts": ("E", "#e08a1e"),
    "send dispatch": ("d", "#3b7d4f"),
    "send combine": ("c", "#3b7d4f"),
    "receive dispatch": ("w", "#9b2d30"),
    "receive combine": ("w", "#9b2d30"),
}
_LEGEND = {"d": "send dispatch", "c": "send combine", "w": "wait and receive"}
_FLIGHT = "#d5d8dc"


def flights(spans: list[Span], batch: int) -> list[tuple[float, float]]:
    """Return when rows of the micro-batch were on their way: from the end of a send to the begin of its receipt."""
    sent = [span.end for span in spans if span.batch == batch and span.name.startswith("send")]
    received = [span.start for span in spans if span.batch == batch and span.name.startswith("receive")]
    return list(zip(sent, received, strict=True))


def row(spans: list[Span], batch: int, total: float, width: int) -> str:
    """A letter for each `total / width` of the time."""
    cells = [" "] * width
    bars = [(".", start, end) for start, end in flights(spans, batch)]
    bars += [(STAGES[span.name][0], span.start, span.end) for span in spans if span.batch == batch]
    for letter, start, end in bars:
        first, last = round(start / total * width), round(end / total * width)
        cells[first:last] = letter * (last - first)
    return "".join(cells)


def text(runs: dict[str, list[Span]], width: int = 120) -> str:
    """Bars of each run, a line a micro-batch, all in one scale."""
    total = max(span.end for spans in runs.values() for span in spans)
    lines = []
    for name, spans in runs.items():
        lines.append(f"{name}, {max(span.end for span in spans):.2f} ms")
        lines += [f"  batch {batch} |{row(spans, batch, total, width)}" for batch in (0, 1)]
    letters = {letter: _LEGEND.get(letter, name) for name, (letter, _) in STAGES.items()}
    return "\n".join([*lines, "  " + "   ".join(f"{letter} {name}" for letter, name in letters.items()) + "   . only flying"])


def plot(runs: dict[str, list[Span]], title: str, path: Path) -> None:
    """A panel for each run: what each micro-batch does, and below it, pale, what of it flies."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.patches import Patch

    plt.rcParams.update({"font.size": 10, "axes.titlesize": 11, "axes.spines.top": False, "axes.spines.right": False})
    figure, axes = plt.subplots(len(runs), 1, figsize=(11, 1.2 + 1.6 * len(runs)), dpi=150, layout="constrained", sharex=True)
    total = max(span.end for spans in runs.values() for span in spans)
    for panel, (name, spans) in zip(axes, runs.items(), strict=True):
        for batch in (0, 1):
            panel.broken_barh([(start, end - start) for start, end in flights(spans, batch)], (batch + 0.28, 0.12), color=_FLIGHT)
            for span in spans:
                if span.batch == batch:
                    panel.broken_barh([(span.start, span.end - span.start)], (batch - 0.3, 0.55), color=STAGES[span.name][1])
        panel.set(yticks=(0, 1), yticklabels=("batch 0", "batch 1"), ylim=(1.5, -0.4), xlim=(0, total))
        panel.set_title(f"{name}: {max(span.end for span in spans):.2f} ms", loc="left")
    axes[-1].set_xlabel("ms")
    kinds = {colour: _LEGEND.get(letter, name) for name, (letter, colour) in STAGES.items()} | {"#3b7d4f": "send", _FLIGHT: "in flight"}
    handles = [Patch(color=colour, label=name) for colour, name in kinds.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False)
    figure.suptitle(title, x=0.01, ha="left", fontsize=12)
    figure.savefig(path)
    plt.close(figure)
