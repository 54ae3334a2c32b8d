"""Shared parts of the tests of DeepEP's interfaces, which run in workers: a routing of all ranks and the reference's results."""

import os
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from exchange_cases import NVLINK, Case, assert_same, device_of, inputs_of, poison_outputs

from deepep_moe import ops, reference
from deepep_moe.compat import deep_ep

SIZES = {"hidden": 256, "dtype": torch.bfloat16, "pattern": "masked"}
BACKENDS = ("shm", NVLINK)
in_both_dtypes = pytest.mark.parametrize("fp8", (False, True), ids=("bf16", "fp8"))
in_both_modes = pytest.mark.parametrize("is_async", (False, True), ids=("sync", "async"))


def make(kind: str, backend: str, rank: int, *sizes: Any, **settings: Any) -> tuple[Any, torch.device]:
    """A buffer of a class of deep_ep's, and where its tensors lie."""
    poison_outputs()
    device = device_of(backend, rank)
    return getattr(deep_ep, kind)(dist.group.WORLD, *sizes, **settings), device


def ascending(case: Case) -> list[torch.Tensor]:
    """Return all ranks' routings in the order of maps: a token's experts ascend, then come the -1 entries."""
    idxs = [case.routing(rank) for rank in range(case.num_ranks)]
    in_order = [torch.where(idx < 0, case.num_experts, idx).sort(1).values for idx in idxs]
    return [torch.where(idx == case.num_experts, -1, idx) for idx in in_order]


class Wanted:
    """The results of a case on this rank, from the inputs of all ranks; `topk_idx` replaces the case's routing. Buffers that are made
    afterwards have its sums."""

    def __init__(self, case: Case, rank: int, layout: str = "rank", fp8: bool = False, topk_idx: list[torch.Tensor] | None = None):
        xs, idxs, weights = inputs_of(case)
        self.case, self.rank = case, rank
        os.environ["DEEPEP_MOE_SUMS"] = case.sums
        self.idxs = idxs if topk_idx is None else topk_idx
        self.x, self.topk_idx, self.topk_weights = case.inputs(rank)
        self.scales = None
        scales = None
        if fp8:
            xs, scales = (list(column) for column in zip(*map(ops.quantize_fp8, xs), strict=True))
            self.x, self.scales = xs[rank], scales[rank]
        how: dict[str, Any] = {"layout": layout, "expert_alignment": case.expert_alignment}
        self.received = reference.dispatch(xs, self.idxs, weights, case.num_experts, x_scales=scales, **how)
        self.mine = self.received[rank]
        dtype = torch.bfloat16 if fp8 else case.dtype
        self.outputs = [case.expert_outputs(r, len(there.recv_x)).to(dtype) for r, there in enumerate(self.received)]

    def x_on(self, device: torch.device) -> Any:
        """x, or a pair whose scales lie in column order, as DeepEP's callers keep them."""
        return self.x.to(device) if self.scales is None else (self.x.to(device), self.scales.to(device).T.contiguous().T)

    def routing(self, device: torch.device) -> dict[str, torch.Tensor]:
        return {"topk_idx": self.topk_idx.to(device), "topk_weights": self.topk_weights.to(device)}

    def in_rank(self, rank: int) -> torch.Tensor:
        """[num_tokens, num_ranks] bool, of a rank's tokens."""
        per_rank = self.case.num_experts // self.case.num_ranks
        owners = torch.where(self.idxs[rank] >= 0, self.idxs[rank] // per_rank, -1)
        return (owners[:, :, None] == torch.arange(self.case.num_ranks)).any(1)

    @property
    def num_rows_per_expert(self) -> list[int]:
        alignment = self.case.expert_alignment
        return [-(-count // alignment) * alignment for count in self.mine.num_recv_tokens_per_expert]

    def lanes(self, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
        """Numbers that lie as recv_topk_weights does, and what a combine brings back of them."""
        values = [there.recv_topk_weights * scale for there in self.received]
        return values[self.rank], reference.combine_lane_values(values, self.received, self.idxs)[self.rank]

    def check_rows(self, recv_x: Any) -> None:
        """Rows beyond those of the reference are room."""
        parts = recv_x if isinstance(recv_x, tuple) else (recv_x, None)
        for part, want in zip(parts, (self.mine.recv_x, self.mine.recv_x_scales), strict=True):
            assert_same("recv_x", None if part is None else part[: len(self.mine.recv_x)], want)

    def combined(self, bias: torch.Tensor | None = None, outputs: list[torch.Tensor] | None = None) -> torch.Tensor:
        biases = None
        if bias is not None:
            biases = [torch.zeros(n, self.case.hidden, dtype=bias.dtype) for n in self.case.num_tokens]
            biases[self.rank] = bias
        return reference.combine(outputs or self.outputs, self.received, self.case.num_tokens, None, biases, sums=self.case.sums)[self.rank]

    def biases(self, device: torch.device) -> Any:
        """Biases that callers may pass: none, a tensor, one with a gradient, or two. Each comes with its sum."""
        bias = self.case.bias(self.rank).to(self.outputs[self.rank].dtype)
        on_device = bias.to(device)
        return (
            (None, None),
            ((None, None), None),
            (on_device.clone().requires_grad_(), bias),
            ((None, on_device), bias),
            ((on_device, on_device.flip(0)), bias + bias.flip(0)),
        )


def check_start(name: str, ours: torch.Tensor, want: torch.Tensor, rest: float = 0) -> None:
    """The first rows are `want`, all others hold `rest`."""
    assert_same(name, ours[: len(want)], want)
    assert (ours[len(want) :].float() == rest).all(), f"{name}: rows behind the last group"


def padded(rows: torch.Tensor, num_rows: int, rest: float = float("nan")) -> torch.Tensor:
    """`rows` and then NaN, which no call may read."""
    return torch.cat([rows, rows.new_full((num_rows - len(rows), *rows.shape[1:]), rest)])


# ---- calls of every version in one form: dispatch(x, handle=None, idx, weights) and combine(x, handle, topk_weights=None) ----


def version_1(group: Any, num_experts: int, hidden: int) -> tuple[Any, ...]:
    buffer = deep_ep.Buffer(group)

    def dispatch(x: Any, idx: torch.Tensor, w: torch.Tensor, handle: Any = None) -> tuple[Any, ...]:
        routing = (
            {} if handle else {"topk_idx": idx, "topk_weights": w, "num_tokens_per_expert": buffer.get_dispatch_layout(idx, num_experts)[2]}
        )
        out = buffer.dispatch(x, handle, **routing)
        return out[0], out[2], out[4]

    return buffer, dispatch, lambda *args, **how: buffer.combine(*args, **how)[:2]


def version_2(group: Any, num_experts: int, hidden: int, do_expand: bool = False) -> tuple[Any, ...]:
    buffer = deep_ep.ElasticBuffer(group, num_max_tokens_per_rank=16)

    def dispatch(x: Any, idx: torch.Tensor, w: torch.Tensor, handle: Any = None) -> tuple[Any, ...]:
        routing = {"topk_weights": w} if handle else {"topk_idx": idx, "topk_weights": w, "num_experts": num_experts}
        recv_x, _, recv_w, handle, _ = buffer.dispatch(x, **routing, handle=handle, do_expand=do_expand)
        return recv_x, recv_w, handle

    return buffer, dispatch, lambda *args, **how: buffer.combine(*args, **how)[:2]


def version_2_5(group: Any, num_experts: int, hidden: int) -> tuple[Any, ...]:
    buffer = deep_ep.EPBuffer(group, num_max_tokens_per_rank=16)

    def dispatch(x: Any, idx: torch.Tensor, w: torch.Tensor, handle: Any = None) -> tuple[Any, ...]:
        routing = {} if handle else {"topk_idx": idx, "topk_weights": w, "num_experts": num_experts}
        recv_x, _, recv_w, handle = buffer.dispatch(x, **routing, handle=handle, defer_epilogue=True).current_stream_wait()
        return recv_x, recv_w, handle

    return buffer, dispatch, lambda *args, **how: buffer.combine(*args, **how, defer_epilogue=True).current_stream_wait()


def hybrid(group: Any, num_experts: int, hidden: int, permutes: bool = False) -> tuple[Any, ...]:
    buffer = deep_ep.HybridEPBuffer(group, hidden, 16, num_experts // dist.get_world_size(group))

    def dispatch(x: Any, idx: torch.Tensor, w: torch.Tensor, handle: Any = None) -> tuple[Any, ...]:
        x, scales = (x[0], x[1].contiguous()) if isinstance(x, tuple) else (x, None)
        how = {"hidden": x, "scaling_factor": scales, "topk_idx": idx, "topk_weights": w, "num_of_experts": num_experts, "handle": handle}
        recv_x, probs, scales, *_, handle = (buffer.dispatch_with_permute if permutes else buffer.dispatch)(**how)
        return recv_x if scales is None else (recv_x, scales), probs, handle

    def combine(x: torch.Tensor, handle: Any, topk_weights: torch.Tensor | None = None) -> tuple[Any, ...]:
        return (buffer.combine_with_unpermute if permutes else buffer.combine)(hidden=x, probs=topk_weights, handle=handle)

    return buffer, dispatch, combine


VERSIONS = {
    "V1": version_1, "V2": version_2, "V2_expanded": partial(version_2, do_expand=True), "V2_5": version_2_5,
    "hybrid": hybrid, "hybrid_permuted": partial(hybrid, permutes=True),
}  # fmt: skip
