"""MoE layers that differ only in how they move tokens, and their forwards and backwards, to compare them."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.layers.passes import Key, Pass
from deepep_moe.integrations.deepspeed.native.routing import ask, route
from deepep_moe.integrations.deepspeed.plugin import replace_moe_layers

DEEPSPEED, EXACT, FAST, GROUPED = "deepspeed", "exact", "fast", "grouped"
KINDS = (EXACT, FAST, DEEPSPEED)


def into_one_memory(parameters: Sequence[nn.Parameter]) -> None:
    """Put parameters one behind another into one tensor, as ZeRO 1 and 2 do, where grouped products read those of all experts in place."""
    one = torch.cat([parameter.detach().flatten() for parameter in parameters])
    for parameter, data in zip(parameters, one.split([parameter.numel() for parameter in parameters]), strict=True):
        parameter.data = data.view_as(parameter)


def sharing_layers(
    expert: nn.Module, *, hidden: int, num_experts: int, num_topk: int, ep: int, capacity_factor: float, device: torch.device,
    dtype: torch.dtype, backend: str, num_max_tokens_per_rank: int, grouped: bool = False,
) -> dict[str, Any]:  # fmt: skip
    """Build a `deepspeed.moe.layer.MoE` of each kind, with `grouped` also a fast one whose experts run in grouped products. All share one
    gate and one set of copies of `expert`. Collective."""
    from deepspeed.moe.layer import MoE

    layers: dict[str, Any] = {}
    for kind in (*KINDS, GROUPED) if grouped else KINDS:
        layer = MoE(hidden, expert, num_experts=num_experts, ep_size=ep, k=num_topk, capacity_factor=capacity_factor)
        first = layers.get(KINDS[0])
        if first is None:
            layer.to(device, dtype)
            layer.set_deepspeed_parallelism()
        else:
            moe, shared = layer.deepspeed_moe, first.deepspeed_moe
            moe.gate, moe.experts, moe.ep_group = shared.gate, shared.experts, shared.ep_group
        if kind != DEEPSPEED:
            settings: dict[str, Any] = {"backend": backend, "num_max_tokens_per_rank": num_max_tokens_per_rank}
            replace_moe_layers(layer, exact=kind == EXACT, grouped_experts=kind == GROUPED, **settings)
        layers[kind] = layer
    return layers


# ---- passes ----

Run = Callable[[], tuple[Tensor, ...]]
"""Runs a layer. Returns its output, and its auxiliary loss if the backward begins there too."""


class LayerPass(Pass):
    """Forwards and backwards of a MoE layer. Gates draw the same random numbers every time."""

    num_layers = 1

    def __init__(self, run: Run, cotangent: Tensor, leaves: dict[str, Tensor]):
        super().__init__(self._run_all, cotangent, leaves)
        self._run = run
        self._made: list[tuple[Tensor, ...]] = []

    def _run_all(self) -> Tensor:
        reseed(self._cotangent.device)
        self._made = [self._run() for _ in range(self.num_layers)]
        return self._made[0][0]

    def backward(self) -> None:
        losses = [loss for _, *of_one in self._made for loss in of_one]
        gradients = [self._cotangent] * len(self._made) + [torch.ones_like(loss) for loss in losses]
        torch.autograd.backward([*(made[0] for made in self._made), *losses], gradients)

    def clear(self) -> None:
        super().clear()
        self._made = []


def layer_pass(layer: Any, x: Tensor, cotangent: Tensor) -> LayerPass:
    """Return the pass of a whole layer with its auxiliary loss."""
    return LayerPass(lambda: layer(x)[:2], cotangent, {"input": x} | dict(layer.named_parameters()))


class CommunicationPass(LayerPass):
    """A pass without the auxiliary loss and the gate, which has decided before. Its weights are leaves."""

    def __init__(self, layer: Any, x: Tensor, cotangent: Tensor):
        reseed(x.device)
        gate = layer.deepspeed_moe.gate
        decided = [value.detach().requires_grad_() if _has_gradient(value) else value for value in ask(gate, x, None)]

        def run() -> tuple[Tensor]:
            gate.forward = lambda *_: decided
            try:
                return (layer(x)[0],)
            finally:
                del gate.forward

        leaves = {"input": x} | {f"gate.{i}": value for i, value in enumerate(decided) if _has_gradient(value)}
        super().__init__(run, cotangent, leaves)

    def results(self) -> dict[str, Tensor]:
        """Return the results of a pass. Gates before 0.19.4 return weights of all slots; gradients of empty slots are set to 0."""
        results = super().results()
        tables = {name: leaf for name, leaf in self._leaves.items() if leaf.dim() == 3}
        return results | {name: results[name] * (leaf != 0) for name, leaf in tables.items()}


def _has_gradient(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad


def reseed(device: torch.device) -> None:
    """Seed the generators that gates draw from. `torch.manual_seed` seeds those of all devices, which takes a millisecond."""
    torch.default_generator.manual_seed(dist.get_rank())
    if device.type == "cuda":
        torch.cuda.default_generators[device.index].manual_seed(dist.get_rank())


def make_passes(x: Tensor, cotangent: Tensor, ffn_hidden: int, settings: dict[str, Any]) -> tuple[dict[Key, LayerPass], Tensor]:
    """Return passes by what is timed and kind of layer, and the experts of tokens, [num_tokens, num_topk], -1 = dropped."""
    hidden = settings["hidden"]
    expert = nn.Sequential(nn.Linear(hidden, ffn_hidden, bias=False), nn.GELU(), nn.Linear(ffn_hidden, hidden, bias=False))
    layers = {"exchange": sharing_layers(nn.Identity(), **settings), "layer": sharing_layers(expert, grouped=True, **settings)}
    passes = {(what, kind): layer_pass(layer, x, cotangent) for what, of_one in layers.items() for kind, layer in of_one.items()}
    passes |= {("communication", kind): CommunicationPass(layer, x, cotangent) for kind, layer in layers["exchange"].items()}
    for parameter in layers["layer"][DEEPSPEED].deepspeed_moe.experts.parameters():  # else copies of one
        nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
    into_one_memory(list(layers["layer"][DEEPSPEED].deepspeed_moe.experts.parameters()))
    torch.manual_seed(dist.get_rank())
    with torch.no_grad():
        return passes, route(layers["exchange"][DEEPSPEED].deepspeed_moe.gate, x, None).topk_idx.t()
