"""Megatron-Core's CUDA graphs of parts of a layer: what is refused, and what runs between them. Captures themselves need a GPU."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron_cases import HIDDEN, SYNC_FREE, build_layer, draw, enabled, forward_backward, layer_config, layer_of, model_parallel
from on_ranks import on_ranks

from deepep_moe.integrations.megatron.config_switches import selection
from deepep_moe.integrations.megatron.cuda_graphs import check_graphs, graphed_parts, holds_calls
from deepep_moe.integrations.megatron.options import Options

pytest.importorskip("megatron.core")


def needs_parts() -> None:
    if not hasattr(layer_config(), "cuda_graph_impl"):
        pytest.skip("megatron-core before 0.16 captures no parts of a layer")


# ---- what is refused ----


@pytest.mark.parametrize(
    ("fields", "holds"),
    [
        ({}, False),
        ({"cuda_graph_impl": "none", "cuda_graph_scope": "full"}, False),
        ({"cuda_graph_impl": "local", "cuda_graph_scope": []}, True),
        ({"cuda_graph_impl": "local", "cuda_graph_scope": "full"}, True),
        ({"cuda_graph_impl": "transformer_engine", "cuda_graph_scope": "attn,moe"}, True),
        ({"cuda_graph_impl": "local", "cuda_graph_scope": ["full_iteration"]}, True),
        ({"cuda_graph_impl": "full_iteration", "cuda_graph_modules": []}, True),  # 0.19
        ({"cuda_graph_impl": "transformer_engine", "cuda_graph_modules": [SimpleNamespace(name="moe")]}, True),
        ({"cuda_graph_impl": "transformer_engine", "cuda_graph_modules": [SimpleNamespace(name="moe_router")]}, False),
        ({"cuda_graph_impl": "local", "cuda_graph_scope": ["attn", "moe_router", "moe_preprocess"]}, False),
        ({"cuda_graph_impl": "local", "cuda_graph_scope": ["full_iteration_inference"]}, False),
        ({"enable_cuda_graph": True, "cuda_graph_scope": "full"}, True),  # 0.13 to 0.15
        ({"external_cuda_graph": True, "cuda_graph_scope": "attn"}, False),
    ],
)
def test_which_graphs_hold_calls(fields, holds):
    assert holds_calls(SimpleNamespace(**fields)) == holds


@pytest.mark.parametrize(
    ("options", "others", "is_sync_free", "message"),
    [
        ({}, {}, False, r"the parts \['full'\].*whose host waits for counts of rows; call enable\(sync_free=True\)"),
        ({"backend": "collective"}, {}, True, "the backend 'collective' counts rows on the host; leave backend out"),
        ({"num_sms": 0}, {}, True, "with num_sms=0 copy engines send.*give num_sms of 1 or more"),
        ({"num_sms": 8}, {"moe_flex_dispatcher_num_sms": 0}, True, "with num_sms=0 copy engines send"),
        ({}, {"overlap_moe_expert_parallel_comm": True}, True, "overlap_moe_expert_parallel_comm runs a layer in parts"),
    ],
)
def test_calls_that_cannot_be_captured(options, others, is_sync_free, message):
    config = SimpleNamespace(cuda_graph_impl="local", cuda_graph_scope=[], **others)
    with pytest.raises(ValueError, match=message):
        check_graphs(config, Options(**options), is_sync_free)
    config.cuda_graph_scope = ["moe_router", "moe_preprocess"]
    check_graphs(config, Options(**options), is_sync_free)


@on_ranks(1)
def test_layers_are_refused_when_they_are_built(rank: int, num_ranks: int) -> None:
    needs_parts()
    with model_parallel(ep=1, experts="own") as sizes:
        for scope in ("full", "full_iteration"):
            config = layer_config(**sizes, **selection(), cuda_graph_impl="local", cuda_graph_scope=scope)
            with pytest.raises(ValueError, match=r"cuda_graph_impl is '.*so a CUDA graph would hold the dispatch"):
                build_layer(config)
        layer_of(sizes, cuda_graph_impl="local", cuda_graph_scope="attn,moe_router")


def test_the_part_moe():
    """Megatron-Core allows it with padding to a capacity. A dispatch whose host waits for nothing can be captured without."""
    needs_parts()
    options = {"cuda_graph_impl": "transformer_engine", "cuda_graph_scope": "attn,moe"}
    with enabled(experts="own"), pytest.raises(AssertionError, match="drop-padding"):
        layer_config(**selection(), **options)
    with enabled(**SYNC_FREE):
        assert graphed_parts(layer_config(**selection(), **options)) == ("transformer_engine", {"attn", "moe"})
        alone = layer_config(**selection(), **options | {"cuda_graph_scope": ["moe"]})
        assert graphed_parts(alone)[1] == {"moe"}
        for field in ("cuda_graph_modules", "cuda_graph_scope"):
            assert all(not isinstance(part, str) for part in getattr(alone, field, None) or []), "as Megatron-Core leaves them"
        with pytest.raises(AssertionError, match="must not contain both moe and moe_router"):
            layer_config(**selection(), **options | {"cuda_graph_scope": "moe,moe_router"})
        with pytest.raises(AssertionError, match="drop-padding"):
            layer_config(moe_token_dispatcher_type="alltoall", **options)


@on_ranks(1)
def test_a_first_forward_in_a_capture(rank: int, num_ranks: int) -> None:
    with model_parallel(ep=1, **SYNC_FREE) as sizes, pytest.MonkeyPatch.context() as monkeypatch:
        layer = layer_of(sizes)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        with pytest.raises(ValueError, match="the first forward of a MoE layer is captured.*cuda_graph_warmup_steps of 1 or more"):
            layer(torch.randn(3, 1, HIDDEN))


# ---- replays ----


@on_ranks(1)
def test_a_step_ends_with_a_look_at_what_gpus_report(rank: int, num_ranks: int) -> None:
    """Before gradients are summed, where rows may not fit, and where a graph holds the dispatch, also with room for every routing."""
    from megatron.core import distributed

    graphs = [(None, {"cuda_graph_impl": "local", "cuda_graph_scope": "full"}, True)] * hasattr(layer_config(), "cuda_graph_impl")
    for factor, changes, is_asked in ((None, {}, False), (1.0, {}, True), *graphs):
        with model_parallel(ep=1, **SYNC_FREE, recv_capacity_factor=factor) as sizes:
            layer = layer_of(sizes, **changes)
            layer(torch.randn(3, 1, HIDDEN))
            asked: list[bool] = []
            layer.token_dispatcher.buffer.check = lambda: asked.append(True)  # noqa: B023
            with pytest.raises(IndexError):  # of no model, after the look
                distributed.finalize_model_grads([])
            assert asked == [True] * is_asked


# ---- layers whose router is a graph ----


def _plain(layer: Any) -> list[list[torch.Tensor]]:
    passes = [forward_backward(layer, *draw(seed, 6, 2)) for seed in range(2)]
    return [[one["output"], one["input gradient"]] for one in passes]


def _local(layer: Any) -> list[list[torch.Tensor]]:
    """Two micro batches as MoETransformerLayer runs them: the tensors of its graphs are the same for both, whose backwards come later."""
    runs, kept = [], {}
    for seed in range(2):
        x, cotangent = draw(seed, 6, 2)
        x.requires_grad_()
        layer.fwd_execution_map = "route"
        hidden, probs, shared = layer(x, intermediate_tensors=())
        for name in layer.token_dispatcher.cudagraph_attrs:
            chosen = getattr(layer.token_dispatcher, name).detach()
            kept[name] = kept[name].copy_(chosen) if name in kept else chosen
            setattr(layer.token_dispatcher, name, kept[name])
        layer.fwd_execution_map = "expert_compute"
        rows, _ = layer(None, intermediate_tensors=(hidden, probs))
        layer.fwd_execution_map = "postprocess"
        runs.append((x, layer(None, intermediate_tensors=(rows, shared)), cotangent))
    for _, output, cotangent in runs:
        output.backward(cotangent)
    return [[output.detach(), x.grad] for x, output, _ in runs]


def _te(layer: Any, monkeypatch: pytest.MonkeyPatch, with_preprocess: bool) -> list[list[torch.Tensor]]:
    """A capture ends after the router or the preprocessing, and the rest of the layer goes on with what its replay leaves."""
    from megatron.core.transformer.moe import moe_utils

    results = []
    for seed in range(2):
        x, cotangent = draw(seed, 6, 2)
        x.requires_grad_()
        with monkeypatch.context() as capturing:
            capturing.setattr(moe_utils, "is_graph_capturing", lambda: True)
            left = list(layer(x))
        shared = None if layer.shared_expert_overlap else left.pop()
        inputs = dict(zip(("hidden_states", "probs"), left, strict=False))
        if with_preprocess:
            layer.token_dispatcher.topk_idx = left[2].clone()
        else:
            inputs["routing_map"] = left[2].detach()  # a replay returns new tensors
        layer.cudagraph_tensor_store.set(shared_expert_output=shared, **inputs)
        output = layer(inputs["hidden_states"])[0]
        layer.cudagraph_tensor_store.clear()
        output.backward(cotangent)
        results.append([output.detach().view_as(x), x.grad])
    return results


@pytest.mark.parametrize("overlap", [False, True], ids=["", "shared experts beside the calls"])
@on_ranks(2)
def test_layers_with_a_graph_of_the_router(rank: int, num_ranks: int, overlap: bool) -> None:
    needs_parts()
    with model_parallel(ep=num_ranks, experts="own") as sizes, pytest.MonkeyPatch.context() as monkeypatch:
        changes = {"moe_shared_expert_overlap": overlap}
        want = _plain(layer_of(sizes, **changes))
        local = layer_config(**sizes, **selection(), **changes, cuda_graph_impl="local", cuda_graph_scope="moe_router")
        results = {"local": _local(build_layer(local))}
        for scope in ("moe_router", "moe_router,moe_preprocess"):
            config = layer_config(**sizes, **selection(), **changes, cuda_graph_impl="transformer_engine", cuda_graph_scope=scope)
            results[scope] = _te(build_layer(config), monkeypatch, "moe_preprocess" in scope)
        for name, result in results.items():
            for seed, (ours, theirs) in enumerate(zip(result, want, strict=True)):
                # A graph without the preprocessing leaves the dense map only, so experts come in another order and sums round differently.
                assert name == "moe_router" or torch.equal(ours[0], theirs[0]), f"{name}, micro batch {seed}"
                torch.testing.assert_close(ours, theirs, rtol=2e-6, atol=2e-6)
