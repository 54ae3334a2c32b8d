"""Other libraries beside `LowLatencyBuffer` in the same run: `--peer NAME`."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.common.verify import close_to, compare_bits, dequantized
from benchmarks.common.workload import Inputs, Shape
from benchmarks.exchange.deep_ep import FP8, DeepEPV2, Library
from benchmarks.low_latency.operations import Hook, LowLatencyOperation, expected_combine, expected_dispatch, expert_rows, received

_MULTIPLE = 4  # V1 wants a number of rows that its bulk copies can address


class DeepEPLowLatency(Library):
    """Runs `deep_ep.Buffer` in its low-latency mode, which needs NVSHMEM. Its dispatch quantizes the rows, its combine weights them.

    It sends a row for every (token, expert). Records count the bytes of one for every (token, rank), which are those that must move.
    """

    def __init__(self, shape: Shape, group: "dist.ProcessGroup", num_max_tokens: int):
        """Collective. NVSHMEM starts once in a process, so one buffer serves batches of up to `num_max_tokens` tokens a rank."""
        super().__init__("deep_ep", shape)
        sizes = _rounded(num_max_tokens), shape.hidden, shape.num_ranks, shape.num_experts
        self.workspace_bytes: int | None = self.module.Buffer.get_low_latency_rdma_size_hint(*sizes)
        self.buffer = self.module.Buffer(
            group, 0, self.workspace_bytes, low_latency_mode=True, num_qps_per_rank=shape.num_local_experts,
            allow_nvlink_for_low_latency_mode=True, explicitly_destroy=True,
        )  # fmt: skip

    def operations(self, everyone: Sequence[Inputs], rank: int) -> list[LowLatencyOperation]:
        """Return dispatch in fp8 and bf16, and combine. Collective: combine takes the rows of a dispatch, multiplied as our experts do."""
        mine, most = everyone[rank], _rounded(len(everyone[rank].x))
        self.buffer.clean_low_latency_buffer(most, self.shape.hidden, self.shape.num_experts)  # places of flags depend on the size
        dist.barrier()
        idx, listed = mine.topk_idx.to(self.topk_dtype), []
        for wire in ("fp8", "bf16"):
            dispatch = partial(self.buffer.low_latency_dispatch, mine.x, idx, most, self.shape.num_experts, use_fp8=wire == "fp8")
            check = partial(_check_dispatch, expected_dispatch(everyone, self.shape, rank, wire))
            listed.append(self._operation("dispatch", wire, dispatch, check))
        rows, counts, handle, *_ = dispatch()
        outputs = expert_rows(rows, counts, self.shape, rank, torch.empty_like(rows))
        combine = partial(self.buffer.low_latency_combine, outputs, idx, mine.topk_weights, handle)
        expected = expected_combine(mine, self.shape, "bf16", rank)
        listed.append(self._operation("combine", "bf16", combine, partial(_check_combine, expected)))
        return listed

    def _operation(self, op: str, wire: str, call: Callable[..., Any], check: Callable[[Any], None]) -> LowLatencyOperation:
        dtype = "bfloat16" if wire == "bf16" else FP8
        how: dict[str, Any] = {"wire": wire, "check": check, "send": partial(_in_halves, call), "backend": self.name}
        return LowLatencyOperation(op, dtype, "expert", self.shape.row_bytes(dtype), call, **how)


def _rounded(num_tokens: int) -> int:
    return -(-num_tokens // _MULTIPLE) * _MULTIPLE


def _in_halves(call: Callable[..., Any]) -> tuple[Any, Hook]:
    *result, hook = call(return_recv_hook=True)
    return result, hook


def _check_dispatch(expected: dict[str, Tensor], result: Any) -> None:
    """Raise EPError unless each expert got as many rows as it must, and their sum is right: a library may order them as it likes."""
    rows, counts, wanted = dequantized(result[0]), result[1], expected["num_recv_tokens_per_expert"]
    compare_bits("the number of rows that its dispatch brought to experts", counts, wanted)
    right = dequantized((expected["recv_x"], expected["recv_x_scales"]) if "recv_x_scales" in expected else expected["recv_x"])
    experts = torch.arange(len(wanted), device=rows.device).repeat_interleave(wanted)
    none = torch.zeros(len(wanted), rows.shape[-1], device=rows.device)
    sums, right_sums = (none.index_add(0, experts, part.float()) for part in (rows[received(rows, counts)], right))
    close_to("the sum of the rows that its dispatch brought to an expert", sums, right_sums)


def _check_combine(expected: Tensor, result: Any) -> None:
    close_to("its combined_x", result[0], expected)


class DeepEPV2SmallBatches:
    """Runs `deep_ep.ElasticBuffer` in its compact layout, without waiting for counts on the host. It takes fp8 rows that are quantized
    before the call, and its combine weights no row, so it has less to do than ours. Its calls have no halves.
    """

    name, workspace_bytes = "deep_ep_v2", None

    def __init__(self, shape: Shape, group: "dist.ProcessGroup", num_max_tokens: int):
        """Collective, as are the buffers for the sizes, which are made when their size is measured."""
        self.make = partial(DeepEPV2, self.name, shape, group)
        self.sized = self.make(num_max_tokens)
        self.version = self.sized.version

    def destroy(self) -> None:
        """Free the memory. Collective."""
        self.sized.destroy()

    def operations(self, everyone: Sequence[Inputs], rank: int) -> list[LowLatencyOperation]:
        """Return dispatch in both dtypes and combine. Collective; raises EPError unless their results are right."""
        mine = everyone[rank]
        self.destroy()
        self.sized = self.make(len(mine.x))
        expected = self.sized.expected_combine(mine, "rank")
        listed = []
        for o in self.sized.operations(mine, "rank", do_cpu_sync=False):
            if o.op in ("dispatch", "combine"):
                wire = "fp8" if o.dtype == FP8 else "bf16"
                # A dispatch was checked through a combine.
                check = partial(_check_combine, expected) if o.op == "combine" else lambda result: None
                what = o.op, o.dtype, o.layout, o.row_bytes, o.call
                listed.append(LowLatencyOperation(*what, wire=wire, check=check, backend=self.name))
        return listed


SmallBatches = DeepEPLowLatency | DeepEPV2SmallBatches
PEERS: dict[str, Callable[[Shape, "dist.ProcessGroup", int], SmallBatches]] = {
    "deep_ep": DeepEPLowLatency,
    "deep_ep_v2": DeepEPV2SmallBatches,
}
"""The names that `--peer` takes."""
