"""DeepEP's two generations, `deep_ep.Buffer` and `deep_ep.ElasticBuffer`: `--peer deep_ep`, `deep_ep_v2`, or `drop_in` on deepep_moe."""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.common.peers import load_package, version_of
from benchmarks.common.verify import close_to, dequantized, dequantized_inputs, expected_combine
from benchmarks.common.workload import Inputs, Operation, Shape

_NUM_SMS = 24  # as in DeepEP's own benchmark
BF16, FP8 = "bfloat16", "float8_e4m3fn"


class Library:
    """The parts that both generations share. `name` is that of the peer, of which the drop-in has two."""

    layouts: tuple[str, ...] = ("rank",)
    buffer: Any

    def __init__(self, name: str, shape: Shape):
        self.name, self.shape, self.module = name, shape, load_package(name)
        self.combine_how: dict[str, Any] = {}
        """More arguments of its combine."""
        self.version = version_of(self.module)
        self.topk_dtype: torch.dtype = getattr(self.module, "topk_idx_t", torch.int64)

    def destroy(self) -> None:
        """Free the memory. Collective."""
        self.buffer.destroy()

    def listed(
        self, inputs: Inputs, layout: str, dispatch: Callable[[Any], Any], cached: Callable[[Any], Any], handle_at: int,
        num_sms: int | None = None,
    ) -> list[Operation]:  # fmt: skip
        """Return the calls of one layout, after a check of the sums of what they brought. Collective; raises EPError.

        `dispatch` takes rows, `cached` a handle, which stands at `handle_at` of what `dispatch` returns.
        """
        calls = {("dispatch", dtype): partial(dispatch, x) for dtype, x in ((BF16, inputs.x), (FP8, (inputs.x_fp8, inputs.x_scales)))}
        received = {dtype: calls["dispatch", dtype]() for dtype in (BF16, FP8)}
        rows, handle = received[BF16][0], received[BF16][handle_at]
        combine = partial(self.buffer.combine, **self.combine_how)
        calls["combine", BF16] = partial(combine, rows, handle)
        calls["cached dispatch", BF16] = partial(cached, handle)
        brought = {"dispatch": rows, "cached dispatch": calls["cached dispatch", BF16]()[0]}
        sums = {what: combine(rows, handle)[0] for what, rows in brought.items()}
        sums["fp8 dispatch"] = combine(dequantized(received[FP8][0]), received[FP8][handle_at])[0]
        for what, actual in sums.items():  # last, as it may raise on one rank alone
            sent = dequantized_inputs(inputs) if what.startswith("fp8") else inputs
            close_to(f"the combine of its {what}, layout {layout},", actual, self.expected_combine(sent, layout))
        num_sms = getattr(handle, "num_sms", None) if num_sms is None else num_sms
        return [Operation(op, t, layout, self.shape.row_bytes(t), call, num_sms, self.name) for (op, t), call in calls.items()]

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

    def operations(self, inputs: Inputs, layout: str) -> list[Operation]:
        """Return its calls, after a check that they do the same work. Collective; raises EPError."""
        arguments = inputs.topk_idx.to(self.topk_dtype), inputs.topk_weights

        def cached(handle: Any) -> Any:
            return self.buffer.dispatch(inputs.x, handle=handle, config=self.config)

        return self.listed(inputs, layout, lambda x: self._dispatch(x, *arguments), cached, 4, _NUM_SMS)


class DeepEPV2(Library):
    """Runs `deep_ep.ElasticBuffer` within one host, with its own choice of SMs.

    Layout `rank` is its compact one, a row per (token, rank). Layout `expert` is its expanded one, rows grouped and padded by expert; it
    leaves the padding as it is. Its combine applies no weights in either layout, so it has less to do than ours of the expert layout.
    """

    layouts = ("rank", "expert")

    def __init__(self, name: str, shape: Shape, group: "dist.ProcessGroup", num_max_tokens: int):
        """Collective. The buffer's size is that for rows in bf16, which rows in fp8 fit in."""
        super().__init__(name, shape)
        sizes = {"num_max_tokens_per_rank": num_max_tokens, "hidden": shape.hidden, "num_topk": shape.num_topk}
        self.buffer = self.module.ElasticBuffer(group, **sizes, use_fp8_dispatch=False, explicitly_destroy=True)

    def operations(self, inputs: Inputs, layout: str, *, do_cpu_sync: bool | None = None) -> list[Operation]:
        """Return its calls, after a check that they do the same work. Collective; raises EPError.

        If `do_cpu_sync` is False, the host waits for no counts; None is the library's default.
        """
        is_expert = layout == "expert"
        asked: dict[str, Any] = {"num_experts": self.shape.num_experts, "do_expand": is_expert}
        how = asked | {"do_cpu_sync": do_cpu_sync, "expert_alignment": self.shape.expert_alignment if is_expert else 1}
        idx, weights = inputs.topk_idx.to(self.topk_dtype), inputs.topk_weights

        def cached(handle: Any) -> Any:  # num_experts is asked for, though the handle has it
            return self.buffer.dispatch(inputs.x, topk_weights=weights, handle=handle, **asked)

        return self.listed(inputs, layout, lambda x: self.buffer.dispatch(x, idx, weights, **how), cached, 3)


KINDS: dict[str, Callable[[str, Shape, "dist.ProcessGroup", int], DeepEP | DeepEPV2]] = {
    "deep_ep": DeepEP, "deep_ep_v2": DeepEPV2, "drop_in": DeepEP, "drop_in_v2": DeepEPV2,
}  # fmt: skip
"""What stands for each peer: of its name, the shape, the group and the most tokens of a rank. Collective."""
