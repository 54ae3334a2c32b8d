"""The benchmark of low-latency calls over nodes: what it makes of a profile, and that the design page has the records' figures."""

import json
import re
from types import SimpleNamespace

from bench_cases import ROOT

from deepep_moe.bench.low_latency.nodes import by_half

ANONYMOUS = "void deepep_moe::(anonymous namespace)::{}<(deepep_moe::DType)1, true>(deepep_moe::LowLatencyRailLaunch<int>)"
SYMBOL = "__nv_static_50__15_low_latency_combine_cu_73__ZN10deepep_moe55_GLOBAL__N__738rail_sumILNS_5DTypeE1EEEvNS_2"
MARK = "void at::native::vectorized_elementwise_kernel<4, at::native::sin_kernel_cuda(at::TensorIteratorBase&)>"


def event(name, start, end):
    return SimpleNamespace(name=name, time_range=SimpleNamespace(start=start, end=end, elapsed_us=lambda: end - start))


def test_kernels_that_overlap():
    """A sum that starts early ends the half; the network's kernel, others, and what is not between two marks count for nothing."""
    profile = []
    for at in (0, 100):
        profile += [
            event(ANONYMOUS.format("low_latency_dispatch"), at - 9, at - 3), event(MARK, at - 2, at - 1),
            event(ANONYMOUS.format("low_latency_combine"), at, at + 33), event(SYMBOL, at + 5, at + 45),
            event("_ZN10deepep_moe12rail_deliverENS_2", at + 46, at + 70), event(MARK, at + 71, at + 72),
            event(ANONYMOUS.format("low_latency_dispatch"), at + 72, at + 73), event(MARK, at + 73, at + 74),
            event("void at::native::fill", at + 74, at + 75), event(ANONYMOUS.format("low_latency_finish"), at + 74, at + 88),
            event(MARK, at + 90, at + 91),
        ]  # fmt: skip
    kernels, spans = by_half(reversed(profile))
    assert kernels == {"send": {"low_latency_combine": [33, 33], "rail_sum": [40, 40]}, "receive": {"low_latency_finish": [14, 14]}}
    assert spans == {"send": [45, 45], "receive": [14, 14]}


def figures_of(file):
    """Microseconds by (backend, operation, wire, half)."""
    newest = max((ROOT / "benchmarks" / "results").glob(f"{file}-????-??-??.json"))
    records = json.loads(newest.read_text())
    return {(r["backend"], r["op"], r["wire"], r["half"]): f"{r['us_median']:.1f}" for r in records}


def test_figures_of_the_design_page():
    page = (ROOT / "docs/design/low_latency_nodes.md").read_text()
    rows = re.findall(r"^\| (dispatch|combine)(.*), (send|hook)(?: and `sum`)? \| (.+) \|$", page, re.MULTILINE)
    runs = [figures_of(f"h200-low-latency-nodes-{name}") for name in ("4x1", "2x2", "2x2-four-gpus")]
    h100 = [figures_of(f"h100-low-latency-nodes-2x2{nth}") for nth in ("", "-second")]
    assert len(rows) == 16
    for number, (op, name, half, text) in enumerate(rows):
        cells = text.replace("*", "").split(" | ")
        key = op, "fp8" if "fp8" in name else "bf16", "receive" if half == "hook" else "send"
        one_hop, two_hops, four_gpus = (run["nvshmem", *key] for run in runs)
        assert cells == [one_hop, two_hops, runs[1]["nvlink", *key]] if number < 8 else [cells[1], cells[3]] == [two_hops, four_gpus], key
        assert number < 8 or cells[2] == ", ".join(run["nvshmem", *key] for run in h100), key
        for figure in re.findall(r"[*\d.]+", " ".join(text.split(" | ")[1:])) if number >= 8 else ():
            assert figure.startswith("**") == (float(figure.strip("*")) <= int(cells[0])), (key, figure)


def test_probe_of_a_kernel_that_waits():
    page = (ROOT / "docs/design/low_latency_nodes.md").read_text().split("| product, us | all, us |", 1)[1]
    rows = re.findall(r"^\| .+ \| ([\d.]+) \| ([\d.]+) \|$", page, re.MULTILINE)
    records = json.loads((ROOT / "benchmarks/results/h100-receive-beside-gemm-2026-11-26.json").read_text())
    assert rows == [(f"{r['us_product']:.1f}", f"{r['us_median']:.1f}") for r in records]
    alone, hook, *waiting = records
    costs = [r["us_product"] / alone["us_product"] - 1 for r in (hook, *waiting)]
    assert f"the product {costs[0]:.0%} longer, a kernel that waits {min(costs[1:]):.0%} to {max(costs[1:]):.0%}" in page
    assert f"{min(r['us_median'] for r in waiting) - hook['us_median']:.0f} us less" in page
