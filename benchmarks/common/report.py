"""The table that benchmarks share, and what they say of other libraries."""

from collections.abc import Callable, Sequence
from typing import Any

Record = dict[str, Any]


def show_table(columns: dict[str, Callable[[Any], str]], rows: Sequence[Any]) -> None:
    """Print a line for each of `rows` under the titles of `columns`, which say what stands there. The first column lies at the left."""
    lines = [list(columns), *([say(row) for say in columns.values()] for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(columns))]
    for first, *others in lines:
        cells = [first.ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True))]
        print("  ".join(cells).rstrip(), flush=True)


def number(name: str, digits: int = 1, scale: float = 1.0, unit: str = "") -> Callable[[Record], str]:
    """Return the cell of a record: its field `name`, or "-" where that is None or missing."""
    return lambda record: "-" if record.get(name) is None else f"{record[name] * scale:.{digits}f}{unit}"


def spread_of(record: Record) -> str:
    return f"{record['us_p10']:.1f}-{record['us_p90']:.1f}"


def show_head(records: Sequence[Record]) -> None:
    """Print what all records share: hardware and shape, the rate of the link, and the versions of other libraries."""
    first = records[0]
    shape = f"hidden {first['hidden']}, top-{first['num_topk']} of {first['num_experts']} experts, backend {first['backend']}"
    print(f"{records[-1]['hardware']}; {shape}")
    links = {r["num_ranks"]: r["link_gbps"] for r in records if r["link_gbps"] is not None}
    print("link, every rank copying to its neighbour: " + (", ".join(f"EP{n} {gbps:.0f} GB/s" for n, gbps in links.items()) or "none"))
    versions = {r["backend"]: r["versions"][r["backend"]] for r in records if r["backend"] in r["versions"]}
    if versions:
        print("other libraries: " + ", ".join(f"{name} is {version}" for name, version in versions.items()))
