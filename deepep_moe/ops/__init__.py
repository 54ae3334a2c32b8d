"""Operations on one rank, each a function with autograd that torch.compile traces, beside its definition in `deepep_moe.reference`."""

from deepep_moe.ops.balance import sequence_aux_loss, update_expert_bias
from deepep_moe.ops.gate import GateOutput, gate, to_dense

__all__ = ["GateOutput", "gate", "sequence_aux_loss", "to_dense", "update_expert_bias"]
