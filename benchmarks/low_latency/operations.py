"""The calls of a `LowLatencyBuffer` that are timed, and what they must return."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.common.verify import compare_bits, in_bf16
from benchmarks.common.verify import expected_combine as combined
from benchmarks.common.workload import DTYPE_OF_WIRE, SCALE_BLOCK, Inputs, Operation, Shape
from deepep_moe import LowLatencyBuffer, LowLatencyOutput
from deepep_moe.ops import quantize_fp8

Hook = Callable[[], None]


@dataclass(frozen=True, kw_only=True)
class LowLatencyOperation(Operation):
    """A call that may be made in halves too. `dtype` is that of the rows that a dispatch returns or a combine takes."""

    wire: str  # "bf16" or "fp8", in which the rows travel
    check: Callable[[Any], None]
    """It raises EPError unless a result is right: ours to the bit, another library's within its rounding."""
    send: Callable[[], tuple[Any, Hook]] | None = None
    """The sending half, or None if the call has no halves."""

    @property
    def name(self) -> str:
        return " ".join([*([self.backend] if self.backend else []), self.op, self.wire])


def operations(buffer: LowLatencyBuffer, shape: Shape, everyone: Sequence[Inputs], rank: int) -> list[LowLatencyOperation]:
    """Return dispatch and combine, each with bf16 and fp8 rows on the wire. Collective, as combine needs the results of a dispatch."""
    mine, listed = everyone[rank], []
    arguments = (mine.x, mine.topk_idx, mine.topk_weights)
    out = buffer.dispatch(*arguments)
    rows = expert_rows(out.recv_x, out.num_recv_tokens_per_expert, shape, rank, buffer.combine_input())
    for wire in ("fp8", "bf16"):
        dispatch = partial(buffer.dispatch, *arguments, fp8=wire == "fp8")
        check = partial(_check_dispatch, expected_dispatch(everyone, shape, rank, wire))
        what = "dispatch", DTYPE_OF_WIRE[wire], "expert", shape.row_bytes(DTYPE_OF_WIRE[wire])
        listed.append(LowLatencyOperation(*what, dispatch, wire=wire, check=check, send=partial(_send_dispatch, dispatch)))
    for wire in ("bf16", "fp8"):
        combine = partial(buffer.combine, rows, out.handle, wire="fp8" if wire == "fp8" else None)
        check = partial(compare_bits, "combined_x", expected=expected_combine(mine, shape, wire, rank), source="the reference")
        what = "combine", "bfloat16", "expert", shape.row_bytes(DTYPE_OF_WIRE[wire])
        listed.append(LowLatencyOperation(*what, combine, wire=wire, check=check, send=partial(combine, return_hook=True)))
    return listed


def verify(operation: LowLatencyOperation) -> bool:
    """Make the call, whole and in halves, and check both results. Return True or raise EPError. Collective."""
    results = [operation.call()]
    if operation.send is not None:
        in_halves, hook = operation.send()
        hook()
        results.append(in_halves)
    for result in results:
        operation.check(result)  # last, as it may raise on one rank alone
    return True


def _send_dispatch(dispatch: Callable[..., LowLatencyOutput]) -> tuple[LowLatencyOutput, Hook]:
    out = dispatch(return_hook=True)
    assert out.hook is not None
    return out, out.hook


def received(rows: Tensor, counts: Tensor) -> Tensor:
    """Return which of rows [num_local_experts, capacity, hidden] have arrived, [num_local_experts, capacity] bool."""
    return torch.arange(rows.shape[1], device=rows.device) < counts[:, None]


def factors_of(shape: Shape, device: torch.device) -> Tensor:
    """Return the factor by which each expert multiplies, [num_experts] fp32. They differ, so that a misplaced row shows."""
    return (1 + torch.arange(shape.num_experts) / shape.num_experts).to(device)  # on the CPU, as a GPU rounds the quotients differently


def expert_rows(rows: Tensor, counts: Tensor, shape: Shape, rank: int, outputs: Tensor) -> Tensor:
    """Fill `outputs` [num_local_experts, capacity, hidden] bf16 with the experts' outputs for rows, and with NaN where no row came."""
    first = rank * shape.num_local_experts
    factors = factors_of(shape, rows.device)[first : first + shape.num_local_experts]
    outputs.fill_(float("nan"))
    there = received(rows, counts)
    outputs[there] = (rows[there].float() * factors.repeat_interleave(there.sum(1))[:, None]).to(outputs.dtype)
    return outputs


# ---- what must come out ----


def expected_dispatch(everyone: Sequence[Inputs], shape: Shape, rank: int, wire: str) -> dict[str, Tensor]:
    """Return what `rank` receives: the rows of its experts, one expert after the other, their scales in fp8, and counts."""
    idx, x = (torch.cat([getattr(inputs, name) for inputs in everyone]) for name in ("topk_idx", "x"))
    tokens, lanes = (idx // shape.num_local_experts == rank).nonzero(as_tuple=True)
    experts = idx[tokens, lanes] - rank * shape.num_local_experts
    tokens, counts = tokens[experts.argsort(stable=True)], experts.bincount(minlength=shape.num_local_experts).int()
    if wire == "bf16":
        return {"num_recv_tokens_per_expert": counts, "recv_x": x[tokens]}
    y, scales = quantize_fp8(x)
    return {"num_recv_tokens_per_expert": counts, "recv_x": y.view(torch.uint8)[tokens].view(y.dtype), "recv_x_scales": scales[tokens]}


def _check_dispatch(expected: dict[str, Tensor], out: LowLatencyOutput) -> None:
    compare_bits("num_recv_tokens_per_expert", out.num_recv_tokens_per_expert, expected["num_recv_tokens_per_expert"], "the reference")
    there = received(out.recv_x, out.num_recv_tokens_per_expert)
    rows = out.recv_x.view(torch.uint8)[there].view(out.recv_x.dtype)
    compare_bits("recv_x", rows, expected["recv_x"], "the reference")
    if out.recv_x_scales is not None:
        compare_bits("recv_x_scales", out.recv_x_scales[there], expected["recv_x_scales"], "the reference")


def _in_fp8(rows: Tensor) -> Tensor:
    """Return sums [num_rows, hidden] fp32 as they are after they have travelled in fp8."""
    y, scales = quantize_fp8(rows)
    return y.float() * scales.repeat_interleave(SCALE_BLOCK, dim=1)


def expected_combine(mine: Inputs, shape: Shape, wire: str, rank: int = 0) -> Tensor:
    """Return the combined_x of rank `rank`, which has `mine`, [num_tokens, hidden] bf16: experts multiply their rows by their factor."""
    return combined(mine, shape, "expert", rank, factors_of(shape, mine.x.device), in_bf16 if wire == "bf16" else _in_fp8)
