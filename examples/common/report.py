"""Write the results of a run: metrics.jsonl, loss.png, expert_load.png and a table."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

# Colours that stay apart for colour-blind readers; ours in front.
_COLOURS = ("#1f5fa8", "#e08a1e")
_GREY = "#5f6368"


@dataclass
class Result:
    """The measurements of rank 0.

    `load`: [steps, moe_layers, num_experts], tokens that each expert got from all ranks.
    `nodes_per_token`: one value per step or report, a mean over MoE layers; only where deepep_moe moves the tokens.
    `num_nodes`: the experts are spread over so many nodes, in their order.
    `scalars`: those that a framework reports, by name, one value per step.
    `timeline`: that of rank 0's GPU, if one was asked for.
    """

    name: str
    losses: list[float] = field(default_factory=list)
    tokens_per_s: list[float] = field(default_factory=list)
    step_s: list[float] = field(default_factory=list)
    load: Any = None
    seconds: float = 0.0
    backend: str = ""
    nodes_per_token: list[float] = field(default_factory=list)
    scalars: list[dict[str, float]] = field(default_factory=list)
    timeline: Any = None
    num_nodes: int = 1

    def of_nodes(self) -> Any:
        """Tokens that each node got, [steps, moe_layers, num_nodes]: those of its experts."""
        return self.load.reshape(*self.load.shape[:2], self.num_nodes, -1).sum(-1)

    def of_layers(self, name: str) -> list[float]:
        """The sum over MoE layers of a scalar that deepep_moe reports of each, for each step."""
        ends = f"/{name}"
        return [sum(value for key, value in step.items() if key.endswith(ends)) for step in self.scalars]

    def add_scalars(self, scalars: dict[str, float]) -> None:
        """Add those of a step, which may be none."""
        self.scalars.append(scalars)
        nodes = [value for name, value in scalars.items() if name.endswith("/nodes_per_token")]
        if nodes:
            self.nodes_per_token.append(sum(nodes) / len(nodes))


def write_metrics(results: list[Result], path: Path) -> None:
    """One JSON object a step: step, loss, tokens_per_s, dispatcher, load [moe_layers, num_experts], and scalars where there are some."""
    with path.open("w") as file:
        for result in results:
            for step, (loss, tokens_per_s) in enumerate(zip(result.losses, result.tokens_per_s, strict=True)):
                record = {"step": step, "loss": loss, "tokens_per_s": round(tokens_per_s, 1), "dispatcher": result.name}
                record["load"] = result.load[step].tolist()
                if result.scalars:
                    record["scalars"] = result.scalars[step]
                file.write(json.dumps(record) + "\n")


def write_summary(results: list[Result], path: Path, **about: Any) -> None:
    """One object a run: its name, medians over steps, last losses, what its timeline says, and what `about` says of all."""
    runs = []
    for result in results:
        medians = {"tokens_per_s_median": float(np.median(result.tokens_per_s)), "step_ms_median": 1e3 * float(np.median(result.step_s))}
        run = {"run": result.name, "backend": result.backend, "num_steps": len(result.losses), **medians}
        run["loss_last_10"] = float(np.mean(result.losses[-10:]))
        if result.nodes_per_token:
            run["nodes_per_token_last_10"] = float(np.mean(result.nodes_per_token[-10:]))
        runs.append(run | (result.timeline.figures() if result.timeline is not None else {}) | about)
    path.write_text(json.dumps(runs, indent=1) + "\n")


def max_difference(results: list[Result], num_steps: int | None = None) -> float:
    """Largest distance of the second loss curve from the first, in the first `num_steps` steps or all."""
    first, second = (result.losses[:num_steps] for result in results[:2])
    return float(np.abs(np.subtract(first, second)).max())


def agreement(results: list[Result]) -> str:
    """Say for how many steps two loss curves have the same bits, and how far they part later."""
    pairs = zip(results[0].losses, results[1].losses, strict=True)
    first = next((step for step, (one, other) in enumerate(pairs) if one != other), None)
    if first is None:
        return "all steps are equal to the bit"
    steps = {0: "no step is", 1: "the first step is"}.get(first, f"the first {first} steps are")
    return f"{steps} equal to the bit, the largest difference is {max_difference(results):.1e}"


def _new_axes(rows: int = 1, height: float = 4.2, columns: int = 1, **kwargs: Any) -> tuple[Any, Any]:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams.update({"font.size": 10, "axes.titlesize": 12, "axes.spines.top": False, "axes.spines.right": False})
    return plt.subplots(rows, columns, figsize=(5 + 3 * columns, height), dpi=150, layout="constrained", **kwargs)


def plot_loss(results: list[Result], entropy: float, path: Path) -> None:
    """Loss over steps of every run, and the unigram entropy they have to beat."""
    figure, axes = _new_axes()
    # The reference lies under ours as a broad pale line, so that both can be seen where they agree.
    styles = ({"linewidth": 1.6, "zorder": 3}, {"linewidth": 5, "alpha": 0.45, "zorder": 2})
    for result, colour, style in zip(results, _COLOURS, styles, strict=False):
        axes.plot(range(1, len(result.losses) + 1), result.losses, color=colour, label=result.name, **style)
    axes.axhline(entropy, color=_GREY, linestyle="--", linewidth=1.2)
    num_steps = len(results[0].losses)
    axes.annotate(f"unigram entropy {entropy:.2f}", (num_steps, entropy), (0, 4), textcoords="offset points", ha="right", color=_GREY)
    axes.set(xlabel="step", ylabel="loss (nats per byte)", xlim=(1, num_steps))
    axes.set_title("Training loss on the Python standard library's sources", loc="left")
    axes.grid(axis="y", color="#e4e6e9", linewidth=0.8)
    if len(results) > 1:
        difference = max_difference(results)
        axes.annotate(
            "equal to the bit" if difference == 0 else f"largest difference {difference:.1e}",
            (1, 0.78),
            xycoords="axes fraction",
            ha="right",
            color=_GREY,
        )
    axes.legend(frameon=False, loc="upper right")
    figure.savefig(path)


def plot_expert_load(results: list[Result], path: Path, num_bins: int = 60) -> None:
    """Draw the tokens of each expert over time, relative to an even share: a column of panels for each run, a panel for each MoE layer."""
    from matplotlib.colors import TwoSlopeNorm

    steps, num_layers, num_experts = results[0].load.shape
    bins = np.array_split(np.arange(steps), min(num_bins, steps))
    # [runs, layers, experts, bins]: share of the bin's tokens x number of experts, 1 = even.
    load = np.stack([np.stack([result.load[steps_of_bin].sum(0) for steps_of_bin in bins], axis=-1) for result in results])
    relative = load / load.mean(axis=2, keepdims=True)
    figure, axes = _new_axes(num_layers, 1.2 + 1.7 * num_layers, len(results), sharex=True, sharey=True, squeeze=False)
    norm = TwoSlopeNorm(1.0, 0.0, max(2.0, float(np.percentile(relative, 99.5))))
    beyond = "max" if relative.max() > norm.vmax else "neither"  # an arrow at the end of the scale
    for (layer, run), panel in np.ndenumerate(axes):
        drawn = relative[run, layer]
        image = panel.imshow(drawn, aspect="auto", origin="lower", cmap="RdBu_r", norm=norm, extent=(1, steps, -0.5, num_experts - 0.5))
        busiest = drawn.max(axis=0)
        peaks = f"busiest expert {busiest[0]:.1f}x at first, {busiest[-1]:.1f}x at last"
        panel.set_title(f"{results[run].name}, MoE layer {layer + 1}: {peaks}", loc="left", fontsize=8)
        panel.set(yticks=range(0, num_experts, max(1, num_experts // 4)))
    for panel in axes[:, 0]:
        panel.set_ylabel("expert")
    for panel in axes[-1]:
        panel.set_xlabel("step")
    label = "tokens relative to an even share" + (f", at most {relative.max():.1f}" if beyond == "max" else "")
    ticks = [0, 0.5, 1, norm.vmax]
    figure.colorbar(image, ax=axes, label=label, ticks=ticks, format="%.1f", aspect=30, extend=beyond)
    figure.savefig(path)


def plot_times(results: list[Result], path: Path) -> None:
    """Draw over steps what all of these runs measured: milliseconds of a step and of the exchange in its forward, nodes of a token, and
    tokens of the busiest of several nodes."""
    panels: dict[str, list[Any]] = {
        "step, ms": [1e3 * np.array(result.step_s) for result in results],
        "exchange of a forward, ms": [result.of_layers("exchange_ms") for result in results],
        "nodes of a token": [result.nodes_per_token if result.num_nodes > 1 else [] for result in results],
        "tokens of the busiest node, x even": [_over_even(r.of_nodes()) if r.num_nodes > 1 else [] for r in results],
    }
    panels = {label: curves for label, curves in panels.items() if all(any(values) for values in curves)}
    figure, axes = _new_axes(len(panels), 1.0 + 2.0 * len(panels), squeeze=False)
    for panel, (label, curves) in zip(axes[:, 0], panels.items(), strict=True):
        for result, values, colour in zip(results, curves, _COLOURS, strict=False):
            panel.plot(range(1, len(values) + 1), values, color=colour, label=result.name, linewidth=1.2)
        panel.set(ylabel=label, ylim=(0, None))
        panel.grid(axis="y", color="#e4e6e9", linewidth=0.8)
        panel.legend(frameon=False, loc="upper right")
    axes[-1, 0].set_xlabel("step")
    figure.savefig(path)


def table(results: list[Result], entropy: float) -> str:
    """The closing table, a column per run."""
    rows = [
        ("dispatcher", [result.name for result in results]),
        ("backend", [result.backend for result in results]),
        ("steps", [str(len(result.losses)) for result in results]),
        ("first loss", [f"{result.losses[0]:.4f}" for result in results]),
        ("last loss (mean of 10)", [f"{np.mean(result.losses[-10:]):.4f}" for result in results]),
        ("unigram entropy", [f"{entropy:.4f}"] * len(results)),
        ("tokens/s (median)", [f"{np.median(result.tokens_per_s):,.0f}" for result in results]),
        ("busiest expert, last 10", [f"{busiest(result):.2f}x even" for result in results]),
    ]
    if results[0].num_nodes > 1:
        rows.append(("busiest node, last 10", [f"{busiest_node(result):.2f}x even" for result in results]))
        rows.append(("nodes per token, last 10", [nodes_per_token(result) for result in results]))
    rows.append(("seconds", [f"{result.seconds:.1f}" for result in results]))
    width = max(14, *(len(cell) for _, cells in rows for cell in cells))
    lines = [f"{name:<25}" + "".join(f"{cell:>{width + 2}}" for cell in cells) for name, cells in rows]
    rule = "-" * max(len(line) for line in lines)
    return "\n".join([rule, lines[0], rule, *lines[1:], rule])


def differences(results: list[Result], num_steps: int | None = None, baseline: str = "alltoall") -> list[float]:
    """Return each run's difference from the last run of `baseline` before it, over all losses or those of the first `num_steps` steps."""
    by_run, before = [], results[0]
    for result in results:
        before = result if result.name.startswith(baseline) else before
        by_run.append(max_difference([before, result], num_steps))
    return by_run


_COLUMNS = (("tokens/s", 10), ("step ms", 10), ("exchange ms", 13), ("last loss", 11), ("max |difference|", 18))


def comparison(results: list[Result]) -> str:
    """A row for each run, and how far its losses are from those of the alltoall above it."""
    width = 2 + max(len(result.name) for result in results)
    lines = [f"{'run':<{width}}" + "".join(f"{name:>{columns}}" for name, columns in _COLUMNS)]
    for result, difference in zip(results, differences(results), strict=True):
        exchange = result.of_layers("exchange_ms")
        cells = [f"{np.median(result.tokens_per_s):,.0f}", f"{1e3 * np.median(result.step_s):,.1f}"]
        cells += [f"{np.median(exchange):.2f}" if any(exchange) else "-", f"{result.losses[-1]:.4f}", f"{difference:.1e}"]
        lines.append(f"{result.name:<{width}}" + "".join(f"{cell:>{columns}}" for cell, (_, columns) in zip(cells, _COLUMNS, strict=True)))
    rule = "-" * len(lines[0])
    return "\n".join([rule, lines[0], rule, *lines[1:], rule])


def busiest(result: Result) -> float:
    """Tokens of the busiest expert over an even share, mean over layers, last ten steps."""
    return float(_over_even(result.load[-10:].sum(0)))


def busiest_node(result: Result) -> float:
    """Return the load of the busiest node over an even share; 1 if there is one node."""
    return float(_over_even(result.of_nodes()[-10:].sum(0)))


def _over_even(load: Any) -> Any:
    """The most of [..., layers, parts] over an even share, mean over layers."""
    return (load.max(axis=-1) / load.mean(axis=-1)).mean(axis=-1)


def nodes_per_token(result: Result) -> str:
    """Nodes that a token goes to, mean of the last ten reports; "-" where nobody counted."""
    return f"{np.mean(result.nodes_per_token[-10:]):.2f}" if result.nodes_per_token else "-"
