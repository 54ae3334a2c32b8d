"""The benchmark of low-latency calls over nodes: what it makes of a profile."""

from types import SimpleNamespace

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
