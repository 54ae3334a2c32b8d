"""What a backend of a `LowLatencyBuffer` does, and the tensors of its calls."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from deepep_moe import _C
from deepep_moe.device import DTYPES
from deepep_moe.errors import BufferDestroyedError
from deepep_moe.event import Event
from deepep_moe.group.settings import Settings

DESTROYED = "this LowLatencyBuffer was destroyed; create another"


@dataclass(frozen=True)
class DispatchCall:
    """Tensors of a dispatch, checked; the last five are written."""

    x: Tensor
    topk_idx: Tensor
    topk_weights: Tensor | None
    is_rounded: bool
    handle: Tensor
    recv_x: Tensor
    recv_x_scales: Tensor | None
    num_recv_tokens_per_expert: Tensor
    statistics: Tensor


@dataclass(frozen=True)
class CombineCall:
    """Tensors of a combine, checked; the last three are written."""

    x: Tensor
    handle: Tensor
    fp8: bool
    call: Tensor
    combined_x: Tensor
    statistics: Tensor


class LowLatencyBackend:
    """One way to move the rows. A call has two halves, sending and receiving."""

    name: str
    device: torch.device

    def __init__(self, settings: Settings, communicator: Any):
        self.settings = settings
        self.process_id = os.getpid()
        self._communicator = communicator
        self.workspace_bytes: int = communicator.workspace_bytes
        self.handle_bytes: int = communicator.handle_bytes

    # ---- calls ----

    def run(self, call: DispatchCall | CombineCall) -> None:
        """Both halves."""
        self._move(call, True, True)

    def start(self, call: DispatchCall | CombineCall) -> Event:
        """Send; waiting for the event receives."""
        self._move(call, True, False)
        return Event(second_half=partial(self._move, call, False, True))

    def start_async(self, call: DispatchCall | CombineCall) -> Event:
        """Both halves, beside the caller's stream or thread."""
        raise NotImplementedError

    def _move(self, call: DispatchCall | CombineCall, sends: bool, receives: bool) -> None:
        raise NotImplementedError

    # ---- the rest ----

    def mask(self, rank: int, masked: bool) -> None:
        raise NotImplementedError

    def rejoin(self) -> None:
        raise NotImplementedError

    def refuse(self, reason: str) -> None:
        """Tell the peers, who are or will be in the same call, why this rank refuses its arguments."""
        raise NotImplementedError

    def masked(self) -> list[int]:
        masks = self._communicator.masks
        return [rank for rank in range(self.settings.num_ranks) if masks >> rank & 1]

    def check(self) -> None:
        self._communicator.check()

    def has_failed(self, state: Tensor) -> bool:
        """Has the dispatch of a handle, of which this is the memory, failed, as far as it has come?"""
        raise NotImplementedError

    def destroy(self) -> None:
        self._communicator = None

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=self.device)

    def zeros(self, shape: int | tuple[int, ...], dtype: torch.dtype) -> Tensor:
        with torch.inference_mode(False):  # it outlives the mode that it is made in
            return torch.zeros(shape, dtype=dtype, device=self.device)

    def _params(self, call: DispatchCall | CombineCall) -> Any:
        return _dispatch_params(call) if isinstance(call, DispatchCall) else _combine_params(call)

    def _method(self, call: DispatchCall | CombineCall) -> Callable[..., None]:
        if self._communicator is None:
            raise BufferDestroyedError(DESTROYED)
        return self._communicator.dispatch if isinstance(call, DispatchCall) else self._communicator.combine


def native_settings(s: Settings, mask_stalled: bool) -> dict[str, Any]:
    return {
        "num_ranks": s.num_ranks, "rank": s.rank, "num_experts": s.num_experts, "num_topk": s.num_topk, "hidden": s.hidden,
        "num_max_tokens": s.num_max_tokens_per_rank, "timeout_s": s.timeout_s, "mask_stalled": mask_stalled,
    }  # fmt: skip


def _dispatch_params(call: DispatchCall) -> Any:
    params = _C.LowLatencyDispatchParams()
    params.dtype = DTYPES[call.x.dtype]
    params.fp8, params.is_rounded = call.recv_x_scales is not None, call.is_rounded
    params.num_tokens, params.is_int64 = call.x.shape[0], call.topk_idx.dtype == torch.int64
    params.x, params.topk_idx, params.topk_weights = call.x.data_ptr(), call.topk_idx.data_ptr(), _address(call.topk_weights)
    params.has_weights = call.topk_weights is not None
    params.handle, params.statistics = call.handle.data_ptr(), call.statistics.data_ptr()
    params.recv_x, params.recv_x_scales = call.recv_x.data_ptr(), _address(call.recv_x_scales)
    params.num_recv_tokens_per_expert = call.num_recv_tokens_per_expert.data_ptr()
    return params


def _combine_params(call: CombineCall) -> Any:
    params = _C.LowLatencyCombineParams()
    params.dtype, params.fp8 = DTYPES[call.x.dtype], call.fp8
    params.num_tokens = call.combined_x.shape[0]
    params.handle, params.call, params.statistics = call.handle.data_ptr(), call.call.data_ptr(), call.statistics.data_ptr()
    params.x, params.combined_x = call.x.data_ptr(), call.combined_x.data_ptr()
    return params


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()
