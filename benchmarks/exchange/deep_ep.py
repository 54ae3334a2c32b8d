"""DeepEP's two generations, `deep_ep.Buffer` and `deep_ep.ElasticBuffer`: `--peer deep_ep`, `deep_ep_v2`, or `drop_in` on deepep_moe."""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.common.link import tokens_from_to
from benchmarks.common.peers import load_package, version_of
from benchmarks.common.verify import close_to, expected_combine
from deepep_moe.errors import EPError
from deepep_moe.tune.workload import SCALE_BLOCK, Inputs, Operation, Shape

_NUM_SMS = 24  # as in DeepEP's own benchmark
BF16, FP8 = "bfloat16", "float8_e4m3fn"


class Library:
    """The parts that both generations share. `name` is that of the peer, of which the drop-in has two."""

    buffer: Any

    def __init__(self, name: str, shape: Shape):
        self.name, self.shape, self.module = name, shape, load_package(name)
        self.combine_how: dict[str, Any] = {}
        """More arguments of its combine."""
        self.version = version_of(self.module)

    def destroy(self) -> None:
        """Free the memory. Collective."""
        self.buffer.destroy()

    def checks(self, inputs: Inputs, layout: str, received: dict[str, tuple[Any, Any]], *, is_exact: bool) -> Callable[[], None]:
        """Combine the rows that each dispatch received. Return a check of the sums, and if `is_exact` of the number of rows. Collective."""
        combine = partial(self.buffer.combine, **self.combine_how)
        sums = {what: combine(dequantized(rows), handle)[0] for what, (rows, handle) in received.items()}
        num_rows = num_rows_received(inputs, self.shape)

        def check() -> None:
            for what, (rows, _) in received.items():
                if is_exact:
                    check_num_rows(what, rows, num_rows)
                sent = dequantized_inputs(inputs) if what.startswith("fp8") else inputs
                close_to(f"the combine of its {what}, layout {layout},", sums[what], self.expected_combine(sent, layout))

        return check

    def expected_combine(self, inputs: Inputs, layout: str) -> Tensor:
        """Return the sums of a combine, which weights no row."""
        unweighted = dataclasses.replace(inputs, topk_weights=torch.ones_like(inputs.topk_weights))
        return expected_combine(unweighted, self.shape, layout)


class DeepEP(Library):
    """Runs `deep_ep.Buffer` within one host, one row per (token, rank). A dispatch has its layout kernel in it; a cached one has not."""

    def __init__(self, name: str, shape: Shape, group: "dist.ProcessGroup", num_max_tokens: int):
        """Collective. The size of its memory does not depend on `num_max_tokens`."""
        super().__init__(name, shape)
        self.module.Buffer.set_num_sms(_NUM_SMS)
        self.config, combine_config = (getattr(self.module.Buffer, f"get_{op}_config")(shape.num_ranks) for op in ("dispatch", "combine"))
        self.combine_how = {"config": combine_config}
        size = max(config.get_nvl_buffer_size_hint(2 * shape.hidden, shape.num_ranks) for config in (self.config, combine_config))
        self.buffer = self.module.Buffer(group, size, 0, explicitly_destroy=True)

    def _dispatch(self, x: Any, topk_idx: Tensor, topk_weights: Tensor) -> tuple[Any, ...]:
        per_rank, _, per_expert, is_token_in_rank, _ = self.buffer.get_dispatch_layout(topk_idx, self.shape.num_experts)
        return self.buffer.dispatch(
            x, num_tokens_per_rank=per_rank, is_token_in_rank=is_token_in_rank, num_tokens_per_expert=per_expert, topk_idx=topk_idx,
            topk_weights=topk_weights, config=self.config,
        )  # fmt: skip

    def operations(self, inputs: Inputs) -> list[Operation]:
        """Return its calls, after a check that they do the same work. Collective; raises EPError."""
        arguments = inputs.topk_idx.to(topk_dtype(self.module)), inputs.topk_weights
        calls = {("dispatch", dtype): partial(self._dispatch, x, *arguments) for dtype, x in rows_of(inputs).items()}
        received = {dtype: calls["dispatch", dtype]() for dtype in (BF16, FP8)}
        rows, handle = received[BF16][0], received[BF16][4]
        calls["combine", BF16] = partial(self.buffer.combine, rows, handle, **self.combine_how)
        calls["cached dispatch", BF16] = partial(self.buffer.dispatch, inputs.x, handle=handle, config=self.config)
        again = calls["cached dispatch", BF16]()[0]
        sent = {"dispatch": (rows, handle), "cached dispatch": (again, handle), "fp8 dispatch": (received[FP8][0], received[FP8][4])}
        self.checks(inputs, "rank", sent, is_exact=True)()
        return [Operation(op, t, "rank", self.shape.row_bytes(t), call, _NUM_SMS, self.name) for (op, t), call in calls.items()]


class DeepEPV2(Library):
    """Runs `deep_ep.ElasticBuffer` within one host, with its own choice of SMs.

    Layout `rank` is its compact one, a row per (token, rank). Layout `expert` is its expanded one, rows grouped and padded by expert; it
    leaves the padding as it is. Its combine applies no weights in either layout, so it has less to do than ours of the expert layout.
    """

    def __init__(self, name: str, shape: Shape, group: "dist.ProcessGroup", num_max_tokens: int):
        """Collective. The buffer's size is that for rows in bf16, which rows in fp8 fit in."""
        super().__init__(name, shape)
        sizes = {"num_max_tokens_per_rank": num_max_tokens, "hidden": shape.hidden, "num_topk": shape.num_topk}
        self.buffer = self.module.ElasticBuffer(group, **sizes, use_fp8_dispatch=False, explicitly_destroy=True)

    def operations(self, inputs: Inputs) -> list[Operation]:
        """Return its calls, after a check that they do the same work. Collective; raises EPError."""
        by_layout = [self.of_layout(inputs, layout) for layout in ("rank", "expert")]
        for _, check in by_layout:
            check()  # last, as it may raise on one rank alone
        return [operation for operations, _ in by_layout for operation in operations]

    def of_layout(self, inputs: Inputs, layout: str, *, do_cpu_sync: bool | None = None) -> tuple[list[Operation], Callable[[], None]]:
        """Return the calls of one layout, and a check of their results that raises EPError. Collective; the check is not.

        If `do_cpu_sync` is False, the host waits for no counts; None is the library's default.
        """
        is_expert = layout == "expert"
        how: dict[str, Any] = {"num_experts": self.shape.num_experts, "do_expand": is_expert, "do_cpu_sync": do_cpu_sync}
        how["expert_alignment"] = self.shape.expert_alignment if is_expert else 1
        arguments = inputs.topk_idx.to(topk_dtype(self.module)), inputs.topk_weights
        calls: dict[tuple[str, str], Callable[[], Any]] = {
            ("dispatch", dtype): partial(self.buffer.dispatch, x, *arguments, **how) for dtype, x in rows_of(inputs).items()
        }
        received = {dtype: calls["dispatch", dtype]() for dtype in (BF16, FP8)}
        rows, handle = received[BF16][0], received[BF16][3]
        calls["combine", BF16] = partial(self.buffer.combine, rows, handle)
        again = {"handle": handle, "do_expand": is_expert, "num_experts": self.shape.num_experts}  # asked for, though the handle has it
        cached = partial(self.buffer.dispatch, inputs.x, topk_weights=inputs.topk_weights, **again)
        calls["cached dispatch", BF16] = cached
        sent = {"dispatch": (rows, handle), "cached dispatch": (cached()[0], handle), "fp8 dispatch": (received[FP8][0], received[FP8][3])}
        check = self.checks(inputs, layout, sent, is_exact=not is_expert and do_cpu_sync is not False)
        num_sms = getattr(handle, "num_sms", None)
        return [Operation(op, t, layout, self.shape.row_bytes(t), call, num_sms, self.name) for (op, t), call in calls.items()], check


KINDS: dict[str, Callable[[str, Shape, "dist.ProcessGroup", int], DeepEP | DeepEPV2]] = {
    "deep_ep": DeepEP, "deep_ep_v2": DeepEPV2, "drop_in": DeepEP, "drop_in_v2": DeepEPV2,
}  # fmt: skip
"""What stands for each peer: of its name, the shape, the group and the most tokens of a rank. Collective."""


# ---- for both generations ----


def topk_dtype(module: Any) -> torch.dtype:
    return getattr(module, "topk_idx_t", torch.int64)


def rows_of(inputs: Inputs) -> dict[str, Any]:
    """Return what a dispatch takes, by dtype: rows, or a pair of fp8 rows and scales."""
    return {BF16: inputs.x, FP8: (inputs.x_fp8, inputs.x_scales)}


def dequantized(rows: Any) -> Tensor:
    """Return rows [..., hidden] in bf16, of what a dispatch returns or takes."""
    if not isinstance(rows, (tuple, list)):
        return rows
    y, scales = rows
    columns = scales.repeat_interleave(SCALE_BLOCK, dim=-1)[..., : y.shape[-1]]
    return (y.float() * columns).bfloat16()


def dequantized_inputs(inputs: Inputs) -> Inputs:
    """Return inputs whose rows in bf16 are what those in fp8 stand for."""
    return dataclasses.replace(inputs, x=dequantized((inputs.x_fp8, inputs.x_scales)))


def num_rows_received(inputs: Inputs, shape: Shape) -> int:
    """Return the number of (token, rank) rows that this rank receives. Collective."""
    return int(tokens_from_to(inputs.topk_idx, shape)[:, dist.get_rank()].sum())


def check_num_rows(what: str, rows: Any, expected: int) -> None:
    """Raise EPError unless a dispatch has returned `expected` rows."""
    num_rows = len(rows[0] if isinstance(rows, (tuple, list)) else rows)
    if num_rows != expected:
        raise EPError(f"its {what} returned {num_rows} rows, and not {expected}")
