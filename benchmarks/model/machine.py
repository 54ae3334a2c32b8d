"""The rates and latencies that the model has, and where they come from."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

RECORDS = "h200-nvlink-2026-11-22.json"
"""The file of benchmarks/results that `ONE_HOST` is calibrated on."""
_LARGE = 4096  # tokens a rank from which the link bounds a call


@dataclass(frozen=True)
class OneHost:
    """What our records of one host say of our kernels."""

    nvlink_gbps: float  # of one GPU, one direction
    sm_gbps: float  # one SM that moves rows from its memory to that of a peer
    start_us: float  # from the launch of a call to its first row, and from its last row to its end
    host_us: float  # the least time of a dispatch whose host waits for the counts


ONE_HOST = OneHost(nvlink_gbps=362.1, sm_gbps=40.6, start_us=33.6, host_us=188.4)
"""`calibrate` of `RECORDS`, rounded; a test compares them."""


@dataclass(frozen=True)
class Machine:
    """A node's GPUs and network. GB/s are 1e9 bytes per second of one GPU, in one direction."""

    name: str
    nvlink_gbps: float
    nic_gbps: float  # one NIC a GPU
    put_us: float  # from the NIC's last byte to the moment that the other GPU sees the chunk's word
    message_us: float  # what a NIC spends on one put with its word, beside its bytes
    sm_gbps: float = ONE_HOST.sm_gbps
    start_us: float = ONE_HOST.start_us
    host_us: float = ONE_HOST.host_us


# A ConnectX-7 of 400 Gb/s carries 46 GB/s of payload in DeepEP's table of low-latency calls at EP8, whose rows the model is not held
# against. `put_us` and `message_us` are guesses: nobody who works on this library has measured a NIC.
_NIC = {"nic_gbps": 46.0, "put_us": 5.0, "message_us": 0.1}
MACHINES = {
    "h100": Machine("H100 or H200, ConnectX-7 400 Gb/s", nvlink_gbps=ONE_HOST.nvlink_gbps, **_NIC),
    # DeepEP's tables say of NVLink "about 160 GB/s peak".
    "h800": Machine("H800, ConnectX-7 400 Gb/s", nvlink_gbps=160.0, **_NIC),
}


def calibrate(records: Sequence[dict[str, Any]]) -> OneHost:
    """Return what the records of `python benchmarks/run.py link --sweep` say of their largest number of ranks.

    Time is `start_us` + bytes / `nvlink_gbps`, by least squares of relative errors over bf16 calls of the rank layout from 4096 tokens on.
    """
    num_ranks = max(r["num_ranks"] for r in records)
    calls = [r for r in records if r["num_ranks"] == num_ranks and r["backend"] == "nvlink" and "num_sms" in r]
    plain = [r for r in calls if r["layout"] == "rank" and r["dtype"] == "bfloat16" and r["op"] in ("dispatch", "combine")]
    large = [r for r in plain if r["num_sms"] is None and r["num_tokens"] >= _LARGE]
    sizes, times = (np.array([r[name] for r in large], dtype=float) for name in ("bytes_moved", "us_median"))
    terms = np.stack([1 / times, sizes / times], axis=1)
    start_us, us_per_byte = np.linalg.lstsq(terms, np.ones(len(large)), rcond=None)[0]
    few = min(r["num_sms"] for r in plain if r["num_sms"])
    per_sm = [r["bytes_moved"] / (r["us_median"] - start_us) / few / 1e3 for r in plain if r["num_sms"] == few]
    smallest = min(r["num_tokens"] for r in calls)
    waits = [r["us_median"] for r in calls if r["op"] == "dispatch" and r["num_tokens"] == smallest]
    return OneHost(float(1 / us_per_byte / 1e3), float(statistics.mean(per_sm)), float(start_us), statistics.median(waits))
