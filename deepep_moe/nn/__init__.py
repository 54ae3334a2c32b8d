"""Modules for mixture-of-experts layers, with no framework around them."""

from deepep_moe.low_latency.overlap import Span, Timeline, overlapped, routed_experts
from deepep_moe.nn.balance import Balance
from deepep_moe.nn.grouped_experts import GroupedExperts
from deepep_moe.nn.metrics import EventFile, JsonLines, Metrics
from deepep_moe.nn.moe import LocalExperts, MoELayer, SwiGLU
from deepep_moe.nn.rank_parameters import mark_experts
from deepep_moe.nn.router import Router

__all__ = [
    "MoELayer", "Router", "GroupedExperts", "SwiGLU", "LocalExperts", "mark_experts", "routed_experts", "Balance", "overlapped", "Metrics",
    "JsonLines", "EventFile", "Timeline", "Span",
]  # fmt: skip
