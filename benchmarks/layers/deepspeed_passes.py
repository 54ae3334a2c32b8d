"""Forwards and backwards of DeepSpeed's MoE layers: whole, without the auxiliary loss, without the gate, and of AutoEP."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.layers.passes import Pass


class LayerPass(Pass):
    """Forwards and backwards of a MoE layer with its auxiliary loss. Gates draw the same random numbers every time."""

    num_layers = 1
    has_loss = True
    """False: the backward leaves the auxiliary loss out."""

    def __init__(self, layer: Any, x: Tensor, cotangent: Tensor):
        super().__init__(self._run, cotangent, {"input": x} | dict(layer.named_parameters()))
        self._layer, self._x = layer, x
        self._made: list[tuple[Tensor, Tensor]] = []

    def _run(self) -> Tensor:
        reseed(self._x.device)
        self._made = [self._one() for _ in range(self.num_layers)]
        return self._made[0][0]

    def _one(self) -> tuple[Tensor, Tensor]:
        """Run one layer. Return its output and its auxiliary loss."""
        output, l_aux, _ = self._layer(self._x)
        return output, l_aux

    def backward(self) -> None:
        outputs, losses = zip(*self._made, strict=True)
        losses = losses if self.has_loss else ()
        gradients = [self._cotangent] * len(outputs) + [torch.ones_like(loss) for loss in losses]
        torch.autograd.backward([*outputs, *losses], gradients)

    def clear(self) -> None:
        super().clear()
        self._made = []


class AutoEPPass(LayerPass):
    """A pass without that loss of layers that AutoEP makes, which take and return [1, num_tokens, hidden]."""

    has_loss = False

    def _one(self) -> tuple[Tensor, Tensor]:
        output = self._layer(self._x.unsqueeze(0))
        return (output[0] if isinstance(output, tuple) else output).view(self._x.shape), self._x


class CommunicationPass(LayerPass):
    """A pass without that loss and without the gate. The gate has decided before, and its weights are leaves."""

    has_loss = False

    def __init__(self, layer: Any, x: Tensor, cotangent: Tensor):
        from deepep_moe.integrations.deepspeed.native.routing import ask

        super().__init__(layer, x, cotangent)
        self._gate = layer.deepspeed_moe.gate
        reseed(x.device)
        self._decided = [_leaf(value) for value in ask(self._gate, x, None)]
        self._leaves = {"input": x} | {f"gate.{i}": value for i, value in enumerate(self._decided) if _has_gradient(value)}

    def _one(self) -> tuple[Tensor, Tensor]:
        self._gate.forward = lambda *_: self._decided
        try:
            return super()._one()
        finally:
            del self._gate.forward

    def results(self) -> dict[str, Tensor]:
        """Return the results of a pass. Gates before 0.19.4 return weights of all slots; gradients of empty slots are set to 0."""
        results = super().results()
        tables = {name: leaf for name, leaf in self._leaves.items() if leaf.dim() == 3}
        return results | {name: results[name] * (leaf != 0) for name, leaf in tables.items()}


def _has_gradient(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad


def _leaf(value: Any) -> Any:
    return value.detach().requires_grad_() if _has_gradient(value) else value


def reseed(device: torch.device) -> None:
    """Seed the generators that gates draw from. `torch.manual_seed` seeds those of all devices, which takes a millisecond."""
    torch.default_generator.manual_seed(dist.get_rank())
    if device.type == "cuda":
        torch.cuda.default_generators[device.index].manual_seed(dist.get_rank())
