"""Check results before a call is timed: compare them with what they must be by definition."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from deepep_moe.errors import EPError
from deepep_moe.exchange.handle import padded
from deepep_moe.tune.operations import compare_bits
from deepep_moe.tune.workload import Inputs, Operation, Shape


def lanes_of_rank(topk_idx: Tensor, shape: Shape, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return (tokens, lanes, local experts) of all entries of topk_idx [num_tokens, num_topk] on `rank`, in the order (expert, token)."""
    tokens, lanes = (topk_idx // shape.num_local_experts == rank).nonzero(as_tuple=True)
    experts = topk_idx[tokens, lanes] - rank * shape.num_local_experts
    order = experts.argsort(stable=True)
    return tokens[order], lanes[order], experts[order]


def _placed(rows: Tensor, target: Tensor, num_rows: int) -> Tensor:
    """Put `rows` [n, columns] at the indices `target` of `num_rows` rows that are otherwise zero."""
    out = torch.zeros(num_rows, rows.shape[1] * rows.element_size(), dtype=torch.uint8, device=rows.device)
    out[target] = rows.view(torch.uint8)
    return out.view(rows.dtype)


def expected_dispatch(inputs: Sequence[Inputs], shape: Shape, rank: int, layout: str, is_fp8: bool) -> dict[str, Tensor]:
    """Return the tensors that the `DispatchOutput` of `rank` must have. `inputs` are those of all ranks."""
    idx, weights, scales = (torch.cat([getattr(i, name) for i in inputs]) for name in ("topk_idx", "topk_weights", "x_scales"))
    x = torch.cat([(i.x_fp8 if is_fp8 else i.x).view(torch.uint8) for i in inputs]).view(torch.float8_e4m3fn if is_fp8 else torch.bfloat16)
    if layout == "rank":
        is_local = idx // shape.num_local_experts == rank
        tokens = is_local.any(1).nonzero().flatten()
        here = is_local[tokens]
        parts = {
            "recv_topk_idx": torch.where(here, idx[tokens] - rank * shape.num_local_experts, -1),
            "recv_topk_weights": torch.where(here, weights[tokens], 0.0),
        }
        target, num_rows = torch.arange(len(tokens), device=idx.device), len(tokens)
    else:
        tokens, lanes, experts = lanes_of_rank(idx, shape, rank)
        counts = experts.bincount(minlength=shape.num_local_experts)
        groups = padded(counts, shape.expert_alignment)
        shifts = (groups.cumsum(0) - groups) - (counts.cumsum(0) - counts)
        target, num_rows = torch.arange(len(tokens), device=idx.device) + shifts[experts], int(groups.sum())
        parts = {"recv_topk_weights": _placed(weights[tokens, lanes][:, None], target, num_rows)[:, 0]}
    parts["recv_x"] = _placed(x.view(torch.uint8)[tokens].view(x.dtype), target, num_rows)
    if is_fp8:
        parts["recv_x_scales"] = _placed(scales[tokens], target, num_rows)
    return parts


def in_bf16(rows: Tensor) -> Tensor:
    return rows.bfloat16().float()


def expected_combine(
    inputs: Inputs, shape: Shape, layout: str, home: int = 0, factors: Tensor | None = None, travelled: Callable[[Tensor], Tensor] = in_bf16
) -> Tensor:
    """Return the combined_x of the rank `home`, whose inputs these are, when rows are combined as they were dispatched, with weights in the
    expert layout. Experts multiply rows by `factors` [num_experts]. `travelled` rounds what crosses a link, in fp32."""
    x, ranks = inputs.x.float(), inputs.topk_idx // shape.num_local_experts
    per_node = shape.ranks_per_node or shape.num_ranks
    total = torch.zeros_like(x)
    for first in range(0, shape.num_ranks, per_node):
        of_node = torch.zeros_like(x)
        for rank in range(first, first + per_node):
            here = ranks == rank
            row = torch.where(here.any(1)[:, None], x, 0.0)
            if layout == "expert":
                row = torch.zeros_like(x)
                for lane in range(shape.num_topk):
                    y = x if factors is None else in_bf16(x * factors[inputs.topk_idx[:, lane, None]])
                    row = row + torch.where(here[:, lane, None], inputs.topk_weights[:, lane, None] * y, 0.0)
            of_node = of_node + travelled(row)
        total = total + (of_node if home // per_node == first // per_node else travelled(of_node))
    return total.to(inputs.x.dtype)


def verify(operation: Operation, inputs: Sequence[Inputs], shape: Shape, rank: int) -> bool:
    """Make the call and compare its results bit for bit. Return True or raise EPError. `inputs` are those of all ranks. Collective."""
    result = operation.call()
    if operation.op == "combine":
        compare_bits("combined_x", result, expected_combine(inputs[rank], shape, operation.layout, rank))
        return True
    expected = expected_dispatch(inputs, shape, rank, operation.layout, operation.dtype != "bfloat16")
    for name, tensor in expected.items():
        compare_bits(name, getattr(result, name), tensor)
    return True


def close_to(what: str, actual: Tensor, expected: Tensor) -> None:
    """Raise EPError unless both tensors agree to a few roundings of bf16."""
    worst = float((actual.float() - expected.float()).abs().max()) if len(expected) else 0.0
    largest = float(expected.float().abs().max()) if len(expected) else 0.0
    if not worst <= 0.03 * largest:
        raise EPError(f"{what} is off by {worst:g} where values reach {largest:g}")
