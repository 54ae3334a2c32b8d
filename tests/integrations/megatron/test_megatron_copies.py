"""`enable(balance=)`: layers with copies of hot experts, against the same layers without."""

from typing import Any

import pytest
import torch
from exchange_cases import plans_of_copies
from megatron_cases import ACTIVATION_RECOMPUTED, BF16, NO_GROUPS, RECOMPUTED, assert_same, draw, expert_biases, layer_of, model_parallel
from on_ranks import on_ranks, refused

from deepep_moe.errors import BufferSuspendedError
from deepep_moe.integrations.megatron import enable, resume, suspend, take_metrics
from deepep_moe.nn import Balance
from deepep_moe.testing import run_ranks

pytest.importorskip("megatron.core")
ALONE = {"moe_shared_expert_intermediate_size": None, "add_bias_linear": False}


def balanced(ep: int, device: str = "cpu", **options: Any) -> Any:
    return model_parallel(device, ep=ep, experts="own", balance=Balance(2, cost=1), **options)


def two_passes(rank: int, layer: Any, has_ddp: bool, between: Any = lambda: None) -> dict[str, torch.Tensor]:
    """Return what two passes of different routing make."""
    linears, seen = (layer.experts.linear_fc1, layer.experts.linear_fc2), {}
    for linear in linears if has_ddp else ():  # as Megatron's DDP does
        linear.weight.main_grad, linear.weight.grad_added_to_main_grad = torch.ones_like(linear.weight, dtype=torch.float32), False
    for number in range(2):
        x, cotangent = (
            rows.to(layer.experts.linear_fc1.weight)
            for rows in draw(10 * number + rank, 12 - 11 * (rank % 2) * number, hidden=linears[0].weight.shape[2])
        )
        x.requires_grad_()
        output, bias = layer(x)
        assert bias is None
        output.backward(cotangent)
        seen |= {f"output {number}": output.detach().float(), f"input gradient {number}": x.grad.float()}
        between()
    for name, parameter in layer.named_parameters():
        is_added = has_ddp and any(parameter is linear.weight for linear in linears)
        assert not is_added or parameter.grad_added_to_main_grad
        seen[name] = parameter.main_grad - 1 if is_added else parameter.grad.float()
    return seen


CASES = {
    "plain": {},
    "recomputed": RECOMPUTED,
    "activations recomputed": ACTIVATION_RECOMPUTED,
    "DDP": {},
    "bf16, DDP": BF16,
    "probs on the input": NO_GROUPS | {"moe_apply_probs_on_input": True, "moe_router_topk": 1},
}
WIDE = BF16 | {"hidden_size": 128, "moe_ffn_hidden_size": 128, "moe_shared_expert_intermediate_size": None}
FP8_CASES = {"fp8": WIDE, "fp8, DDP": WIDE}
BOUNDED = {"sync_free": True, "recv_capacity_factor": 1.5}
Kind = tuple[dict[str, Any], dict[str, Any]]
KINDS: list[Kind] = [  # cases, and options with copies
    (CASES, {}), (CASES, BOUNDED), (FP8_CASES, {"fp8": True}), (FP8_CASES, {"fp8": True, **BOUNDED}),
    ({name: changes for name, changes in CASES.items() if name != "probs on the input"}, {"sums": "lanes"}),
]  # fmt: skip


def all_passes(rank: int, num_ranks: int, device: str, is_balanced: bool, kinds: list[Kind]) -> list[dict[str, list]]:
    plans, results = plans_of_copies(), []
    for cases, options in kinds:
        without = {"fp8": "fp8" in options, "experts": "own"}
        with balanced(num_ranks, device, **options) if is_balanced else model_parallel(device, ep=num_ranks, **without) as sizes:
            for name, changes in cases.items():
                layer = layer_of(sizes, **(ALONE | changes))
                if name == "fp8, DDP":
                    layer.experts.is_first_microbatch = True
                passes = two_passes(rank, layer, "DDP" in name)
                results.append({key: value.tolist() for key, value in passes.items()})
                assert any((each.plan.copies >= 0).any() for each in plans) == is_balanced and len(plans) == 2 * is_balanced, name
                plans.clear()
        assert layer.token_dispatcher._copies() is None  # disable() ends them
    return results


# A process on GPUs makes one process group, so it serves one kind.
ON_CPU, ON_GPU = pytest.param("cpu", KINDS, id="cpu"), [
    pytest.param("cuda", [kind], id=f"cuda, {number}", marks=pytest.mark.multi_gpu(2)) for number, kind in enumerate(KINDS)
]  # fmt: skip


@pytest.mark.parametrize(("device", "kinds"), (ON_CPU, *ON_GPU))
@pytest.mark.parametrize("num_ranks", (2, 4))
def test_passes_are_those_without_copies(num_ranks: int, device: str, kinds: list[Kind]) -> None:
    if num_ranks > 2 and device == "cuda" and torch.cuda.device_count() < num_ranks:
        pytest.skip("needs a GPU for each rank")
    plain, others = (run_ranks(all_passes, num_ranks, device, is_balanced, kinds) for is_balanced in (False, True))
    for rank in range(num_ranks):
        for name, *both in zip([name for cases, _ in kinds for name in cases], plain[rank], others[rank], strict=True):
            expected, actual = ({key: torch.tensor(value) for key, value in passes.items()} for passes in both)
            tolerance = 2e-2 if "bf16" in name or name in FP8_CASES else 1e-5 if device == "cuda" else 4e-6
            assert_same(actual, expected, f"{name}, rank {rank}", tolerance=tolerance)


@on_ranks(2)
def test_memory_goes_and_comes_with_the_buffers(rank: int, num_ranks: int) -> None:
    """A suspended model has no slots, and metrics count rows by expert."""
    results = []
    for suspends in (False, True):
        with balanced(2, metrics=True) as sizes:
            layer = layer_of(sizes, **ALONE)

            def cycle(layer: Any = layer) -> None:
                copies = layer.token_dispatcher._copies()
                suspend()
                assert copies.is_over and copies.slots.memory.nbytes == copies.weights.up.nbytes == 0
                with pytest.raises(BufferSuspendedError):
                    layer(draw(rank, 12)[0])
                resume()

            results.append(two_passes(rank, layer, False, cycle if suspends else lambda: None))
            (report,) = take_metrics()
            assert sum(report.rows_per_expert) == 4 * (12 + 12 + 12 + 1) and len(report.rows_per_expert) == 8
    assert_same(results[1], results[0], f"rank {rank}")


@pytest.mark.parametrize("where", ("router", "second router", "experts"))
@on_ranks(2)
def test_peers_learn_of_a_failure(rank: int, num_ranks: int, where: str) -> None:
    with balanced(2) as sizes:
        layer = layer_of(sizes, **ALONE, **(RECOMPUTED if where == "second router" else {}))
        module, calls = layer.experts if where == "experts" else layer.router, []
        forward = module.forward

        def fails(*args: object) -> object:
            calls.append(1)
            if rank == 0 and len(calls) == (2 if where == "second router" else 1):
                raise ValueError("broken here")
            return forward(*args)

        module.forward = fails
        with refused(rank, 0, ValueError, "broken here"):
            layer(draw(rank, 12)[0].requires_grad_())[0].sum().backward()


@on_ranks(2)
def test_refusals(rank: int, num_ranks: int) -> None:
    for options, error in (({"balance": 4}, TypeError), ({"balance": Balance(1), "experts": "framework"}, ValueError)):
        with pytest.raises(error, match="balance"):
            enable(**options)
    with balanced(2) as sizes:
        for changes in filter(None, (expert_biases(), {"moe_shared_expert_overlap": True})):
            with pytest.raises(ValueError, match="balance is given"):
                layer_of(sizes, **changes)
        with pytest.raises(ValueError, match="a CUDA graph of layers would hold the dispatch, but balance"):
            layer_of(sizes, late={"cuda_graph_impl": "local", "cuda_graph_scope": "moe"})
    with model_parallel(ep=2, balance=Balance(1)) as sizes, pytest.raises(ValueError, match="runs no copies"):
        layer_of(sizes)
