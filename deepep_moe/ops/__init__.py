"""Operations on one rank, each a function with autograd that torch.compile traces, beside its definition in `deepep_moe.reference`."""

from deepep_moe.ops.balance import global_aux_loss, sequence_aux_loss, update_expert_bias
from deepep_moe.ops.dense import nodes_per_token, to_dense
from deepep_moe.ops.gate import FullGateOutput, GateOutput, check_gate, gate, gate_full
from deepep_moe.ops.quant import quantize_fp8

__all__ = [
    "FullGateOutput",
    "GateOutput",
    "check_gate",
    "gate",
    "gate_full",
    "global_aux_loss",
    "nodes_per_token",
    "quantize_fp8",
    "sequence_aux_loss",
    "to_dense",
    "update_expert_bias",
]
