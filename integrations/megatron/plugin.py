"""Put the dispatcher where Megatron-Core looks for its flex dispatcher, and take it out again.

Megatron-Core has no registry of dispatchers. Its MoE layer builds `moe_layer.MoEFlexTokenDispatcher` for
`moe_token_dispatcher_type="flex"`; `enable()` replaces that one symbol by a class that builds ours for the configurations that ask
for it and the previous class for all others.
"""

import dataclasses
import functools
import logging
import typing
from collections.abc import Callable
from typing import Any

from deepep_moe.arguments import as_int
from deepep_moe.errors import EPError
from deepep_moe.exchange.backends.select import BACKENDS
from deepep_moe.exchange.checks import check_num_sms
from deepep_moe.group.settings import offered
from deepep_moe.integrations.megatron.buffers import BufferRegistry, Options
from deepep_moe.integrations.megatron.patches import Patches

BACKEND_NAME = "deepep_moe"
_BACKEND_FIELD = "moe_flex_dispatcher_backend"
_OLDEST, _NEWEST = (0, 13), (0, 19)
_log = logging.getLogger(__name__)


@dataclasses.dataclass
class _Enabled:
    """What `enable()` did, for `disable()` to undo."""

    options: Options
    registry: BufferRegistry
    patches: Patches
    previous_choices: Any


_enabled: _Enabled | None = None


def selection(dispatcher: str = BACKEND_NAME) -> dict[str, Any]:
    """Fields of a TransformerConfig that select `dispatcher` in the installed version: ours, or one of Megatron-Core's by its type."""
    if dispatcher != BACKEND_NAME:
        return {"moe_token_dispatcher_type": dispatcher}
    from megatron.core.transformer.transformer_config import TransformerConfig

    has_backend = _BACKEND_FIELD in TransformerConfig.__dataclass_fields__
    return {"moe_token_dispatcher_type": "flex"} | ({_BACKEND_FIELD: BACKEND_NAME} if has_backend else {})


def is_selected(config: Any) -> bool:
    """Whether a flex configuration asks for this library.

    0.16 and newer name a backend: ours is `deepep_moe`. 0.13 to 0.15 know flex with DeepEP only and refuse flex without it, so there
    flex without `moe_enable_deepep` is ours.
    """
    if not hasattr(config, _BACKEND_FIELD):
        return not config.moe_enable_deepep
    return getattr(config, _BACKEND_FIELD) == BACKEND_NAME


def _check_version() -> None:
    """Raises EPError for a Megatron-Core older than supported; warns about one newer than tested."""
    import megatron.core

    version = megatron.core.__version__
    number = tuple(int(part) for part in version.split(".")[:2])
    if number < _OLDEST:
        raise EPError(f"deepep_moe needs megatron-core 0.13 or newer, found {version}; pip install 'megatron-core>=0.13'")
    if number > _NEWEST:
        _log.warning("megatron-core %s is newer than the newest version deepep_moe was tested with (0.19)", version)


def _selecting_class(previous: type, registry: BufferRegistry) -> type:
    """A stand-in for `previous` that builds our dispatcher or a `previous`, whichever the config asks for."""
    from deepep_moe.integrations.megatron.dispatcher import NativeTokenDispatcher

    class SelectingFlexTokenDispatcher(previous):
        """Built by MoELayer; never instantiated itself. Somebody's subclass is what it says it is."""

        def __new__(cls, num_local_experts: int, local_expert_indices: list[int], config: Any, **groups: Any) -> Any:
            if cls is not SelectingFlexTokenDispatcher:
                return super().__new__(cls)
            if is_selected(config):
                return NativeTokenDispatcher(num_local_experts, local_expert_indices, config, registry=registry, **groups)
            return previous(num_local_experts, local_expert_indices, config=config, **groups)

    return SelectingFlexTokenDispatcher


_PARTS = ("route", "router_and_preprocess", "shared_experts_compute", "routed_experts_compute", "experts_compute")
"""Methods of MoELayer between calls of the dispatcher, of any version: what a recomputation runs."""


def _by_dispatcher(stock: Callable[..., Any], how: str) -> Callable[..., Any]:
    """A method of MoELayer, by way of the method `how` of our dispatcher where the layer has one."""
    from deepep_moe.integrations.megatron.dispatcher import NativeTokenDispatcher

    @functools.wraps(stock)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        dispatcher = self.token_dispatcher
        if isinstance(dispatcher, NativeTokenDispatcher):
            return getattr(dispatcher, how)(stock, self, *args, **kwargs)
        return stock(self, *args, **kwargs)

    return method


def _widen_choices() -> Any:
    """Add our name to the choices Megatron-LM's command line takes from the config's annotation. Returns the previous annotation."""
    from megatron.core.transformer.transformer_config import TransformerConfig

    field = TransformerConfig.__dataclass_fields__.get(_BACKEND_FIELD)
    if field is None:  # 0.13 to 0.15
        return None
    previous, choices = field.type, typing.get_args(field.type)
    if BACKEND_NAME not in choices:
        field.type = typing.Literal[(*choices, BACKEND_NAME)]
    return previous


def _positive(name: str, value: Any) -> int:
    if (number := as_int(name, value)) < 1:
        raise ValueError(f"{name} must be a positive whole number, got {number}")
    return number


def _keeping_the_choice(stock: Callable[..., None]) -> Callable[..., None]:
    """TransformerConfig.__post_init__, which would put DeepEP in our place with a warning at most; the config then says nothing of us."""

    @functools.wraps(stock)
    def __post_init__(self: Any, *args: Any, **kwargs: Any) -> None:
        if getattr(self, _BACKEND_FIELD, None) == BACKEND_NAME and getattr(self, "moe_enable_deepep", False):
            raise ValueError(
                f"moe_enable_deepep=True puts {_BACKEND_FIELD}={BACKEND_NAME!r} back to DeepEP's 'deepep'; leave moe_enable_deepep out "
                "(drop --moe-enable-deepep)"
            )
        stock(self, *args, **kwargs)

    return __post_init__


def enable(
    *,
    num_max_tokens_per_rank: int | None = None,
    backend: str = "auto",
    expert_alignment: int = 1,
    gate: bool = True,
    num_sms: int | None = None,
) -> None:
    """Make Megatron-Core's MoE layers able to route and dispatch through deepep_moe. Call it before arguments are parsed and models built.

    Which configuration then uses it:

    - megatron-core 0.16 and newer: `moe_token_dispatcher_type="flex"` with `moe_flex_dispatcher_backend="deepep_moe"`, on the command
      line `--moe-token-dispatcher-type flex --moe-flex-dispatcher-backend deepep_moe`;
    - megatron-core 0.13 to 0.15, which have no backend flag: `moe_token_dispatcher_type="flex"` and `moe_enable_deepep` left False
      (those versions refuse that pair on their own), on the command line `--moe-token-dispatcher-type flex` alone.

    Every other configuration behaves as before. Layers with the same group and sizes share one buffer, constructed at the first forward
    and kept until `disable()`.

    If a router or an expert fails on one rank, also in a recomputation, its peers raise EPPeerError with that rank's error instead of
    waiting for the deadline.

    `num_max_tokens_per_rank`: on GPUs, the most tokens one rank ever has in a forward (micro batch x sequence length, divided by the sizes
    of tensor (with sequence parallelism) and context parallelism); None: room for the largest of the first forward over all ranks, rounded
    up to a multiple of 128, and for more once a rank has more. On CPUs there is no bound. `backend`: as for `deepep_moe.Buffer`.
    `expert_alignment`: rows of each expert are padded with zeros to a multiple of this. `gate`: routers of those layers choose by
    `deepep_moe.ops.gate`, in one pass that serves the dispatch too; where it cannot (logits that are not fp32, router replay, ...) a
    warning says why, and Megatron-Core's own routing is used, as with False. Logits that are not finite raise ValueError with the gate;
    what is changed behind autograd's back (`.data`, `.numpy()`) in its probs and routing_map is not seen. `num_sms`: on GPUs, the
    multiprocessors that send, as for `deepep_moe.Buffer`; `moe_flex_dispatcher_num_sms` of a config (from 0.19) goes before it.

    A config with `moe_enable_deepep` beside our backend raises ValueError, as Megatron-Core would put the backend back to DeepEP's.

    Raises TypeError for wrong types, ValueError for wrong values or when enabled already with others, EPError for an unsupported
    Megatron-Core, ImportError without one.
    """
    global _enabled
    expert_alignment = _positive("expert_alignment", expert_alignment)
    if num_max_tokens_per_rank is not None:
        num_max_tokens_per_rank = _positive("num_max_tokens_per_rank", num_max_tokens_per_rank)
    check_num_sms(num_sms)
    if not isinstance(gate, bool):
        raise ValueError(f"gate must be True or False, got {gate!r}")
    if backend not in BACKENDS:
        raise ValueError(f"backend must be one of {offered(BACKENDS)}, got {backend!r}")
    options = Options(num_max_tokens_per_rank, backend, expert_alignment, gate, num_sms)
    if _enabled is not None:
        if _enabled.options != options:
            raise ValueError(f"already enabled with {_enabled.options}, asked for {options}; call disable() first")
        return
    _check_version()
    from megatron.core.transformer.moe import moe_layer
    from megatron.core.transformer.transformer_config import TransformerConfig

    from deepep_moe.integrations.megatron.gating import serve_routers

    registry, patches = BufferRegistry(options), Patches()
    try:
        patches.set(moe_layer, "MoEFlexTokenDispatcher", _selecting_class(moe_layer.MoEFlexTokenDispatcher, registry))
        for name in ("forward", *_PARTS):
            if (stock := vars(moe_layer.MoELayer).get(name)) is not None:
                patches.set(moe_layer.MoELayer, name, _by_dispatcher(stock, "run_layer" if name == "forward" else "run_part"))
        patches.set(TransformerConfig, "__post_init__", _keeping_the_choice(TransformerConfig.__post_init__))
        if gate:
            serve_routers(patches, lambda config: config.moe_token_dispatcher_type == "flex" and is_selected(config))
        _enabled = _Enabled(options, registry, patches, _widen_choices())
    except BaseException:
        patches.restore()
        raise


def disable() -> None:
    """Undo `enable()`: put back what Megatron-Core had, but for what others have replaced since, and destroy the buffers. Without
    `enable()` nothing happens.

    Models built in between keep their dispatchers, which raise BufferDestroyedError when used: build them again after the next
    `enable()`. Call it before the process groups are destroyed.
    """
    global _enabled
    if _enabled is None:
        return
    from megatron.core.transformer.transformer_config import TransformerConfig

    _enabled.patches.restore()
    if _enabled.previous_choices is not None:
        TransformerConfig.__dataclass_fields__[_BACKEND_FIELD].type = _enabled.previous_choices
    registry, _enabled = _enabled.registry, None
    registry.destroy()
