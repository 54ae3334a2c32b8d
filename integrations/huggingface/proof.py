"""Check that a block's experts may be spread."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

WEIGHTS = ("gate_up_proj", "down_proj")
# Largest entries of the first product: small ones show constants, large ones show limits.
_MAGNITUDES = (0.5, 4.0, 30.0, 300.0, 3000.0)


def is_stack(module: nn.Module) -> bool:
    """Return whether the module has the weights of all experts of a block, in the shapes of transformers."""
    up, down = (getattr(module, name, None) for name in WEIGHTS)
    if not (isinstance(up, Tensor) and isinstance(down, Tensor) and up.dim() == down.dim() == 3):
        return False
    num_experts, inner, hidden = up.shape
    return down.shape == (num_experts, hidden, inner // 2) and inner % 2 == 0


def check(name: str, experts: nn.Module, num_topk: int, group: "dist.ProcessGroup | None", rank: int, num_ranks: int) -> None:
    """Raise ValueError unless `experts` can be spread: they compute what `GroupedExperts` does, and have nothing that would be lost.

    They run on rows of many magnitudes, forward and backward, in training and in evaluation. A rank proves the experts that it will hold.
    """
    up, down = (getattr(experts, weight) for weight in WEIGHTS)
    is_share = all(_is_share(weight, group) for weight in (up, down))
    if any(weight.device.type == "meta" or hasattr(weight, "full_tensor") for weight in (up, down)) and not is_share:
        raise ValueError(f"{name} has weights on the device meta, or sharded ones; load them whole before spread_experts")
    biases = [bias for bias in ("gate_up_proj_bias", "down_proj_bias") if getattr(experts, bias, None) is not None]
    if biases:
        raise ValueError(f"{name} has {' and '.join(biases)}; only experts without biases can be spread")
    activation, x = getattr(experts, "act_fn", None), torch.linspace(-3, 3, 7, device="cpu")
    if callable(activation) and not torch.allclose(activation(x), F.silu(x)):
        raise ValueError(f"{name} has the activation {activation!r}; only experts with SiLU can be spread")
    members = [member for member, _ in (*experts.named_parameters(), *experts.named_buffers()) if member not in WEIGHTS]
    if members:
        raise ValueError(
            f"{name} has {' and '.join(members)}, which would be lost; only experts with {' and '.join(WEIGHTS)} can be spread"
        )
    has_hooks = any(hooks for module in experts.modules() for name, hooks in vars(module).items() if name.endswith("_hooks"))
    if has_hooks or any(weight._backward_hooks or getattr(weight, "_post_accumulate_grad_hooks", None) for weight in (up, down)):
        raise ValueError(f"{name} or its weights have hooks, which would be lost; remove them, and register them after spread_experts")
    num_experts = len(up)
    if num_experts % num_ranks:
        raise ValueError(f"{name} has {num_experts} experts, which {num_ranks} ranks do not divide; choose another number of ranks")
    if not 1 <= num_topk <= num_experts:
        raise ValueError(f"num_topk is {num_topk}, but {name} has {num_experts} experts; pass a number from 1 to {num_experts}")
    others = {weight: _like(getattr(experts, weight)) for weight in WEIGHTS} if is_share else {}
    first = rank * num_experts // num_ranks
    for start in range(first, first + num_experts // num_ranks, num_topk):
        chosen = [(start + lane) % num_experts for lane in range(num_topk)]
        for training in (False, True):
            with _quiet(experts, training):
                _prove(name, experts, others, chosen)


def _is_share(weight: Any, group: "dist.ProcessGroup | None") -> bool:
    """Return whether the weight is a DTensor, as `load_spread` makes it: each rank of the group has its share of the experts."""
    if group is None or not hasattr(weight, "full_tensor") or weight.device.type == "meta":
        return False
    is_by_expert = [getattr(placement, "dim", None) for placement in weight.placements] == [0] and weight.placements[0].is_shard()
    return is_by_expert and weight.device_mesh.mesh.tolist() == dist.get_process_group_ranks(group)


def _like(weight: Tensor) -> Tensor:
    """Return random weights of all experts in the memory of about one: those of an expert begin 16 elements after the one before."""
    num_experts, rows, columns = weight.shape
    generator = torch.Generator("cpu").manual_seed(0)
    numbers = 0.02 * torch.randn(rows * columns + 16 * num_experts, generator=generator, device="cpu", dtype=weight.dtype)
    return numbers.to(weight.device).as_strided(tuple(weight.shape), (16, columns, 1))


@contextlib.contextmanager
def _quiet(experts: nn.Module, training: bool) -> Iterator[None]:
    """Set the mode of the experts, and leave it, random numbers and autocast as they were."""
    device = getattr(experts, WEIGHTS[0]).device
    modes = [(module, module.training) for module in experts.modules()]
    try:
        with (
            torch.random.fork_rng([device] if device.type == "cuda" else []),
            torch.autocast(device.type, enabled=False),
            torch.inference_mode(False),
            torch.enable_grad(),
        ):
            experts.train(training)
            yield
    finally:
        for module, mode in modes:
            module.training = mode


def _prove(name: str, experts: nn.Module, others: dict[str, Tensor], chosen: list[int]) -> None:
    """Compare one call of the experts with the formula, on rows whose first lane is each of the chosen experts at each magnitude.

    The experts have `others` for weights, or none for their own.
    """
    up, down = (others.get(weight, getattr(experts, weight)) for weight in WEIGHTS)
    generator, num_topk = torch.Generator("cpu").manual_seed(0), len(chosen)
    idx = torch.tensor([chosen[lane:] + chosen[:lane] for lane in range(num_topk)], device=up.device).repeat(len(_MAGNITUDES), 1)
    x = torch.randn(len(idx), up.shape[2], generator=generator, device="cpu").to(up)
    sizes = torch.tensor(_MAGNITUDES, device="cpu").repeat_interleave(num_topk).to(up.device)
    with torch.no_grad():
        largest = torch.stack([F.linear(row, up[expert]).abs().amax() for row, expert in zip(x, idx[:, 0].tolist(), strict=True)])
        x = (x * (sizes / largest.float().clamp_min(1e-30))[:, None]).to(up.dtype)
    topk_weights = (torch.rand(len(idx), num_topk, generator=generator, device="cpu") + 0.25).to(up)
    direction = torch.randn(x.shape, generator=generator, device="cpu").to(up)
    wanted = _results(_formula, x, idx, topk_weights, direction, up, down)
    try:
        results = _results(lambda *args: functional_call(experts, others, args[:3]), x, idx, topk_weights, direction, up, down)
    except Exception as error:
        raise ValueError(
            f"{name} cannot be called with (hidden_states, top_k_index, top_k_weights): {type(error).__name__}: {error}; only experts that "
            "are called so can be spread"
        ) from error
    tolerance = 5e-3 if up.dtype in (torch.float32, torch.float64) else 3e-2
    for what, result, want in zip(("outputs", "gradients of rows", "gradients of weights"), results, wanted, strict=False):
        result, want = result.double(), want.double()
        is_known = want.isfinite().all(1) & (want != 0).any(1)
        if not is_known.view(len(_MAGNITUDES), num_topk).any(0).all():
            raise ValueError(f"{name} has zeros or numbers that are not finite for weights; load its weights before spread_experts")
        difference = ((result - want).norm(dim=1) / want.norm(dim=1))[is_known].nan_to_num(torch.inf).amax().item()
        if difference > tolerance:
            raise ValueError(
                f"{name} ({type(experts).__name__}) computes something else than down(silu(gate(x)) * up(x)): its {what} differ by "
                f"{difference:.1e} of their norm; only experts that compute this can be spread"
            )


def _results(
    function: Callable[..., Any], x: Tensor, idx: Tensor, topk_weights: Tensor, direction: Tensor, up: Tensor, down: Tensor
) -> list[Tensor]:
    if up.is_inference():
        with torch.no_grad():
            return [function(x, idx, topk_weights, up, down)]
    x, topk_weights = x.clone().requires_grad_(), topk_weights.clone().requires_grad_()
    y = function(x, idx, topk_weights, up, down)
    if y.shape != x.shape:
        raise ValueError(f"it returned shape {list(y.shape)} for {list(x.shape)}")
    return [y.detach(), *torch.autograd.grad(y, (x, topk_weights), direction.to(y.dtype))]


def _formula(x: Tensor, idx: Tensor, topk_weights: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """Compute what `GroupedExperts` and a weighted combine compute."""
    total = torch.zeros_like(x, dtype=torch.promote_types(x.dtype, torch.float32))
    for expert in idx[0].tolist():  # every row has the same experts, in another order
        token, lane = torch.where(idx == expert)
        gate, linear = F.linear(x[token], up[expert]).chunk(2, dim=-1)
        y = F.linear(F.silu(gate) * linear, down[expert])
        total = total.index_add(0, token, (y * topk_weights[token, lane, None]).to(total.dtype))
    return total
