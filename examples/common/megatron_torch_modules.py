"""Two modules of a DeepSeek-V3 layer in plain PyTorch. Megatron-Core has them for TransformerEngine only.

`enable_without_te()` and `enable_cpu()` put them into the local layer specs. The first is attention whose keys and values differ in size
(multi-head latent attention). The second are norms under sequence parallelism, which MoE training with tensor parallelism needs.
"""

from typing import Any

import torch
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule


class TorchAttention(MegatronModule):
    """Scaled dot product attention over this rank's heads. It takes the arguments of Megatron-Core's core attentions.

    Raises ValueError for dropout and for context parallelism, which it does not have.
    """

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        **kwargs: Any,
    ):
        super().__init__(config=config)
        dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        if dropout:
            raise ValueError(f"attention_dropout is {dropout} in layer {layer_number}; it must be 0.0, as TorchAttention has no dropout")
        if config.context_parallel_size > 1:
            raise ValueError(f"context_parallel_size is {config.context_parallel_size}; it must be 1: TorchAttention needs whole sequences")
        self.attn_mask_type = attn_mask_type
        self.softmax_scale = softmax_scale

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> torch.Tensor:
        """query [sq, b, heads, d], key [sk, b, groups, d], value [sk, b, groups, dv] -> [sq, b, heads * dv].

        `attention_mask` bool, True where a query must not look; not read for causal attention. Raises ValueError for packed sequences.
        """
        if packed_seq_params is not None:
            raise ValueError(
                "packed_seq_params is given, but TorchAttention takes no packed sequences; pass one sequence for each row of the batch"
            )
        causal = (attn_mask_type or self.attn_mask_type) == AttnMaskType.causal
        mask = None if causal or attention_mask is None else ~attention_mask
        if attention_bias is not None:
            raise ValueError("attention_bias is given, but TorchAttention takes none; leave it out")
        query, key, value = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))
        out = torch.nn.functional.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=mask,
            is_causal=causal,
            scale=self.softmax_scale,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        return out.permute(2, 0, 1, 3).flatten(2)


def torch_norm(
    cls: type,
    config: Any,
    hidden_size: int,
    eps: float = 1e-5,
    persist_layer_norm: bool = False,
    zero_centered_gamma: bool = False,
    normalization: str = "LayerNorm",
    **kwargs: Any,
) -> torch.nn.Module:
    """Make a LayerNorm or RMSNorm over `hidden_size` columns, as the `__new__` of Megatron-Core's wrapper of PyTorch's norms.

    Parameters are marked for sequence parallelism, where `finalize_model_grads` sums their gradients over the tensor-parallel ranks.
    Raises ValueError for zero-centred scales, which PyTorch does not have.
    """
    if config.layernorm_zero_centered_gamma or zero_centered_gamma:
        raise ValueError("layernorm_zero_centered_gamma is True; it must be False, as PyTorch's norms have no zero-centred scale")
    norm = (torch.nn.RMSNorm if config.normalization == "RMSNorm" else torch.nn.LayerNorm)(hidden_size, eps=eps)
    for parameter in norm.parameters():
        parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
    return norm
