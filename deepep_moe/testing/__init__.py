"""Tools for tests and benchmarks: start ranks, draw routings."""

from deepep_moe.testing.launch import RankFailedError, run_ranks

__all__ = ["RankFailedError", "run_ranks"]
