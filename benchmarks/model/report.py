"""Tables and plot of the model."""

from pathlib import Path
from typing import Any

from benchmarks.common.report import load_pyplot, save_figure

_SHORT = {"bfloat16": "bf16", "float8_e4m3fn": "fp8"}


def name_of(r: dict[str, Any]) -> str:
    return f"{r['op'].removeprefix('model ')} {_SHORT[r['dtype']]}"


def show(records: list[dict[str, Any]]) -> None:
    """Print the simulated calls, a line each."""
    first = records[0]
    print(
        f"{first['hardware'].partition(' x ')[2]}; {first['num_tokens']} tokens a rank, hidden {first['hidden']}, top-{first['num_topk']}"
    )
    print("GB/s by the NIC of the rank that sends most; logical counts a row for each (token, node), the own among them, as DeepEP does.")
    print(
        "Memory beside the NVLink part of",
        f"{first['nvlink_workspace_bytes'] / 1e9:.2f} GB. Chunk: the smallest within 1% of the best time.",
    )
    print(f"{'operation':14}{'EP':>5} {'routing':14}{'nodes/token':>12}{'us':>9}{'GB/s':>7}{'logical':>9}{'GB':>7}{'chunk':>7}  bound by")
    for r in records:
        where = f"{name_of(r):14}{r['num_ranks']:5} {r['routing']:14}{r['nodes_per_token']:12.2f}"
        rates = f"{r['us_median']:9.0f}{r['gbps']:7.1f}{r['logical_gbps']:9.1f}{r['network_workspace_bytes'] / 1e9:7.2f}{r['chunk_rows']:7}"
        busy = ", ".join(f"{name} {us / r['us_median']:.0%}" for name, us in sorted(r["busy_us"].items(), key=lambda item: -item[1]))
        print(f"{where}{rates}  {r['bound']} ({busy} busy)")


def show_published(records: list[dict[str, Any]]) -> None:
    """Print what others measured beside what the model says."""
    print("published figures, logical GB/s; error: how much faster the model is")
    print(f"{'source':32}{'EP':>4} {'operation':14}{'SMs':>4}{'published':>11}{'model':>7}{'error':>7}  bound by")
    for r in records:
        where = f"{r['rival']:32}{r['num_ranks']:4} {name_of(r):14}{r['num_sms']:4}"
        print(f"{where}{r['rival_logical_gbps']:11.1f}{r['logical_gbps']:7.1f}{r['error']:+7.0%}  {r['bound']}")


def plot(path: Path, records: list[dict[str, Any]]) -> None:
    """Plot times over the number of ranks, a panel for each operation, and over rows of a chunk at the largest number of ranks."""
    pyplot = load_pyplot()
    names = list(dict.fromkeys(name_of(r) for r in records))
    routings = list(dict.fromkeys(r["routing"] for r in records))
    figure, panels = pyplot.subplots(2, len(names), figsize=(4 * len(names), 7), layout="constrained", squeeze=False)
    for column, name in enumerate(names):
        above, below = panels[0][column], panels[1][column]
        for index, routing in enumerate(routings):
            mine = sorted((r for r in records if (name_of(r), r["routing"]) == (name, routing)), key=lambda r: r["num_ranks"])
            if not mine:
                continue
            above.plot([r["num_ranks"] for r in mine], [r["us_median"] / 1e3 for r in mine], color=f"C{index}", marker=".", label=routing)
            by_chunk = {int(rows): us / 1e3 for rows, us in mine[-1]["us_by_chunk_rows"].items()}
            label = f"{routing}, EP{mine[-1]['num_ranks']}"
            below.plot(list(by_chunk), list(by_chunk.values()), color=f"C{index}", marker=".", label=label)
        above.set(title=name, xlabel="ranks", xscale="log", ylim=(0, None))
        ranks = sorted({r["num_ranks"] for r in records})
        above.set_xticks(ranks, [str(n) for n in ranks])
        above.minorticks_off()
        below.set(xlabel="rows of a chunk", xscale="log", ylim=(0, None))
        rows = sorted({int(n) for r in records for n in r["us_by_chunk_rows"]})
        below.set_xticks(rows, [str(n) for n in rows])
        below.minorticks_off()
        below.legend(fontsize=8)
    panels[0][0].set_ylabel("ms")
    panels[1][0].set_ylabel("ms")
    panels[0][0].legend(fontsize=8)
    figure.suptitle(f"Modelled, not measured: {records[0]['hardware'].partition(' x ')[2]}")
    save_figure(figure, path)
