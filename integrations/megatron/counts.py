"""Rows per expert on the host, where Megatron-Core's experts want them."""

import torch

from deepep_moe.handle import DispatchHandle, padded


class HostCounts:
    """Brings the counts of a dispatch to the host.

    A plain copy on the stream of the dispatch waits for all its rows, and the GPU for the experts to be launched after that. The counts
    are there before the rows: an uncached dispatch through `nvlink` returns once the host has seen the totals that were made from
    them. So a stream of its own copies them while the rows are on their way.
    """

    def __init__(self) -> None:
        self._stream: torch.cuda.Stream | None = None
        self._pinned = torch.empty(0, dtype=torch.int32)

    def rows_per_expert(self, handle: DispatchHandle, *, early: bool) -> torch.Tensor:
        """[num_local_experts] int64 on the CPU, padding included. `early`: the counts are there already, whatever else is in flight."""
        counts = handle.num_recv_tokens_per_expert
        if early and counts.is_cuda:
            rows = padded(self._copy(counts), handle.expert_alignment).long()
            # A check that costs nothing: their sum is known here.
            if int(rows.sum()) == handle.num_rows:
                return rows
        return padded(counts.cpu(), handle.expert_alignment).long()

    def _copy(self, counts: torch.Tensor) -> torch.Tensor:
        if self._stream is None:
            self._stream = torch.cuda.Stream(counts.device)
            self._pinned = torch.empty(counts.shape, dtype=counts.dtype, pin_memory=True)
        with torch.cuda.stream(self._stream):
            self._pinned.copy_(counts, non_blocking=True)
        self._stream.synchronize()
        return self._pinned
