"""The configs that select this library, and settings of theirs that Megatron-Core would refuse or replace."""

import contextlib
import typing
from typing import Any

from deepep_moe.integrations.common.patches import Patches, Stock, meanwhile
from deepep_moe.integrations.megatron.cuda_graphs import moe_part_hidden
from deepep_moe.integrations.megatron.options import Config, Options
from deepep_moe.integrations.megatron.recv_capacity import FACTOR_FIELD, capacity_factor_of
from deepep_moe.integrations.megatron.shared_experts import SWITCH, check_shared_overlap

BACKEND_NAME = "deepep_moe"
_BACKEND_FIELD = "moe_flex_dispatcher_backend"


def selection(dispatcher: str = BACKEND_NAME) -> dict[str, Any]:
    """Return the fields of a TransformerConfig that select `dispatcher`, ours or one of Megatron-Core's, in the installed version."""
    if dispatcher != BACKEND_NAME:
        return {"moe_token_dispatcher_type": dispatcher}
    from megatron.core.transformer.transformer_config import TransformerConfig

    has_backend = _BACKEND_FIELD in TransformerConfig.__dataclass_fields__
    return {"moe_token_dispatcher_type": "flex"} | ({_BACKEND_FIELD: BACKEND_NAME} if has_backend else {})


def is_ours(config: Config) -> bool:
    """Return whether a config selects this library.

    0.16 and newer name a backend, and ours is `deepep_moe`. 0.13 to 0.15 know flex with DeepEP only and refuse flex without it. There,
    flex without `moe_enable_deepep` is ours.
    """
    is_named = getattr(config, _BACKEND_FIELD) == BACKEND_NAME if hasattr(config, _BACKEND_FIELD) else not config.moe_enable_deepep
    return config.moe_token_dispatcher_type == "flex" and bool(is_named)


def why_off(config: Config) -> str:
    """Return why a layer of this config does not dispatch through deepep_moe although it is enabled, and what to do."""
    wanted = selection()
    if _BACKEND_FIELD not in wanted:
        wanted["moe_enable_deepep"] = False
    wrong = {name: value for name, value in wanted.items() if getattr(config, name) != value}
    settings = " and ".join(f"{name} is {getattr(config, name)!r}" for name in wrong)
    fix = " and ".join(f"{name}={value!r}" for name, value in wrong.items())
    return f"{settings}; set {fix}"


def serve_config(patches: Patches, options: Options) -> None:
    """Let our backend be a choice of the command line, and let configs that select it keep what they ask for.

    Our backend alone selects the flex dispatcher, unless the config names a dispatcher that is not the default. `moe_enable_deepep` would
    replace our backend by DeepEP's with a warning at most, and is an error. `moe_shared_expert_overlap` (before 0.18) and
    `moe_expert_rank_capacity_factor` are hidden from the checks, which know the dispatchers by name. So is the part "moe" of CUDA graphs
    where layers are sync-free.
    """
    from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
    from megatron.core.transformer.transformer_config import TransformerConfig

    fields = TransformerConfig.__dataclass_fields__
    hidden: dict[str, object] = {FACTOR_FIELD: None}
    if not hasattr(SharedExpertMLP, "wait_current_stream"):
        hidden[SWITCH] = False
    if _BACKEND_FIELD in fields:  # from 0.16; Megatron-LM's command line reads the choices from the annotation
        choices = dict.fromkeys((*typing.get_args(fields[_BACKEND_FIELD].type), BACKEND_NAME))
        patches.set(fields[_BACKEND_FIELD], "type", typing.Literal[tuple(choices)])

    @patches.around(TransformerConfig, "__post_init__")
    def complete(stock: Stock, config: TransformerConfig, /, *args: object, **kwargs: object) -> None:
        default = type(config).__dataclass_fields__["moe_token_dispatcher_type"].default
        if getattr(config, _BACKEND_FIELD, None) == BACKEND_NAME and config.moe_token_dispatcher_type == default:
            config.moe_token_dispatcher_type = "flex"
        if not is_ours(config):
            stock(config, *args, **kwargs)
            return
        if hasattr(config, _BACKEND_FIELD) and getattr(config, "moe_enable_deepep", False):
            raise ValueError(
                f"moe_enable_deepep is True, which puts {_BACKEND_FIELD}={BACKEND_NAME!r} back to DeepEP's 'deepep'; leave "
                "moe_enable_deepep out (drop --moe-enable-deepep)"
            )
        with contextlib.ExitStack() as undo:
            if capacity_factor_of(config, options)[0]:
                undo.enter_context(moe_part_hidden(config))
            undo.enter_context(meanwhile(config, **{name: value for name, value in hidden.items() if hasattr(config, name)}))
            stock(config, *args, **kwargs)
        check_shared_overlap(config)
