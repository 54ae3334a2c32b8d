"""Recomputed layers go along the handles of their first run: same results, no second exchange of counts, nothing kept afterwards."""

import gc
import weakref
from typing import Any

import pytest
import torch
from megatron_cases import RECOMPUTED, assert_same, draw, forward_backward, layer_of, model_parallel, on_megatron
from megatron_training import gpt
from on_ranks import on_ranks
from test_megatron_overlap import batches, one_after_another, schedule_config

from deepep_moe.integrations.megatron import recompute

pytest.importorskip("megatron.core")


def layers_of(sizes: dict[str, int], **changes: Any) -> tuple[Any, Any]:
    """A recomputed layer and a plain one with the same weights."""
    return layer_of(sizes, **(RECOMPUTED | changes)), layer_of(sizes, **changes)


def watch(buffer: Any) -> list[Any]:
    """Collect the handles of the buffer's dispatches from now on, None for dispatches with none."""
    handles: list[Any] = []
    stock = buffer.dispatch

    def dispatch(*args: Any, handle: Any = None, **kwargs: Any) -> Any:
        handles.append(handle)
        return stock(*args, handle=handle, **kwargs)

    buffer.dispatch = dispatch
    return handles


CASES: list[tuple[str, dict, dict]] = [
    ("EP 2", {"ep": 2}, {}),
    ("EP 2, collective", {"ep": 2, "backend": "collective"}, {}),
    ("TP 2, EP 1, ETP 2", {"tp": 2, "ep": 1, "etp": 2}, {}),
    ("Megatron-Core's routing", {"ep": 2, "gate": False}, {}),
    ("padded rows, sync-free", {"ep": 2, "experts": "own", "sync_free": True, "expert_alignment": 16}, {}),
    ("shared experts beside the calls", {"ep": 2}, {"moe_shared_expert_overlap": True}),
]


@on_ranks(2)
def test_recomputed_layers_repeat_their_handles(rank: int, num_ranks: int) -> None:
    for name, groups, changes in CASES:
        with model_parallel(**groups) as sizes:
            recomputed, plain = layers_of(sizes, **changes)
            plain(draw(rank, 12)[0])  # which makes the buffer
            handles = watch(plain.token_dispatcher.buffer)
            passes = [forward_backward(recomputed, *draw(rank, 12))]
            assert [handle is None for handle in handles] == [True, False], name
            passes.append(forward_backward(plain, *draw(rank, 12)))
            assert_same(*passes, f"{name}, rank {rank}")


@on_megatron(2)
def test_recomputed_transformer_layers(rank: int, num_ranks: int, sizes: dict[str, int]) -> None:
    """Whole transformer layers, two of them in one checkpoint: their dispatches come again in order."""
    whole = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 2}
    recomputed, plain = (gpt(schedule_config(sizes, **changes)) for changes in (whole, {}))
    want = one_after_another(plain, batches())
    handles = watch(plain.decoder.layers[0].mlp.token_dispatcher.buffer)
    got = one_after_another(recomputed, batches())
    assert [handle is None for handle in handles] == [True, True, False, False] * len(batches())
    assert_same(got, want, f"rank {rank}")


@on_megatron(2)
def test_any_order_of_backward(rank: int, num_ranks: int, sizes: dict[str, int]) -> None:
    """Two batches, the backward of which runs in the order of autograd's choice, and twice."""
    results = []
    for layer in layers_of(sizes):
        x, y = (draw(10 * seed + rank, 12)[0].requires_grad_() for seed in (1, 2))
        cotangents = [draw(10 * seed + rank, 12)[1] for seed in (1, 2)]
        outputs = [layer(x)[0], layer(y)[0]]
        for _ in range(2):
            torch.autograd.backward(outputs[::-1], cotangents[::-1], retain_graph=True)
        results.append({"x": x.grad, "y": y.grad, "weights": layer.router.weight.grad})
    assert_same(*results, f"rank {rank}")


@on_megatron(2)
def test_a_second_run_goes_where_the_first_went(rank: int, num_ranks: int, sizes: dict[str, int]) -> None:
    recomputed, plain = layers_of(sizes, moe_router_load_balancing_type="none", moe_aux_loss_coeff=0.0)
    plain(draw(rank, 12)[0])
    handles = watch(plain.token_dispatcher.buffer)
    counts: list[list[int]] = []
    recomputed.experts.register_forward_pre_hook(lambda module, arguments: counts.append(arguments[1].tolist()))
    x = draw(rank, 12)[0].requires_grad_()
    output, _ = recomputed(x)
    recomputed.router.expert_bias.copy_(torch.linspace(-9, 9, len(recomputed.router.expert_bias)))
    output.backward(draw(rank, 12)[1])
    assert counts[0] == counts[1] and handles[1] is not None
    assert torch.isfinite(x.grad).all() and x.grad.any()


@on_megatron(2)
def test_handles_go_with_the_backward(rank: int, num_ranks: int, sizes: dict[str, int]) -> None:
    layer, _ = layers_of(sizes)
    layer(draw(rank, 12)[0])
    handles: list[Any] = []
    stock = layer.token_dispatcher.buffer.dispatch

    def dispatch(*args: Any, **kwargs: Any) -> Any:
        out = stock(*args, **kwargs)
        handles.append(weakref.ref(out.handle))
        return out

    layer.token_dispatcher.buffer.dispatch = dispatch
    output, _ = layer(draw(rank, 12)[0].requires_grad_())
    assert handles[0]() is not None
    output.backward(draw(rank, 12)[1])
    del output
    gc.collect()
    assert [reference() for reference in handles] == [None, None]
    with torch.no_grad():
        layer(draw(rank, 12)[0])
    gc.collect()
    assert handles[-1]() is None and recompute._runs.stack == []
