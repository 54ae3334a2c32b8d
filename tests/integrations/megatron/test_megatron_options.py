"""All options of a layer together, on CPUs and on GPUs; there also without a wait of the host, and from a CUDA graph."""

from typing import Any

import pytest
import torch
from left_graphs import assert_leaves_no_graph
from megatron_cases import HIDDEN, assert_same, build_layer, forward_backward, layer_config, model_parallel
from on_ranks import on_ranks
from test_megatron_overlap import NO_DROPOUT, batches, build_model, interleaved, needs_schedule, one_after_another

from benchmarks.layers.megatron_steps import by_expert
from deepep_moe.integrations.megatron.plugin import selection
from deepep_moe.testing.launch import run_ranks

pytest.importorskip("megatron.core")

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
SYNC_FREE = {"grouped_experts": True, "sync_free": True}
BF16 = {"bf16": True, "params_dtype": torch.bfloat16, "moe_router_dtype": "fp32"}
QUIET = {"moe_router_load_balancing_type": "none", "moe_aux_loss_coeff": 0.0}
RECOMPUTED = {"recompute_granularity": "selective", "recompute_modules": ["moe"]}
WAITS = {"cudaStreamSynchronize", "cudaEventSynchronize", "cudaDeviceSynchronize"}


def inputs(device: str, rank: int, num_tokens: int = 24) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(num_tokens, 1, HIDDEN, generator=generator).to(device, torch.bfloat16) for _ in range(2)]


def layer_of(sizes: dict[str, int], **changes: Any) -> Any:
    return build_layer(layer_config(**sizes, **BF16, **QUIET, **selection(), **changes))


def _together(rank: int, num_ranks: int, device: str, options: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    with model_parallel(device, ep=num_ranks, **options) as sizes:
        layer = layer_of(sizes, **changes)
        results = by_expert(forward_backward(layer, *inputs(device, rank)))
    return {name: value.float().cpu().numpy() for name, value in results.items()}


@pytest.mark.parametrize("device", DEVICES)
def test_all_options_together(device):
    """With the exact choice of a plain layer, bf16 sums agree within their roundings."""
    options, changes = SYNC_FREE | {"metrics": True}, {"moe_shared_expert_overlap": True, **RECOMPUTED}
    runs = [run_ranks(_together, 1, device, *how)[0] for how in ((options, changes), ({}, {}))]
    every, plain = ({name: torch.from_numpy(value) for name, value in run.items()} for run in runs)
    assert_same(every, plain, "all options", tolerance=2e-2)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("options", ({}, SYNC_FREE, SYNC_FREE | {"recv_capacity_factor": 1.5}), ids=("plain", "sync_free", "bounded"))
@on_ranks(1)
def test_a_step_leaves_no_graph(rank: int, num_ranks: int, device: str, options: dict[str, Any]) -> None:
    with model_parallel(device, ep=num_ranks, **options) as sizes:
        layer = layer_of(sizes)
        x, cotangent = inputs(device, rank)
        assert_leaves_no_graph(lambda: layer(x)[0].backward(cotangent))


@needs_schedule
@pytest.mark.parametrize("device", DEVICES)
@on_ranks(1)
def test_schedule_with_grouped_experts(rank: int, num_ranks: int, device: str) -> None:
    with model_parallel(device, ep=num_ranks, **SYNC_FREE) as sizes:
        config = layer_config(**sizes, num_layers=2, **NO_DROPOUT, **selection())
        data = [{name: None if value is None else value.to(device) for name, value in batch.items()} for batch in batches(rank)]
        assert_same(
            interleaved(build_model(config).to(device), data), one_after_another(build_model(config).to(device), data), f"rank {rank}"
        )


# ---- GPUs only ----


@pytest.mark.gpu
@on_ranks(1)
def test_the_host_waits_for_nothing(rank: int, num_ranks: int) -> None:
    with model_parallel("cuda", ep=num_ranks, **SYNC_FREE) as sizes:
        layer = layer_of(sizes, moe_shared_expert_overlap=True)
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
@on_ranks(1)
def test_layer_in_a_cuda_graph(rank: int, num_ranks: int) -> None:
    """Router, dispatch, experts, shared expert and combine, forward and backward, in one graph; replays repeat the eager bits."""
    with model_parallel("cuda", ep=num_ranks, **SYNC_FREE) as sizes:
        layer = layer_of(sizes, moe_router_enable_expert_bias=False)
        x, cotangent = inputs("cuda", rank)
        fresh = inputs("cuda", rank + 1)[0]
        want = [forward_backward(layer, values, cotangent) for values in (x, fresh)]
        static = x.clone().requires_grad_()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                layer.zero_grad()
                static.grad = None
                layer(static)[0].backward(cotangent)
        torch.cuda.current_stream().wait_stream(stream)
        layer.zero_grad()
        static.grad = None
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
            got = {"output": output, "input gradient": static.grad} | {name: p.grad for name, p in layer.named_parameters()}
            for name, value in expected.items():
                assert torch.equal(torch.zeros_like(value) if got[name] is None else got[name], value), name
        layer.token_dispatcher.buffer.check()
