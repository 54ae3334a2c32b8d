"""`enable(fp8=True)`: a layer against the one in bf16, its other modes against itself, training steps, and what it refuses."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron_cases import BF16, RECOMPUTED, assert_bits, draw, forward_backward, layer_of, model_parallel, on_megatron
from megatron_training import Setting, batch_of, train, training
from on_ranks import on_ranks

from deepep_moe import Buffer
from deepep_moe.errors import BackendUnavailableError, EPPeerError
from deepep_moe.ops import QuantizedRows, fp8_products

pytest.importorskip("megatron.core")

HIDDEN, WIDTH = 128, 128
FP8 = {"experts": "own", "fp8": True}
SIZES = {"hidden_size": HIDDEN, "moe_ffn_hidden_size": WIDTH}
SIZES["moe_shared_expert_intermediate_size"] = None  # which Megatron-Core does not build beside fp8 without TransformerEngine
RECIPE = {"fp8": "e4m3", "fp8_recipe": "blockwise"}
CASES: dict[str, dict] = {
    "recipe": RECIPE,
    "padding of the recipe": {**RECIPE, "moe_router_padding_for_quantization": True},
    "recomputed layer": RECOMPUTED,
    "recomputed activation": {"recompute_granularity": "selective", "recompute_modules": ["moe_act"], "moe_grouped_gemm": True},
}


def inputs(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    x, grad = draw(rank, 24 + rank, 2, hidden=HIDDEN)
    return x.bfloat16(), grad.bfloat16() * 1e-6


def fp8_layer(sizes: dict, changes: dict | None = None) -> Any:
    """Fields of fp8 are set late: without TransformerEngine Megatron-Core builds no such config."""
    changes = changes or {}
    late = {name: value for name, value in changes.items() if "fp8" in name or "quantization" in name}
    return layer_of(sizes, late=late, **(BF16 | SIZES | {name: value for name, value in changes.items() if name not in late}))


def result(sizes: dict, rank: int, changes: dict) -> dict[str, torch.Tensor]:
    return forward_backward(fp8_layer(sizes, changes), *inputs(rank))


@pytest.mark.parametrize("num_ranks", (1, 2))
@on_ranks(timeout_s=300)
def test_layer(rank: int, num_ranks: int) -> None:
    from megatron.core.transformer.transformer_config import TransformerConfig

    fields = set(TransformerConfig.__dataclass_fields__)
    with model_parallel(ep=num_ranks, experts="own") as sizes:
        exact = result(sizes, rank, {})
    with model_parallel(ep=num_ranks, **FP8) as sizes:
        ours = result(sizes, rank, {})
        for name, changes in CASES.items():
            if set(changes) <= fields:
                assert_bits(result(sizes, rank, changes), ours, name)
        shared = result(sizes, rank, {"moe_shared_expert_intermediate_size": 40})
        assert any("shared" in key and value.any() for key, value in shared.items())
        experts = [key for key in ours if ".linear_fc" in key]
        assert_bits({key: shared[key] for key in experts}, {key: ours[key] for key in experts}, "beside shared experts")
    for options in ({"sync_free": True}, {"sync_free": True, "recv_capacity_factor": 3.7, "expert_alignment": 256}):
        with model_parallel(ep=num_ranks, **FP8, **options) as sizes:
            assert_bits(result(sizes, rank, {}), ours, str(options))
    for name, want in exact.items():
        error = float((ours[name].float() - want.float()).norm() / want.float().norm())
        assert error < 0.12, f"{name}: {error}"
        assert error > 0.005 or "experts.linear" not in name, f"{name}: {error}"


@on_megatron(2, **FP8)
def test_experts_get_fp8_rows(rank: int, num_ranks: int, sizes: dict[str, int]) -> None:
    """Nothing between dispatch and products makes other rows of them."""
    layer = fp8_layer(sizes, RECIPE)
    seen: list[Any] = []
    layer.experts.register_forward_pre_hook(lambda _, arguments: seen.extend(arguments[:2]))

    def watch(_: Any, __: Any, outputs: Any) -> None:
        outputs[0].register_hook(lambda grad: seen.append(type(grad)))

    layer.experts.register_forward_hook(watch)
    x, grad = inputs(rank)
    layer(x.requires_grad_())[0].backward(grad)
    rows, counts, of_gradient = seen
    assert type(rows) is of_gradient is QuantizedRows
    assert not any(count % 128 for count in counts.tolist())


@on_ranks(2)
def test_checkpoint(rank: int, num_ranks: int) -> None:
    """A state dict of a layer in bf16 is one of a layer in fp8, and steps of an optimizer between two forwards count."""
    with model_parallel(ep=num_ranks, experts="own") as sizes:
        state = fp8_layer(sizes).state_dict()
    with model_parallel(ep=num_ranks, **FP8) as sizes:
        layers = [fp8_layer(sizes) for _ in range(2)]
        with torch.no_grad():
            for parameter in layers[1].experts.parameters():
                parameter.zero_()
        assert layers[1].state_dict().keys() == state.keys()
        layers[1].load_state_dict(state)
        x, grad = inputs(rank)
        for _ in range(2):
            results = [forward_backward(layer, x, grad * 1e6) for layer in layers]
            assert_bits(*results, "after loading")
            for layer in layers:
                torch.optim.SGD(layer.parameters(), lr=0.5).step()
        assert not torch.equal(forward_backward(layers[0], x, grad)["output"], results[0]["output"])


# ---- micro-batches of a step ----


def counting(calls: list[int]) -> None:
    from deepep_moe.ops import fp8_kept, fp8_mlp

    for place in (fp8_kept, fp8_mlp):
        stock = place.quantize_fp8_weights_both
        place.quantize_fp8_weights_both = lambda w, stock=stock: calls.append(1) or stock(w)


@on_ranks(2, timeout_s=300)
def test_micro_batches(rank: int, num_ranks: int) -> None:
    """All forwards of a step use the copies of the first, by Megatron-Core's signal, with the same results."""
    from megatron.core.transformer.module import MegatronModule

    stock, calls = MegatronModule.set_is_first_microbatch, []
    counting(calls)
    with model_parallel(ep=num_ranks, **FP8) as sizes:
        for changes in ({}, RECIPE, CASES["recomputed layer"]):
            layer, other = (fp8_layer(sizes, changes) for _ in range(2))
            for step in range(2):
                layer.set_is_first_microbatch()
                for batch in range(3):
                    x, grad = inputs(10 * batch + rank)
                    calls.clear()
                    ours = forward_backward(layer, x, grad * 1e6)
                    assert len(calls) == (0 if batch else 2), f"{changes}: step {step}, batch {batch}: {len(calls)}"
                    assert_bits(ours, forward_backward(other, x, grad * 1e6), f"{changes}: step {step}, batch {batch}")
                for each in (layer, other):
                    torch.optim.SGD(each.parameters(), lr=0.5).step()
            assert layer.state_dict().keys() == other.state_dict().keys()
            # A forward after a step that was not announced to it.
            assert_bits(forward_backward(layer, x, grad), forward_backward(other, x, grad), f"{changes}: after a step")
            assert layer.experts.kept_weights.num_bytes and not other.experts.kept_weights.num_bytes
            layer.experts.release_fp8_weights()
            assert not layer.experts.kept_weights.num_bytes
            assert_bits(forward_backward(layer, x, grad), forward_backward(other, x, grad), f"{changes}: after a release")
        layer = fp8_layer(sizes, {"disable_parameter_transpose_cache": True})
        layer.set_is_first_microbatch()
        forward_backward(layer, x, grad)
        assert not layer.experts.kept_weights.num_bytes
    assert MegatronModule.set_is_first_microbatch is stock


@on_ranks(2, timeout_s=300)
def test_distributed_optimizer(rank: int, num_ranks: int) -> None:
    """Each rank steps a part of the weights and gets the others' into the same memory: copies of the last step are not used again. The last
    forward comes after a step of which nobody told the experts."""
    results = []
    for shares_copies in (False, True):
        calls: list[int] = []
        counting(calls)
        changes = ("moe_ffn_hidden_size", WIDTH), ("disable_parameter_transpose_cache", not shares_copies)
        with training(Setting("fp8", dtype=torch.bfloat16, changes=changes)) as run:
            losses = train(run, range(2))
            losses.append(float(run.model(**batch_of(2, 0)).sum()))
        results.append((losses, len(calls)))
    (want, num_calls), (ours, num_shared) = results
    assert ours == want and want[0] != want[1]
    assert (num_calls, num_shared) == (20, 12)


# ---- refusals ----


@on_megatron(2, **FP8)
def test_gpu_without_products(rank: int, num_ranks: int, sizes: dict[str, int]) -> None:
    """Rank 0 refuses before it sends, and tells rank 1, which waits in its dispatch. Where all refuse, nobody waits."""
    stock, send, why = fp8_products.why_no_products, Buffer.dispatch, "GPU 7 has no fp8 products; they need a Hopper GPU"
    sent: list[int] = []
    Buffer.dispatch = lambda *args, **kwargs: sent.append(1) or send(*args, **kwargs)
    layer = fp8_layer(sizes)
    expected = forward_backward(layer, *inputs(rank))
    assert sent
    for refusing in ((0,), (0, 1)):
        sent.clear()
        fp8_products.why_no_products = (lambda device: why) if rank in refusing else stock
        with pytest.raises(Exception, match=f"fp8 experts cannot run: {why}") as caught:
            layer(inputs(rank)[0])
        assert type(caught.value) is (BackendUnavailableError if rank in refusing else EPPeerError)
        assert bool(sent) == (rank not in refusing)
        fp8_products.why_no_products = stock
        dist.barrier()
    assert_bits(forward_backward(layer, *inputs(rank)), expected, "after refusals")
    layer.experts = torch.nn.Module()
    with pytest.raises(ValueError, match="fp8 is asked for, but Module takes no fp8 rows"):
        layer.token_dispatcher.join(layer)
