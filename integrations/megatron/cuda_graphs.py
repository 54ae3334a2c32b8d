"""Megatron-Core's CUDA graphs: which parts of a layer they hold, and what that needs.

`cuda_graph_impl` says who captures, `cuda_graph_scope` (0.19: `cuda_graph_modules`) what. Router and preprocessing call no buffer, so their
graphs need nothing. A graph that holds dispatch and combine needs calls whose host waits for nothing.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

from deepep_moe.integrations.megatron.options import Config, Options

_FIELDS = ("cuda_graph_modules", "cuda_graph_scope")  # from 0.19; before
_MOE, _ROUTER, ITERATION = "moe", "moe_router", "full_iteration"
_HOLDERS = frozenset({"full", _MOE, ITERATION})  # parts with dispatch and combine


def graphed_parts(config: Config) -> tuple[str, frozenset[str]]:
    """Return who captures ("none" for nobody) and the names of the parts. None named, or "full", is the whole layer.

    The config may have been checked by Megatron-Core or not yet, and be of any version. Before 0.16 `enable_cuda_graph` and
    `external_cuda_graph` say who captures.
    """
    impl = getattr(config, "cuda_graph_impl", None)
    if impl is None:
        switches = {"enable_cuda_graph": "local", "external_cuda_graph": "transformer_engine"}
        impl = next((name for switch, name in switches.items() if getattr(config, switch, False)), "none")
    if impl == ITERATION:  # from 0.19
        return impl, frozenset({ITERATION})
    return impl, frozenset(getattr(part, "name", part) for field in _FIELDS for part in _parts_of(config, field))


def _parts_of(config: Config, field: str) -> list[Any]:
    value = getattr(config, field, None) or []
    return value.split(",") if isinstance(value, str) else list(value) if isinstance(value, list | tuple) else [value]


def holds_calls(config: Config) -> bool:
    """Return whether dispatch and combine of a layer with this config become part of a CUDA graph."""
    impl, parts = graphed_parts(config)
    return impl != "none" and (not parts or bool(parts & _HOLDERS))


def check_graphs(config: Config, options: Options, is_sync_free: bool) -> None:
    """Raise ValueError for CUDA graphs that would hold calls which cannot be captured."""
    if not holds_calls(config):
        return
    impl, parts = graphed_parts(config)
    what = f"cuda_graph_impl is {impl!r} with the parts {sorted(parts) or ['full']}, so a CUDA graph would hold the dispatch"
    if not is_sync_free:
        raise ValueError(
            f"{what}, whose host waits for counts of rows; call enable(sync_free=True), or name only parts without "
            "it in cuda_graph_scope (0.19: cuda_graph_modules): attn, mlp, mamba, moe_router, moe_preprocess"
        )
    if options.backend == "collective":
        raise ValueError(f"{what}, but the backend 'collective' counts rows on the host; leave backend out, or cuda_graph_impl")
    num_sms = getattr(config, "moe_flex_dispatcher_num_sms", None)
    if (options.num_sms if num_sms is None else num_sms) == 0:
        raise ValueError(f"{what}, but with num_sms=0 copy engines send, for which the host waits; give num_sms of 1 or more, or none")
    if getattr(config, "overlap_moe_expert_parallel_comm", False) and ITERATION not in parts:
        raise ValueError(
            f"{what}, but overlap_moe_expert_parallel_comm runs a layer in parts, which no graph of a whole layer has; name only attn, "
            "moe_router and moe_preprocess"
        )


@contextlib.contextmanager
def moe_part_hidden(config: Config) -> Iterator[None]:
    """Hide the part "moe" from Megatron-Core's check, which knows it for experts with padding to a capacity only. Parts that exclude it
    stay for that check to refuse."""
    impl, parts = graphed_parts(config)
    if impl == "none" or _MOE not in parts or _ROUTER in parts or getattr(config, "overlap_moe_expert_parallel_comm", False):
        yield
        return
    name = next(field for field in _FIELDS if _MOE in {getattr(part, "name", part) for part in _parts_of(config, field)})
    setattr(config, name, [part for part in _parts_of(config, name) if getattr(part, "name", part) != _MOE])
    yield
    from megatron.core.transformer import enums

    checked = next(field for field in _FIELDS if hasattr(config, field))
    names: Any = getattr(enums, "CudaGraphModule", None) or enums.CudaGraphScope
    setattr(config, checked, [*_parts_of(config, checked), names[_MOE]])
