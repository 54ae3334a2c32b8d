"""A model of dispatch and combine over nodes: `python benchmarks/run.py model`. It measures nothing, and needs no GPU and no network.

Chunks of a real routing go through the two hops, each over a NIC, NVLink and SMs that take one job after the other. The rates of NVLink and
SMs are those of our records of one host; those of the NIC are published, and its latencies are guesses: give yours. The model is held
against published tables, and says how far it is off.

It leaves out: congestion and routes of the network, NICs that several GPUs share, the order of puts and the credits of a real NIC, the
CPU of a proxy, other traffic, metadata of rows, and whatever happens on GPUs beside the call. Its times are what these sizes allow at best.
"""

import argparse
import dataclasses
import sys
from pathlib import Path
from typing import Any

from benchmarks.common.report import load_pyplot
from benchmarks.model import low_latency_report, measure, report
from benchmarks.model.machine import MACHINES, Machine
from benchmarks.model.published import PUBLISHED
from benchmarks.model.traffic import ROUTINGS
from deepep_moe.errors import EPError
from deepep_moe.tune.records import write_json

NUM_NODES = (2, 4, 8, 16, 32, 64)
CHUNK_ROWS = (4, 8, 16, 32, 64, 128)
SKEWED_RANKS = 32
"""How many ranks a skewed routing has at most where routings were not chosen: all of them are simulated, one for one."""
_RATES = ("nvlink_gbps", "nic_gbps", "put_us", "message_us", "sm_gbps")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--num-nodes", type=int, nargs="+", default=NUM_NODES, help="default 2 to 64")
    parser.add_argument("--ranks-per-node", type=int, default=8)
    for name, default in (("num-tokens", 4096), ("hidden", 7168), ("num-topk", 8), ("topk-groups", 4)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--num-experts", type=int, help="default 256, or one for each rank where there are more")
    helped = f"default all; skewed only up to {SKEWED_RANKS} ranks, unless it is named here"
    parser.add_argument("--routing", choices=ROUTINGS, nargs="+", help=helped)
    parser.add_argument("--num-sms", type=int, default=16, help="SMs that move rows; half of them forward in a dispatch")
    parser.add_argument("--chunk-rows", type=int, nargs="+", default=CHUNK_ROWS, help="rows of a chunk, of which the best is taken")
    parser.add_argument("--machine", choices=MACHINES, default="h100")
    for name in _RATES:
        parser.add_argument(f"--{name.replace('_', '-')}", type=float, help="of the machine, instead of its own")
    parser.add_argument("--seeds", type=int, default=3, help="routings of each size")
    parser.add_argument("--published", action=argparse.BooleanOptionalAction, default=True, help="also model calls of published tables")
    parser.add_argument("--low-latency", action="store_true", help="low-latency calls alone, of 128 tokens a rank")
    parser.add_argument("--plot", type=Path, help="file for a plot of times over ranks and over chunks")


def machine_of(options: argparse.Namespace) -> Machine:
    """Return the machine, with the rates that were given."""
    given = {name: getattr(options, name) for name in _RATES if getattr(options, name) is not None}
    changed = dataclasses.replace(MACHINES[options.machine], **given)
    for name in _RATES:
        if getattr(changed, name) < 0 or (name.endswith("gbps") and getattr(changed, name) == 0):
            raise ValueError(f"--{name.replace('_', '-')} is {getattr(changed, name)}; it must be positive")
    return changed


def _check(options: argparse.Namespace) -> None:
    for name in ("num_nodes", "ranks_per_node", "num_tokens", "hidden", "num_topk", "topk_groups", "chunk_rows", "seeds"):
        value = getattr(options, name)
        if min(value if isinstance(value, (list, tuple)) else [value]) < 1:
            raise ValueError(f"--{name.replace('_', '-')} is {value}; it must be at least 1")
    if options.num_sms < 2:
        raise ValueError(f"--num-sms is {options.num_sms}; it must be at least 2, as one SM sends and one forwards")


def run(options: argparse.Namespace) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the records of simulated calls, and those beside published figures."""
    _check(options)
    if options.plot is not None:
        load_pyplot()
    plan = measure.Plan(machine_of(options), options.hidden, options.num_sms, tuple(options.chunk_rows), options.seeds)
    records: list[dict[str, Any]] = []
    for cluster in measure.clusters(options):
        for routing in options.routing or ROUTINGS:
            if options.routing is None and routing == "skewed" and cluster.num_ranks > SKEWED_RANKS:
                continue
            print(f"EP{cluster.num_ranks}, {routing}", file=sys.stderr, flush=True)
            records += measure.simulated(plan, cluster, routing)
    return records, [measure.compared(row) for row in PUBLISHED] if options.published else []


def main(options: argparse.Namespace) -> None:
    try:
        if options.low_latency:
            if options.plot is not None:
                raise ValueError("--low-latency has no plot: leave --plot out")
            made = low_latency_report.records_of(machine_of(options))
            write_json(options.json, made)
            return low_latency_report.show(made)
        records, compared = run(options)
    except (EPError, ValueError) as error:
        sys.exit(str(error))
    write_json(options.json, records + compared)
    report.show(records)
    if compared:
        report.show_published(compared)
    if options.plot is not None:
        report.plot(options.plot, records)
