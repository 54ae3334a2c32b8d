"""Defines every operation of the library in plain PyTorch: slow, short and obviously right."""

from deepep_moe.reference import fp8, low_latency
from deepep_moe.reference.copies import physical_topk_idx, plan_copies
from deepep_moe.reference.exchange import Received, combine, combine_lane_values, dispatch, layout, rank_of
from deepep_moe.reference.gate import gate, gate_shares
from deepep_moe.reference.grouped_mlp import grouped_mlp
from deepep_moe.reference.quant import quantize_fp8

__all__ = [
    "Received",
    "combine",
    "combine_lane_values",
    "dispatch",
    "fp8",
    "gate",
    "gate_shares",
    "grouped_mlp",
    "layout",
    "low_latency",
    "physical_topk_idx",
    "plan_copies",
    "quantize_fp8",
    "rank_of",
]
