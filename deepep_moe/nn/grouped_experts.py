"""The experts of one rank as one module, whose products run for all of them at once."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from deepep_moe.arguments import as_int, check_bool
from deepep_moe.nn.balance import Parts, Planned
from deepep_moe.ops.fp8_kept import KeptWeights, NothingKept
from deepep_moe.ops.grouped_mlp import Activation, grouped_mlp


class GroupedExperts(nn.Module):
    """The feed-forward networks of a rank's experts: `down(silu(gate(x)) * up(x))`, or `down(activation(up(x)))` with `gated=False`.

    It replaces `LocalExperts` in a `MoELayer`, with one parameter for all experts instead of one for each. The host launches the same
    number of kernels for any number of experts, and waits for no counts (`deepep_moe.ops.grouped_mlp` lists the conditions).

    Args:
        num_local_experts: experts of this rank.
        hidden: columns of the input and the output.
        intermediate: columns between the two products.
        gated: True: SwiGLU (arXiv 2002.05202). False: `activation`.
        activation: a function that keeps the shape [num_rows, intermediate], only with `gated=False`. Default
            `torch.nn.functional.gelu`.
        bias: add a bias after each product.
        recompute_activation: save less memory for the backward, which computes the activation again.
        zero_tail: the same as in `deepep_moe.ops.grouped_mlp`. A `MoELayer` sets it to False, as its combine reads no tail.
        device, dtype: those of the parameters. PyTorch's grouped kernels need bfloat16, and `hidden` and `intermediate` multiples of 8.

    Attributes:
        up: [num_local_experts, intermediate, hidden] parameter. With `gated` it has twice as many rows. Those of the gate come first, as in
            `SwiGLU.gate_up`.
        down: [num_local_experts, hidden, intermediate] parameter.
        up_bias, down_bias: [num_local_experts, rows of a matrix] parameters, or None.
        kept_weights: the fp8 copies that forwards share (`deepep_moe.ops.KeptWeights`).

    Raises:
        TypeError: a setting has another type.
        ValueError: a size is not positive, or `activation` comes with `gated=True`.
    """

    def __init__(
        self,
        num_local_experts: int,
        hidden: int,
        intermediate: int,
        *,
        gated: bool = True,
        activation: Callable[[Tensor], Tensor] | None = None,
        bias: bool = False,
        recompute_activation: bool = False,
        zero_tail: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        switches = {"gated": gated, "bias": bias, "recompute_activation": recompute_activation, "zero_tail": zero_tail}
        for name, value in switches.items():
            check_bool(name, value)
        self.num_local_experts = as_int("num_local_experts", num_local_experts, least=1)
        self.hidden, self.intermediate = as_int("hidden", hidden, least=1), as_int("intermediate", intermediate, least=1)
        self.gated, self.recompute_activation, self.zero_tail = gated, recompute_activation, zero_tail
        self.activation = _activation(gated, activation)
        inner = 2 * self.intermediate if gated else self.intermediate
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        self.up = nn.Parameter(torch.empty(self.num_local_experts, inner, self.hidden, **factory))
        self.down = nn.Parameter(torch.empty(self.num_local_experts, self.hidden, self.intermediate, **factory))
        self.up_bias = nn.Parameter(torch.empty(self.num_local_experts, inner, **factory)) if bias else None
        self.down_bias = nn.Parameter(torch.empty(self.num_local_experts, self.hidden, **factory)) if bias else None
        self.kept_weights = KeptWeights()
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw each expert's weights and biases as `torch.nn.Linear` does."""
        for weight, bias in ((self.up, self.up_bias), (self.down, self.down_bias)):
            bound = 1 / math.sqrt(weight.shape[2])
            nn.init.uniform_(weight, -bound, bound)
            if bias is not None:
                nn.init.uniform_(bias, -bound, bound)

    def forward(
        self,
        x: Tensor,
        num_rows_per_expert: Tensor | Sequence[int],
        probs: Tensor | None = None,
        *,
        is_first_microbatch: bool | None = None,
        planned: Planned | None = None,
    ) -> Tensor:
        """Return each row's output, times its prob.

        Args:
            x: [num_rows, hidden] grouped by expert, in the dtype of the parameters unless under autocast. Or `QuantizedRows`, which are
                multiplied in fp8 (`deepep_moe.ops.grouped_mlp` lists the sizes).
            num_rows_per_expert: [num_local_experts], on the device of x or on the host. Their sum is at most num_rows. Later rows may
                hold any value; their output is zero with `zero_tail`.
            probs: [num_rows] fp32, or None for ones. A `MoELayer` without fp8 passes None, as its combine weights the rows.
            is_first_microbatch: only with `QuantizedRows`. True, for the first forward after an optimizer step, quantizes the weights and
                keeps the copies. False uses the copies. None: each forward quantizes.
            planned: what `Balance` has planned. A `MoELayer` passes it, and the counts of experts and then of copies. The outputs of
                rows of copies are missing then, unless the module has hooks.

        Returns:
            [num_rows, hidden] in the dtype of x, which for `QuantizedRows` is bfloat16.

        Raises:
            TypeError, ValueError: see `deepep_moe.ops.grouped_mlp` and `deepep_moe.ops.KeptWeights.take`.
        """
        rows, product = (x,) if probs is None else (x, probs), partial(self._product, is_first_microbatch)
        if planned is not None:
            return planned.run(product, rows, num_rows_per_expert)  # type: ignore[arg-type]
        return product(rows, num_rows_per_expert, Parts(self.up, self.down), True)

    def _product(
        self, is_first: bool | None, rows: tuple[Tensor, ...], counts: Tensor | Sequence[int], weights: Parts, is_home: bool
    ) -> Tensor:
        return grouped_mlp(
            rows[0], counts, *weights, b1=self.up_bias, b2=self.down_bias, probs=rows[1] if len(rows) > 1 else None,
            activation=self.activation, recompute_activation=self.recompute_activation, zero_tail=self.zero_tail,
            kept=self.kept_weights if is_home else NothingKept(), is_first_microbatch=is_first,
        )  # fmt: skip

    def release_fp8_weights(self) -> None:
        """Drop the fp8 copies of the weights that are kept between forwards."""
        self.kept_weights.release()

    def extra_repr(self) -> str:
        sizes = f"num_local_experts={self.num_local_experts}, hidden={self.hidden}, intermediate={self.intermediate}"
        return f"{sizes}, gated={self.gated}, bias={self.up_bias is not None}"


def _activation(gated: bool, activation: Callable[[Tensor], Tensor] | None) -> Activation:
    if gated and activation is not None:
        raise ValueError(f"activation is {activation!r}, but gated experts use SwiGLU; pass gated=False, or leave activation out")
    return "swiglu" if gated else activation or nn.functional.gelu
