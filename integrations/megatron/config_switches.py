"""Settings that Megatron-Core's config would refuse, or replace, for a dispatcher that it does not know."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

from deepep_moe.integrations.megatron.cuda_graphs import moe_part_hidden
from deepep_moe.integrations.megatron.patches import Patches
from deepep_moe.integrations.megatron.shared_experts import check_shared_overlap


def serve_config(
    patches: Patches,
    choose: Callable[[Any], None],
    is_ours: Callable[[Any], bool],
    backend_field: str,
    is_sync_free: Callable[[Any], bool],
) -> None:
    """Let `choose` complete configs, and let those of which `is_ours` is true then keep what they ask for.

    `moe_enable_deepep` would replace our backend by DeepEP's with a warning at most, and is an error. `moe_shared_expert_overlap` (before
    0.18) and `moe_expert_rank_capacity_factor` are hidden from the checks, which know the dispatchers by name. Where `is_sync_free`, so is
    the part "moe" of CUDA graphs.
    """
    from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
    from megatron.core.transformer.transformer_config import TransformerConfig

    stock = TransformerConfig.__post_init__
    hidden: dict[str, Any] = {"moe_expert_rank_capacity_factor": None}
    if not hasattr(SharedExpertMLP, "wait_current_stream"):
        hidden["moe_shared_expert_overlap"] = False

    @functools.wraps(stock)
    def __post_init__(self: Any, *args: Any, **kwargs: Any) -> None:
        choose(self)
        if not is_ours(self):
            stock(self, *args, **kwargs)
            return
        if hasattr(self, backend_field) and getattr(self, "moe_enable_deepep", False):
            backend = getattr(self, backend_field)
            raise ValueError(
                f"moe_enable_deepep is True, which puts {backend_field}={backend!r} back to DeepEP's 'deepep'; leave "
                "moe_enable_deepep out (drop --moe-enable-deepep)"
            )
        with contextlib.ExitStack() as undo:
            if is_sync_free(self):
                undo.enter_context(moe_part_hidden(self))
            undo.enter_context(_without(self, {name: value for name, value in hidden.items() if hasattr(self, name)}))
            stock(self, *args, **kwargs)
        check_shared_overlap(self)

    patches.set(TransformerConfig, "__post_init__", __post_init__)


@contextlib.contextmanager
def _without(config: Any, values: dict[str, Any]) -> Iterator[None]:
    """Let the config have these values meanwhile."""
    asked_for = {name: getattr(config, name) for name in values}
    vars(config).update(values)
    try:
        yield
    finally:
        vars(config).update(asked_for)
