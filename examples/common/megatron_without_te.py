"""Run Megatron-Core without TransformerEngine, on any device: `enable_without_te()` and `disable_without_te()`.

Megatron-Core's own local layers lack two modules that a DeepSeek-V3 needs. This layer adds those of `megatron_torch_modules`. The CPU
layer (`megatron_cpu`) includes it. It is active between the two calls and puts back every symbol that it replaced.
"""

from deepep_moe.integrations.common.patches import Patches


def patch_modules(patches: Patches) -> None:
    """Replace the symbols that need TransformerEngine."""
    from megatron.core.models.backends import LocalSpecProvider
    from megatron.core.transformer import multi_latent_attention
    from megatron.core.transformer.moe import moe_utils
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    # This import is here, as this module must load without Megatron-Core.
    from megatron_torch_modules import TorchAttention, torch_norm

    # The local attention has one head size for keys and values, but multi-head latent attention has two.
    patches.set(LocalSpecProvider, "core_attention", lambda provider: TorchAttention)
    # PyTorch's norms refuse sequence parallelism, which training MoE under tensor parallelism demands.
    patches.set(WrappedTorchNorm, "__new__", torch_norm)
    # If TransformerEngine is missing, its layers are mocks and no classes, yet this module sets HAVE_TE and calls isinstance with one.
    if getattr(multi_latent_attention, "HAVE_TE", False) and not isinstance(multi_latent_attention.TELinear, type):
        patches.set(multi_latent_attention, "HAVE_TE", False)
    # 0.13 to 0.16 without TransformerEngine never define this name and raise NameError in every router (fixed in 0.17).
    if not hasattr(moe_utils, "te_general_gemm"):
        patches.set(moe_utils, "te_general_gemm", None)


_active: Patches | None = None


def enable_without_te() -> None:
    """Let Megatron-Core's local layers train a DeepSeek-V3 in this process. Call it before building a model, once or more."""
    global _active
    if _active is not None:
        return
    patches = Patches()
    try:
        patch_modules(patches)
    except BaseException:
        patches.restore()
        raise
    _active = patches


def disable_without_te() -> None:
    """Put back every symbol that `enable_without_te()` replaced. Does nothing without `enable_without_te()`."""
    global _active
    if _active is not None:
        _active.restore()
        _active = None
