"""Operations on one rank, each a function with autograd that torch.compile traces, beside its definition in `deepep_moe.reference`."""

from deepep_moe.ops.balance import sequence_aux_loss, update_expert_bias
from deepep_moe.ops.gate import GateOutput, gate, to_dense
from deepep_moe.ops.quant import quantize_fp8

__all__ = ["GateOutput", "gate", "quantize_fp8", "sequence_aux_loss", "to_dense", "update_expert_bias"]
