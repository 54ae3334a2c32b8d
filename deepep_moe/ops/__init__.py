"""Operations on one rank, each a function with autograd, beside its definition in `deepep_moe.reference`.

torch.compile traces them, except `grouped_mlp` and `clear_tail`, at which it breaks the graph.
"""

from deepep_moe.ops import ue8m0
from deepep_moe.ops.balance import global_aux_loss, sequence_aux_loss, update_expert_bias
from deepep_moe.ops.copies import CopyPlan, plan_copies
from deepep_moe.ops.fp8_kept import KeptWeights
from deepep_moe.ops.gate import FullGateOutput, GateOutput, check_gate, gate, gate_full
from deepep_moe.ops.grouped_mlp import clear_tail, grouped_mlp
from deepep_moe.ops.lanes import nodes_per_token, to_dense
from deepep_moe.ops.quant import quantize_fp8, quantize_fp8_weights
from deepep_moe.ops.quantized import QuantizedRows

__all__ = [
    "CopyPlan",
    "FullGateOutput",
    "GateOutput",
    "KeptWeights",
    "QuantizedRows",
    "check_gate",
    "clear_tail",
    "gate",
    "gate_full",
    "global_aux_loss",
    "grouped_mlp",
    "nodes_per_token",
    "plan_copies",
    "quantize_fp8",
    "quantize_fp8_weights",
    "sequence_aux_loss",
    "to_dense",
    "ue8m0",
    "update_expert_bias",
]
