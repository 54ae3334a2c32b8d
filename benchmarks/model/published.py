"""What others have published, beside what the model says of the same sizes."""

import functools
from collections.abc import Iterator
from dataclasses import dataclass

from benchmarks.model import simulate
from benchmarks.model.machine import MACHINES
from benchmarks.model.traffic import Cluster, Traffic, choose

CHUNK_ROWS = 16
"""Of every row: peers tune their chunks, which lie between 6 and 64 rows."""
HIDDEN = 7168
ROW_BYTES = {"float8_e4m3fn": HIDDEN + 4 * HIDDEN // 128, "bfloat16": 2 * HIDDEN}


@dataclass(frozen=True)
class Published:
    """One figure of a table. All have hidden 7168, top-8 and 8 GPUs a node; GB/s count a row for each (token, node), the own among them."""

    source: str
    machine: str
    num_ranks: int
    op: str
    dtype: str
    gbps: float
    num_sms: int = 24
    num_tokens: int = 4096
    num_experts: int = 256
    topk_groups: int = 4  # of as many groups as there are nodes


def _table(source: str, machine: str, rows: dict[int, tuple[float | None, float | None, float]], **sizes: int) -> Iterator[Published]:
    """`rows` has dispatch fp8, dispatch bf16 and combine bf16, by the number of ranks. None: not published."""
    names = (("dispatch", "float8_e4m3fn"), ("dispatch", "bfloat16"), ("combine", "bfloat16"))
    for num_ranks, figures in rows.items():
        for (op, dtype), gbps in zip(names, figures, strict=True):
            if gbps is not None:
                yield Published(source, machine, num_ranks, op, dtype, gbps, **sizes)


def _hybrid_ep() -> Iterator[Published]:
    """Kernel times of docs/README_Hybrid-EP.md: a uniform router and 8 experts a rank."""
    by_sms = {
        4: {16: (34.0, 44.4, 52.0), 32: (38.5, 52.6, 51.0), 64: (37.5, 48.0, 46.0)},
        8: {16: (62.0, 76.8, 68.0), 32: (51.3, 54.5, 56.4), 64: (46.6, 50.6, 51.0)},
    }
    for num_sms, rows in by_sms.items():
        for num_ranks, figures in rows.items():
            sizes = {"num_sms": num_sms, "num_experts": 8 * num_ranks, "topk_groups": num_ranks}
            yield from _table("HybridEP", "h100", {num_ranks: figures}, **sizes)


PUBLISHED: list[Published] = [
    # DeepEP's tables; tests/test_internode.py of V1 says how its figures count, and tunes chunks with calls along a handle.
    *_table("DeepEP V1, first table", "h800", {16: (43, None, 43), 32: (44, None, 47), 64: (46, None, 45)}),
    *_table("DeepEP V1, later table", "h800", {16: (43, None, 43), 32: (58, None, 57), 64: (51, None, 50)}),
    *_table("DeepEP V2", "h100", {16: (90, None, 81)}, num_sms=12, num_tokens=8192),
    *_table("DeepEP V2", "h100", {32: (61, None, 61)}, num_sms=6, num_tokens=8192),
    *_table("DeepEP V1 on Azure ND H100 v5", "h100", {16: (45.9, 60.3, 61.3)}),
    *_table("DeepEP V1, a third party", "h100", {16: (40.9, 54.2, 50.8)}),
    *_hybrid_ep(),
]


@dataclass(frozen=True)
class PublishedCall:
    """One low-latency call of a table: 128 tokens a rank, hidden 7168, top-8, dispatch in fp8, combine in bf16; 8 GPUs a node, each with a
    ConnectX-7."""

    source: str
    num_ranks: int
    op: str
    us: float
    over_nvlink: bool = False  # rows of the own node go over NVLink
    us_to: float | None = None  # `us` is the middle, where a range is published


def _calls(source: str, rows: dict[int, tuple[float, float]], over_nvlink: bool = False) -> Iterator[PublishedCall]:
    """`rows` has dispatch and combine, by the number of ranks."""
    for num_ranks, figures in rows.items():
        for op, us in zip(("dispatch", "combine"), figures, strict=True):
            yield PublishedCall(source, num_ranks, op, us, over_nvlink)


# DeepEP's own table has everything go over the network. pplx-garden's docs/fabric-lib.md has "Decode (128 tokens)", with NVLink within a
# node, and gives neither hidden nor experts: they are taken to be DeepEP's. DeepEP takes 43 and 72 us there at 8 ranks: it uses NVLink too.
LOW_LATENCY: list[PublishedCall] = [
    *_calls("DeepEP V1", {16: (173, 329), 32: (182, 350), 64: (186, 353), 128: (192, 369), 256: (194, 360)}),
    PublishedCall("DeepEP V1, a third party", 16, "dispatch", 186, us_to=199),
    PublishedCall("DeepEP V1, a third party", 16, "combine", 337, us_to=342),
    *_calls("DeepEP V1, in pplx-garden's table", {16: (123.9, 203.0), 32: (159.1, 285.0), 64: (177.9, 325.0)}, over_nvlink=True),
    *_calls("pplx-garden", {16: (110.2, 185.5), 32: (153.9, 266.3), 64: (187.5, 309.1)}, over_nvlink=True),
]


def modelled(row: Published) -> simulate.Call:
    """Return the call of the two-hop protocol, by our kernels, with the sizes of `row`. The host waits for nothing, as in their calls."""
    setting = simulate.Setting(ROW_BYTES[row.dtype], CHUNK_ROWS, row.num_sms)
    return simulate.CALLS[row.op](_traffic(row.num_ranks, row.num_tokens, row.num_experts, row.topk_groups), MACHINES[row.machine], setting)


@functools.cache
def _traffic(num_ranks: int, num_tokens: int, num_experts: int, topk_groups: int) -> Traffic:
    cluster = Cluster(num_ranks // 8, 8, num_tokens, 8, num_experts, topk_groups)
    return Traffic(cluster, choose(cluster, "group-limited"))


def logical_gbps(call: simulate.Call) -> float:
    """Return the rate as `Published.gbps` counts it."""
    return call.logical_bytes / call.us / 1e3


def error(row: Published) -> float:
    """Return how much faster the model is than what was published, as a share of the latter."""
    return logical_gbps(modelled(row)) / row.gbps - 1
