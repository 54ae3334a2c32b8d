"""Engines whose MoE layers are swapped by the section "deepep_moe" of ds_config."""

import functools
import inspect
import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from deepep_moe.integrations.deepspeed.options import SECTION, options_of
from deepep_moe.integrations.deepspeed.plugin import replace_with, say_on_first_rank

_Initialized = tuple[Any, Any, Any, Any]  # engine, optimizer, loader, scheduler
_enabled: Callable[..., _Initialized] | None = None
"""The function that `enable` has put in the place of `deepspeed.initialize`, which is its `__wrapped__`."""


def enable() -> None:
    """Let plain `deepspeed.initialize` do what `initialize` does, in this process: it honours the section "deepep_moe" of ds_config.

    So a trainer that calls `deepspeed.initialize` itself, such as Hugging Face's, needs no change. Call this before engines are built, and
    before a module takes the function by `from deepspeed import initialize`. Further calls have no effect.

    Raises:
        ImportError: DeepSpeed is not installed.
    """
    import deepspeed

    global _enabled
    if _enabled is not None:
        return
    stock = deepspeed.initialize

    @functools.wraps(stock)
    def honouring(*args: object, **kwargs: object) -> _Initialized:
        return _initialize_by(stock, *args, **kwargs) if _enabled is honouring else stock(*args, **kwargs)

    _enabled = deepspeed.initialize = honouring


def disable() -> None:
    """Undo `enable`. Engines that were built keep their swapped layers. A function that somebody else has put around ours since stays."""
    import deepspeed

    global _enabled
    ours, _enabled = _enabled, None
    if ours is not None and deepspeed.initialize is ours:
        deepspeed.initialize = ours.__wrapped__  # type: ignore[attr-defined]


def initialize(*args: object, **kwargs: object) -> _Initialized:
    """Call `deepspeed.initialize` with the same arguments, and do what the section "deepep_moe" of ds_config asks for.

    The section is `{"enabled": true}` with any of the options of `replace_moe_layers`: "exact", "backend", "num_max_tokens_per_rank",
    "num_sms", "gate", "expert_bias_update_rate", "grouped_experts" (true or false), "ranks_per_node", "fp8", "sums", "balance" (a number of
    slots). With `"enabled": false` nothing else happens than in `deepspeed.initialize`. The same holds without the section, and a log line
    says so.

    Returns what `deepspeed.initialize` returns.

    Raises:
        ValueError: the section has unknown keys.
        Exception: what `deepspeed.initialize` and `replace_moe_layers` raise.
    """
    import deepspeed

    current = deepspeed.initialize
    is_ours = current is _enabled
    return current(*args, **kwargs) if is_ours else _initialize_by(current, *args, **kwargs)


def _initialize_by(stock: Callable[..., _Initialized], *args: object, **kwargs: object) -> _Initialized:
    """Call DeepSpeed's `stock` function, and swap the layers of its engine."""
    _check_section(inspect.signature(stock).bind_partial(*args, **kwargs).arguments)
    initialized: _Initialized = stock(*args, **kwargs)
    engine = initialized[0]
    options = options_of(engine._config._param_dict)
    if options is not None:
        replace_with(engine, options)
    elif SECTION not in engine._config._param_dict:
        say_on_first_rank(logging.WARNING, f'ds_config has no section "{SECTION}": MoE layers keep the dispatch of DeepSpeed')
    return initialized


def _check_section(arguments: Mapping[str, object]) -> None:
    """Raise for a wrong section before the engine is built, if ds_config is a dictionary or a file."""
    import hjson  # as DeepSpeed reads its files

    config = arguments.get("config") or arguments.get("config_params") or getattr(arguments.get("args"), "deepspeed_config", None)
    if isinstance(config, str | os.PathLike) and os.path.isfile(config):
        config = hjson.loads(Path(config).read_text())
    if isinstance(config, Mapping):
        options_of(config)
