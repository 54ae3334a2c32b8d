"""The calls that the benchmark simulates, and the records of them."""

import argparse
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from benchmarks.model import published, simulate
from benchmarks.model.machine import Machine
from benchmarks.model.traffic import Cluster, Traffic, choose
from deepep_moe.tune.records import record

OPERATIONS = (("dispatch", "float8_e4m3fn"), ("dispatch", "bfloat16"), ("combine", "bfloat16"))
_NEAR = 1.01  # the best chunk is the smallest one whose time is that close to the least


@dataclass(frozen=True)
class Plan:
    """What is simulated."""

    machine: Machine
    hidden: int
    num_sms: int
    chunk_rows: tuple[int, ...]
    seeds: int

    def row_bytes(self, dtype: str) -> int:
        return self.hidden + 4 * -(-self.hidden // 128) if dtype == "float8_e4m3fn" else 2 * self.hidden


def simulated(plan: Plan, cluster: Cluster, routing: str) -> Iterator[dict[str, Any]]:
    """Yield the record of each operation. All chunk sizes are tried with one routing, and the best with `seeds` of them."""
    traffics = [Traffic(cluster, choose(cluster, routing, seed)) for seed in range(plan.seeds)]
    for op, dtype in OPERATIONS:
        call = functools.partial(_call, plan, op, dtype)
        by_chunk = {chunk_rows: call(traffics[0], chunk_rows) for chunk_rows in plan.chunk_rows}
        least = min(made.us for made in by_chunk.values())
        best = min(chunk_rows for chunk_rows, made in by_chunk.items() if made.us <= _NEAR * least)
        calls = [by_chunk[best], *(call(traffic, best) for traffic in traffics[1:])]
        chunk_us = {str(chunk_rows): made.us for chunk_rows, made in by_chunk.items()}
        yield _record(plan, cluster, routing, (op, dtype), calls, {"chunk_rows": best, "us_by_chunk_rows": chunk_us}, traffics[0])


def _call(plan: Plan, op: str, dtype: str, traffic: Traffic, chunk_rows: int) -> simulate.Call:
    setting = simulate.Setting(plan.row_bytes(dtype), chunk_rows, plan.num_sms, waits_for_counts=op == "dispatch")
    return simulate.CALLS[op](traffic, plan.machine, setting)


def _record(
    plan: Plan,
    cluster: Cluster,
    routing: str,
    operation: tuple[str, str],
    calls: list[simulate.Call],
    chunks: dict[str, Any],
    traffic: Traffic,
) -> dict[str, Any]:
    (op, dtype), first = operation, calls[0]
    return record(
        f"model {op}",
        _settings(cluster, plan.hidden, dtype),
        [call.us for call in calls],
        first.network_bytes,
        baseline=None,
        baseline_times=[],
        hardware=f"modelled: {cluster.num_nodes} x {cluster.ranks_per_node} {plan.machine.name}",
        routing=routing,
        topk_groups=cluster.topk_groups if routing == "group-limited" else None,
        ranks_per_node=cluster.ranks_per_node,
        nodes_per_token=traffic.nodes_per_token,
        num_sms=plan.num_sms,
        **chunks,
        bound=first.bound,
        busy_us=first.busy_us,
        logical_gbps=published.logical_gbps(first),
        network_workspace_bytes=2 * (cluster.num_nodes - 1) * cluster.num_tokens * plan.row_bytes("bfloat16"),
        nvlink_workspace_bytes=nvlink_workspace_bytes(cluster, plan.hidden),
        machine={name: value for name, value in vars(plan.machine).items() if name != "name"},
    )


def _settings(cluster: Cluster, hidden: int, dtype: str) -> dict[str, Any]:
    sizes = {name: getattr(cluster, name) for name in ("num_ranks", "num_tokens", "num_topk", "num_experts")}
    return {"backend": "model", "hidden": hidden, "dtype": dtype, "layout": "rank", **sizes}


def nvlink_workspace_bytes(cluster: Cluster, hidden: int) -> int:
    """Return the inboxes and outboxes of a node of today's backend `nvlink`, as docs/design/nvlink.md has them."""
    slot = -(-(4 * hidden + 4 * cluster.num_topk) // 128) * 128
    return 2 * (cluster.ranks_per_node - 1) * cluster.num_tokens * slot


def compared(row: published.Published) -> dict[str, Any]:
    """Return the record of a call whose time others have published; `ratio` is theirs over the model's."""
    call = published.modelled(row)
    cluster = Cluster(row.num_ranks // 8, 8, row.num_tokens, 8, row.num_experts, row.topk_groups)
    return record(
        f"model {row.op}",
        _settings(cluster, published.HIDDEN, row.dtype),
        [call.us],
        call.network_bytes,
        baseline=row.source,
        baseline_times=[call.logical_bytes / row.gbps / 1e3],
        hardware=f"modelled: {cluster.num_nodes} x 8 {published.MACHINES[row.machine].name}",
        routing="group-limited",
        topk_groups=row.topk_groups,
        ranks_per_node=8,
        num_sms=row.num_sms,
        chunk_rows=published.CHUNK_ROWS,
        bound=call.bound,
        busy_us=call.busy_us,
        logical_gbps=published.logical_gbps(call),
        rival_logical_gbps=row.gbps,
        error=published.error(row),
    )


def clusters(options: argparse.Namespace) -> list[Cluster]:
    """Return the sizes of a run. There are at least as many experts as ranks."""
    made = []
    for num_nodes in options.num_nodes:
        num_ranks = num_nodes * options.ranks_per_node
        num_experts = options.num_experts or max(256, num_ranks)
        if num_experts % num_ranks:
            raise ValueError(f"--num-experts {num_experts} must be a multiple of the {num_ranks} ranks; give another, or leave it out")
        made.append(Cluster(num_nodes, options.ranks_per_node, options.num_tokens, options.num_topk, num_experts, options.topk_groups))
    return made
