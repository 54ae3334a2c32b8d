"""All options of a layer together, on CPUs and on GPUs. On GPUs also without a wait of the host, and from a CUDA graph."""

import contextlib
from typing import Any

import pytest
import torch
from left_graphs import assert_leaves_no_graph
from megatron_cases import (
    BF16,
    ON_GPUS,
    RECOMPUTED,
    SYNC_FREE,
    assert_bits,
    assert_same,
    build_layer,
    draw,
    forward_backward,
    gradients,
    layer_config,
    layer_of,
    model_parallel,
    on_megatron,
)
from megatron_training import gpt
from on_ranks import on_ranks
from test_megatron_overlap import batches, interleaved, needs_schedule, one_after_another, schedule_config

from benchmarks.layers.megatron_steps import by_expert
from deepep_moe.integrations.megatron import take_metrics
from deepep_moe.integrations.megatron.config_switches import selection
from deepep_moe.nn import Balance
from deepep_moe.testing.launch import run_ranks

pytest.importorskip("megatron.core")

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
QUIET = BF16 | {"moe_router_load_balancing_type": "none", "moe_aux_loss_coeff": 0.0}
WAITS = {"cudaStreamSynchronize", "cudaEventSynchronize", "cudaDeviceSynchronize"}


def inputs(device: str, rank: int) -> list[torch.Tensor]:
    return [tensor.to(device, torch.bfloat16) for tensor in draw(rank, 24)]


def _together(rank: int, num_ranks: int, device: str, options: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    with model_parallel(device, ep=num_ranks, **options) as sizes:
        layer = layer_of(sizes, **QUIET, **changes)
        results = by_expert(forward_backward(layer, *inputs(device, rank)))
    return {name: value.float().cpu().numpy() for name, value in results.items()}


@pytest.mark.parametrize("device", DEVICES)
def test_all_options_together(device):
    """With the exact choice of a plain layer, bf16 sums agree within their roundings."""
    options, changes = SYNC_FREE | {"metrics": True}, {"moe_shared_expert_overlap": True, **RECOMPUTED}
    runs = [run_ranks(_together, 1, device, *how)[0] for how in ((options, changes), ({"experts": "framework"}, {}))]
    every, plain = ({name: torch.from_numpy(value) for name, value in run.items()} for run in runs)
    assert_same(every, plain, "all options", tolerance=2e-2)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("options", ({}, SYNC_FREE, SYNC_FREE | {"recv_capacity_factor": 1.5}), ids=("plain", "sync_free", "bounded"))
@on_ranks(1)
def test_a_step_leaves_no_graph(rank: int, num_ranks: int, device: str, options: dict[str, Any]) -> None:
    with model_parallel(device, ep=num_ranks, **options) as sizes:
        layer = layer_of(sizes, **QUIET)
        x, cotangent = inputs(device, rank)
        assert_leaves_no_graph(lambda: layer(x)[0].backward(cotangent))


@needs_schedule
@pytest.mark.parametrize("device", DEVICES)
@on_ranks(1)
def test_schedule_with_grouped_experts(rank: int, num_ranks: int, device: str) -> None:
    with model_parallel(device, ep=num_ranks, **SYNC_FREE) as sizes:
        data = [{name: None if value is None else value.to(device) for name, value in batch.items()} for batch in batches()]
        passes = [run(gpt(schedule_config(sizes)).to(device), data) for run in (interleaved, one_after_another)]
        assert_same(*passes, f"rank {rank}")


# ---- GPUs only ----


@pytest.mark.gpu
@on_megatron(1, "cuda", **SYNC_FREE)
def test_the_host_waits_for_nothing(rank: int, num_ranks: int, sizes: dict[str, int]) -> None:
    layer = layer_of(sizes, **QUIET, moe_shared_expert_overlap=True)
    x, cotangent = inputs("cuda", rank)
    x.requires_grad_()
    for _ in range(3):
        layer(x)[0].backward(cotangent)
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile, torch.profiler.record_function("the layer"):
        layer(x)[0].backward(cotangent)
    (whole,) = [event for event in profile.events() if event.name == "the layer" and event.device_type == torch.autograd.DeviceType.CPU]
    inside = [event.name for event in profile.events() if whole.time_range.start <= event.time_range.start < whole.time_range.end]
    assert any(name.startswith("cudaLaunchKernel") for name in inside), "the profiler saw no launch"
    assert not WAITS.intersection(inside), sorted(WAITS.intersection(inside))


@pytest.mark.gpu
@on_megatron(1, "cuda", **SYNC_FREE)
def test_layer_in_a_cuda_graph(rank: int, num_ranks: int, sizes: dict[str, int]) -> None:
    """Router, dispatch, experts, shared expert and combine, forward and backward, in one graph; replays repeat the eager bits."""
    layer = layer_of(sizes, **QUIET, moe_router_enable_expert_bias=False)
    x, cotangent = inputs("cuda", rank)
    fresh = inputs("cuda", rank + 1)[0]
    want = [forward_backward(layer, values, cotangent) for values in (x, fresh)]
    static = x.clone().requires_grad_()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            layer(static)[0].backward(cotangent)
            layer.zero_grad()
            static.grad = None
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = layer(static)[0]
        output.backward(cotangent)
    for values, expected in zip((x, fresh), want, strict=True):
        with torch.no_grad():
            static.copy_(values)
            for tensor in (output, static.grad, *(p.grad for p in layer.parameters() if p.grad is not None)):
                tensor.zero_()
        graph.replay()
        torch.cuda.synchronize()
        assert_bits({"output": output, "input gradient": static.grad} | gradients(layer), expected, "replay")
    layer.token_dispatcher.buffer.check()


def _step(model: torch.nn.Module, data_iterator: list[Any], **_: Any) -> dict[str, torch.Tensor]:
    """Output and gradients of a micro batch, as a forward_backward_func of Megatron-Core is called."""
    data = next(data_iterator[0])
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.zero_()
    output, _ = model(data["x"])
    output.backward(data["cotangent"])
    grads = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    return grads | {"output": output.detach()}


@ON_GPUS
@on_ranks(options=({}, {"balance": Balance(2, cost=1), "recv_capacity_factor": 1.5}))
def test_full_iteration_graph(rank: int, num_ranks: int, options: dict[str, Any]) -> None:
    """Megatron-Core's graph of a whole step: replays equal eager steps to the bit. Plans of copies follow each step's tokens."""
    full_cuda_graph = pytest.importorskip("megatron.core.full_cuda_graph")
    from megatron.core.tensor_parallel.random import initialize_rng_tracker

    initialize_rng_tracker(use_cudagraphable_rng=True)
    with contextlib.ExitStack() as undo:
        sizes = undo.enter_context(model_parallel("cuda", ep=num_ranks, backend="nvlink", **SYNC_FREE, **options))
        switches = {"bf16": True, "params_dtype": torch.bfloat16, "cuda_graph_impl": "local", "cuda_graph_scope": "full_iteration"}
        switches |= {"add_bias_linear": False}
        try:
            config = layer_config(**sizes, **selection(), **switches)
        except (TypeError, AssertionError, ValueError):  # 0.19: a name of its own
            config = layer_config(**sizes, **selection(), **switches | {"cuda_graph_impl": "full_iteration", "cuda_graph_scope": None})
        undo.enter_context(torch.cuda.stream(torch.cuda.Stream()))  # autograd's nodes that stay must not belong to the legacy stream
        layer = build_layer(config).cuda()
        wrapper = full_cuda_graph.FullCudaGraphWrapper(_step, cuda_graph_warmup_steps=2)
        for seed in range(6):
            data = dict(zip(("x", "cotangent"), [tensor.bfloat16().cuda() for tensor in draw(10 * seed + rank, 12)], strict=True))
            got = wrapper(model=layer, data_iterator=iter([data]), num_microbatches=1, seq_length=12, forward_only=False)
            got = {name: value.clone() for name, value in got.items()}
            assert_bits(got, _step(layer, [iter([data])]), f"rank {rank}, step {seed}")
        assert full_cuda_graph.FullCudaGraphWrapper.cuda_graph["training"] is not None, "steps were replayed"


@pytest.mark.gpu
@pytest.mark.parametrize("changes", ({}, RECOMPUTED))
@on_megatron(1, "cuda", metrics=True)
def test_experts_run_again_where_more_rows_come_than_were_guessed(
    rank: int, num_ranks: int, sizes: dict[str, int], changes: dict[str, Any]
) -> None:
    """A layer guesses from the third forward on; the fourth has twice as many rows. The bits are those of a layer that never guesses."""
    layer, plain = (layer_of(sizes, **QUIET, **changes) for _ in range(2))
    plain.token_dispatcher._guesses_rows = False
    for seed, num_tokens in enumerate((24, 24, 24, 48, 24)):
        x, cotangent = (tensor.to("cuda", torch.bfloat16) for tensor in draw(seed, num_tokens))
        actual, expected = (forward_backward(each, x, cotangent) for each in (layer, plain))
        assert_same(actual, expected, f"forward {seed}", tolerance=0.0)
    assert sum(report.num_repeats for report in take_metrics()) == 1
