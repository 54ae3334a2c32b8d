"""Put our dispatcher where Megatron-Core looks for its flex dispatcher, and take it out again.

Megatron-Core has no registry of dispatchers. Its MoE layer builds `moe_layer.MoEFlexTokenDispatcher` for
`moe_token_dispatcher_type="flex"`; `enable()` replaces that one symbol by a class that builds ours for the configurations that ask
for it and the previous class for all others.
"""

import functools

from deepep_moe.integrations.common.patches import Patches, Stock
from deepep_moe.integrations.common.warn_once import check_version, warn_once
from deepep_moe.integrations.megatron.buffers import LayerBuffers, serve_new_groups, serve_step_ends
from deepep_moe.integrations.megatron.config_switches import is_ours, serve_config, why_off
from deepep_moe.integrations.megatron.options import Config, Options, check_capacity_factor
from deepep_moe.nn.balance import Balance
from deepep_moe.nn.metrics import LayerReport

_OLDEST, _NEWEST = (0, 13), (0, 19)
_patches = Patches()
_buffers: LayerBuffers | None = None  # those of `enable()`, until `disable()`


def _selecting_class(previous: type, buffers: LayerBuffers) -> type:
    """Return a class that takes the place of `previous` and builds our dispatcher or a `previous`, whichever the config asks for."""
    from deepep_moe.integrations.megatron.dispatcher import NativeTokenDispatcher

    base: type[object] = previous

    def construct(cls: type[object], num_local_experts: int, local_expert_indices: list[int], config: Config, **groups: object) -> object:
        if cls is not selecting:  # a subclass that somebody else has made
            return base.__new__(cls)
        if is_ours(config):
            return NativeTokenDispatcher(num_local_experts, local_expert_indices, config, buffers=buffers, **groups)
        return previous(num_local_experts, local_expert_indices, config=config, **groups)

    # MoELayer calls this class, which has no instances of its own.
    selecting: type = type("SelectingFlexTokenDispatcher", (previous,), {"__new__": construct})
    return selecting


_PARTS = ("route", "router_and_preprocess", "shared_experts_compute", "routed_experts_compute", "experts_compute", "backward_dw")
"""Methods of MoELayer, of any version, that run between the calls of the dispatcher. A recomputation runs them, and the 1F1B schedule."""


def _serve_layers(patches: Patches, buffers: LayerBuffers) -> None:
    """Let layers have our dispatcher where the config asks for it, and run their methods through it, which sees a layer once it is
    constructed. A warning says why a layer has another dispatcher."""
    from megatron.core.transformer.moe import moe_layer
    from megatron.core.transformer.moe.moe_layer import MoELayer

    from deepep_moe.integrations.megatron.dispatcher import NativeTokenDispatcher
    from deepep_moe.integrations.megatron.gating import stage_group

    patches.set(moe_layer, "MoEFlexTokenDispatcher", _selecting_class(moe_layer.MoEFlexTokenDispatcher, buffers))

    @patches.around(MoELayer, "__init__")
    def construct(stock: Stock, layer: MoELayer, /, *args: object, **kwargs: object) -> None:
        stock(layer, *args, **kwargs)
        if isinstance(layer.token_dispatcher, NativeTokenDispatcher):
            layer.token_dispatcher.join(layer)
        elif not is_ours(layer.config):
            warn_once(f"deepep_moe is enabled, but a MoE layer does not use it: {why_off(layer.config)}", stage_group())

    def run(how: str, stock: Stock, layer: MoELayer, *args: object, **kwargs: object) -> object:
        dispatcher = layer.token_dispatcher
        if isinstance(dispatcher, NativeTokenDispatcher):
            return getattr(dispatcher, how)(stock, layer, *args, **kwargs)
        return stock(layer, *args, **kwargs)

    for name in ("forward", *_PARTS):
        if name in vars(MoELayer):
            patches.around(MoELayer, name)(functools.partial(run, "run_layer" if name == "forward" else "run_part"))


def enable(
    *,
    num_max_tokens_per_rank: int | None = None,
    backend: str = "auto",
    expert_alignment: int = 1,
    gate: bool = True,
    num_sms: int | None = None,
    experts: str = "auto",
    sync_free: bool = False,
    recv_capacity_factor: float | None = None,
    metrics: bool = False,
    ranks_per_node: int | None = None,
    max_sms: int | None = None,
    fp8: bool = False,
    sums: str = "ranks",
    balance: Balance | None = None,
) -> None:
    """Let Megatron-Core's MoE layers route and dispatch through deepep_moe. Call it before arguments are parsed and models are built.

    These configurations then use it:

    - megatron-core 0.16 and newer: `moe_flex_dispatcher_backend="deepep_moe"`, on the command line
      `--moe-flex-dispatcher-backend deepep_moe`. The field `moe_token_dispatcher_type` becomes "flex" where it has its default.
    - megatron-core 0.13 to 0.15, which have no backend flag: `moe_token_dispatcher_type="flex"` with `moe_enable_deepep` False. These
      versions refuse that pair on their own. On the command line it is `--moe-token-dispatcher-type flex` alone.

    Every other configuration behaves as before, and a warning says so. The first forward logs one line: the version, the number of MoE
    layers, the backend and whose experts they have. Layers with the same group and sizes share one buffer, constructed at the first forward
    and kept until `disable()`, `parallel_state.destroy_model_parallel()`, or until the group is destroyed.

    If a router or an expert fails on one rank, also in a recomputation, its peers get EPPeerError with that rank's error instead of
    waiting for the deadline. A config with both `moe_enable_deepep` and our backend is a ValueError, as Megatron-Core would put the
    backend back to DeepEP's.

    Args:
        num_max_tokens_per_rank: on GPUs, the most tokens that a rank ever has in a forward. That is micro batch x sequence length, divided
            by the sizes of tensor parallelism (with sequence parallelism) and context parallelism. None: the most of any rank in the first
            forward, rounded up to a multiple of 128. Larger buffers replace it when a rank has more. On CPUs there is no bound.
        backend: as for `deepep_moe.Buffer`.
        expert_alignment: zeros pad the rows of each expert to a multiple of this.

        gate: let `deepep_moe.ops.gate` choose the experts. Its one pass serves the dispatch too. Where it cannot (logits that are not
            fp32, router replay, ...) a warning says why and Megatron-Core's own routing runs, as with False. Logits that are not finite
            are a ValueError, but in fp16 they go through, and Megatron-Core skips the step. The gate does not see changes of its probs and
            routing_map behind autograd's back (`.data`, `.numpy()`).
        num_sms: on GPUs, the SMs that send, as for `deepep_moe.Buffer`. `moe_flex_dispatcher_num_sms` of a config (0.19) overrides it.

        experts: which experts layers have that dispatch through deepep_moe. With "auto", grouped experts take the place of `SequentialMLP`
            and `TEGroupedMLP` where their products are fast (bf16, Hopper or Blackwell GPUs) and they honour the config. Their products
            run at once for all experts. Checkpoints stay those of the class. Otherwise Megatron-Core's stay. The line in the log says
            which, and why. "framework": Megatron-Core's always stay. "own": grouped experts always. A config that they do not honour is
            a ValueError.

        sync_free: the host waits for nothing between router and combine, as counts of rows stay on the GPU. Rows get room for every
            routing: tokens of all ranks x min(top-k, experts of the rank), for hidden and intermediate values alike. With one rank these
            are the rows that come. Needs experts that take counts on the GPU, such as grouped ones.

        recv_capacity_factor: room for that many times an even share of all rows instead. More rows than that are EPCapacityError on all
            ranks of the expert-parallel group, at the latest from `finalize_model_grads` of Megatron-Core, which then waits for the GPU.
            Nothing is dropped. The step can be run again after `recover()` and `grow_recv_capacity()`. Where more ranks than this
            group step together and the schedule calls `finalize_model_grads`, that raises the error, on all ranks of the job.
            `moe_expert_rank_capacity_factor` of a config (0.19) stands for both arguments. Megatron-Core's PagedStashRunner then runs
            such a step again.

        metrics: gather rows of each expert, time of the exchange, calls over capacity and nodes per token for `take_metrics()`. Each model
            has its own. Only forwards that train count, and not those of an evaluation or of a reference model.
            Megatron-Core's report of MoE losses to TensorBoard and W&B (`track_moe_metrics`, from 0.18 `MoEMetricsTracker.report`) writes
            them too.
        ranks_per_node: as for `deepep_moe.Buffer`. Its ranks are those of the expert-parallel group. None: those of a host are a node.
        max_sms: as for `deepep_moe.Buffer`. Shared experts or the other micro batch run on SMs that it leaves free.

        fp8: rows travel as fp8 in both passes and the products of grouped experts take them (docs/design/fp8_training.md). Nothing is
            padded or quantized again. For bf16 models, alone or beside `--fp8-recipe blockwise`, which then is for the other
            layers. An `expert_alignment` of 1 becomes 128. What fp8 does not go with (docs/megatron.md) is a ValueError.
        sums: as for `deepep_moe.Buffer`. By lanes the experts get ones for probs, and combine applies the probs at the token's rank. The
            layer's sum then has the bits of a rollout on any number of ranks (docs/rollout.md). Not with `fp8`.
        balance: plan copies of hot experts in each forward (`deepep_moe.nn.Balance`). Layers with equal experts share their memory, which
            `suspend` and `recover` give back; a backward cannot come after it for a forward before it. Needs grouped experts without
            biases. Metrics count rows by expert, wherever they are computed.

    Raises:
        TypeError, ValueError: an argument is wrong, or deepep_moe is enabled already with other arguments.
        EPError: this Megatron-Core is not supported.
        ImportError: Megatron-Core is not installed.
    """
    global _buffers
    options = Options(**locals())
    if _buffers is not None:
        if _buffers.options != options:
            raise ValueError(f"deepep_moe is already enabled with {_buffers.options}, and not with {options}; call disable() first")
        return
    import megatron.core

    check_version("megatron-core", megatron.core.__version__, _OLDEST, _NEWEST)
    from deepep_moe.integrations.megatron.flat_states import serve_optimizers
    from deepep_moe.integrations.megatron.gating import serve_routers
    from deepep_moe.integrations.megatron.grouped_experts import serve_experts, serve_first_microbatches
    from deepep_moe.integrations.megatron.metrics import serve_reports
    from deepep_moe.integrations.megatron.overlap_schedule import serve_schedule
    from deepep_moe.integrations.megatron.recompute import serve_recompute

    buffers = LayerBuffers(options)
    try:
        _serve_layers(_patches, buffers)
        serve_config(_patches, options)
        serve_new_groups(_patches, buffers)
        serve_step_ends(_patches, buffers)
        serve_schedule(_patches)
        serve_recompute(_patches)
        if gate:
            serve_routers(_patches)
        if buffers.metrics is not None:
            serve_reports(_patches, buffers.metrics)
        if experts != "framework":
            serve_experts(_patches, options)
            serve_optimizers(_patches)
        if fp8:
            serve_first_microbatches(_patches)
    except BaseException:
        _patches.restore()
        raise
    _buffers = buffers


def grow_recv_capacity(times: float = 2.0) -> None:
    """Let all layers have room for that many times more rows, never more than for every routing. All ranks must call it alike.

    Raises:
        TypeError, ValueError: `times` is no number above 0.
    """
    check_capacity_factor("times", times)
    if _buffers is not None:
        _buffers.grow_capacity(times)


def take_metrics() -> list[LayerReport]:
    """Return what all MoE layers have done in training since it was asked last, over all ranks. Collective over all ranks of the job.

    `LayerReport.model` tells models apart, by the order in which they first train.

    Raises:
        ValueError: `enable(metrics=True)` was not called.
    """
    if _buffers is None or _buffers.metrics is None:
        raise ValueError("no metrics are gathered; call enable(metrics=True) before the model is built")
    return _buffers.metrics.take()


def disable() -> None:
    """Undo `enable()` and destroy the buffers. Does nothing without `enable()`.

    Megatron-Core gets its own symbols back, except those that others have replaced since. Models that were built in between keep their
    dispatchers, which raise BufferDestroyedError when used: build the models again after the next `enable()`. Call this before the process
    groups are destroyed.
    """
    global _buffers
    _patches.restore()
    if _buffers is not None:
        buffers, _buffers = _buffers, None
        buffers.close()
