"""Backends of GPUs, whose kernels push rows into each other's memory (csrc/cuda, csrc/runtime): `nvlink` within a host, `nvshmem` over
several nodes."""

import contextlib
import weakref
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from deepep_moe import _C, device, torch_module
from deepep_moe.device import DTYPES, call_stream, device_index
from deepep_moe.errors import Cause, EPCapacityError, EPMismatchError, EPPeerError
from deepep_moe.exchange.backends.base import (
    Backend,
    CachedDispatchArgs,
    Capabilities,
    CombineArgs,
    DispatchArgs,
    Mode,
    Move,
    MoveExpertsArgs,
    Rows,
    tell_peers,
)
from deepep_moe.exchange.handle import DispatchHandle, PackedHandle, TracedHandle
from deepep_moe.group.gpu_memory import GpuMemory, RailMemory
from deepep_moe.group.settings import Settings
from deepep_moe.tuning import SETTINGS, Machine, Values
from deepep_moe.tuning.fit import fit

if TYPE_CHECKING:
    from deepep_moe._torch import Calls as NativeCalls
    from deepep_moe._torch import Handle as NativeHandle
    from deepep_moe._torch import Mode as NativeMode


class NvlinkBackend(GpuMemory, Backend):
    """Work is enqueued on the caller's current stream, or beside it.

    A dispatch starts before this rank knows how many rows it will receive. If the last two dispatches received about as many rows, it
    allocates a sixteenth more and `recv_x` is the first rows of that. Otherwise its kernels send while the host waits for the number. A
    failure in a kernel is raised by the call if it waits for counts (an uncached dispatch), else after the buffer's next call.
    """

    name = "nvlink"
    _native: "_C.NvlinkExchange"

    def __init__(self, settings: Settings):
        self.settings = settings
        self.device: torch.device | None = torch.device("cuda", torch.cuda.current_device())
        shared = settings.lanes if settings.num_nodes == 1 else 1  # lanes of a token are one row on their way to a rank
        of_node = {"rank": settings.rank % settings.ranks_per_node, "num_topk": settings.num_topk * shared}
        self._native = _C.NvlinkExchange(
            **settings.native | of_node,
            num_nodes=settings.num_nodes,
            node=settings.node,
            device=torch.cuda.current_device(),
            num_max_tokens=max(1, settings.num_max_tokens_per_rank // shared),
            is_by_lane=settings.is_by_lane and settings.num_nodes == 1,
            expert_slot_bytes=settings.expert_slot_bytes,
        )
        self.capabilities = Capabilities(device_types=(device.GPU,), can_scale=True, shares_rows=settings.num_nodes == 1)
        self.workspace_bytes: int = self._native.workspace_bytes
        sizes = fit(self._native.num_multiprocessors, torch.cuda.get_device_capability()[0])
        self.tuning.num_sms, self.tuning.num_sms_of_sums = sizes
        self.fitted = Values(**{name: getattr(self._native.tuning, name) for name in SETTINGS})
        """Settings for the device, before any profile."""
        self._calls: NativeCalls = None  # type: ignore[assignment]  # until `native_calls`

    @property
    def num_calls(self) -> int:
        return self._native.num_calls

    @property
    def tuning(self) -> "_C.GpuTuning":
        """Return the settings by which kernels divide the GPU (`_C.GpuTuning`), for benchmarks and tests."""
        return self._native.tuning

    def use(self, values: Values) -> None:
        """Use these settings from the next call on. Results do not depend on them."""
        for name in SETTINGS:
            setattr(self._native.tuning, name, getattr(values, name))

    @property
    def machine(self) -> Machine:
        """Return the machine, as profiles name it."""
        name = torch.cuda.get_device_name(torch.cuda.current_device())
        return Machine(name, self._native.num_multiprocessors, self.settings.num_ranks, self.settings.num_nodes)

    def limit_sms(self, max_sms: int) -> None:
        self._native.tuning.max_sms = max_sms

    # ---- calls ----

    def plan(self, args: DispatchArgs) -> tuple[Rows, DispatchHandle, Move]:
        """Make the whole call: csrc/runtime/nvlink/exchange.h has the sequence."""
        output = self._calls.dispatch(
            args.x, args.x_scales, args.topk_idx, args.topk_weights, args.layout == "expert", args.expert_alignment, args.num_recv_rows,
            native_mode(args.mode),
        )  # fmt: skip
        assert output is not None  # C++ declines no call that was checked
        return Rows(output.recv_x, output.recv_x_scales, output.recv_topk_weights), PackedHandle(output.handle), output

    def dispatch_cached(self, args: CachedDispatchArgs) -> tuple[Rows, Move]:
        scaling: tuple[Tensor | None, Tensor | None] = (None, None) if args.scaling is None else (args.scaling.weights, args.scaling.x)
        output = self._calls.dispatch_cached(
            args.x, args.x_scales, args.topk_weights, self._native_handle(args.handle), *scaling, native_mode(args.mode)
        )
        assert output is not None  # C++ declines no call that was checked
        return Rows(output.recv_x, output.recv_x_scales, output.recv_topk_weights, output.grad_weights), output

    def combine(self, args: CombineArgs) -> tuple[Tensor, Tensor | None, Move]:
        output = self._calls.combine(
            args.x, self._native_handle(args.handle), args.weights, args.bias, args.topk_weight_grads, args.options,
            native_mode(args.mode),
        )  # fmt: skip
        assert output is not None  # C++ declines no call that was checked
        return output.combined_x, output.topk_weight_grads, output

    def expert_slots(self) -> Tensor:
        exchange = self._native
        memory: Tensor = torch_module.needed().bytes_at(exchange.expert_slots, self.settings.expert_slot_bytes, self.device, exchange)
        return memory

    def move_experts(self, args: MoveExpertsArgs) -> None:
        self._native.move_experts(
            copies=args.copies, slots=args.slots, home=args.home, home_strides=[tensor.stride(0) for tensor in args.home],
            returns=args.returns,
            slot_dtype=DTYPES[args.slots[0].dtype] if args.returns else DTYPES[torch.float32],
            home_dtype=DTYPES[args.home[0].dtype] if args.returns else DTYPES[torch.float32],
            num_sms=-1 if args.num_sms is None else args.num_sms, stream=call_stream(self.device),
        )  # fmt: skip

    def _native_handle(self, handle: DispatchHandle) -> "NativeHandle":
        native: NativeHandle = (handle.packed(self._calls) if isinstance(handle, TracedHandle) else handle).native
        return native

    def native_calls(self, number: int, mode: Mode) -> "NativeCalls":
        s = self.settings
        self._calls = torch_module.needed().Calls(
            owner=self._native, number=number, num_topk=s.num_topk, num_max_tokens=s.num_max_tokens_per_rank,
            num_sms=-1 if mode.num_sms is None else mode.num_sms, lanes=s.lanes, sums=s.sums, device=self.device,
            tell=partial(_tell, weakref.ref(self)),
        )  # fmt: skip
        return self._calls

    def allow_excess(self) -> None:
        self._native.allows_excess = True

    def check(self) -> None:
        self._native.check()
        _C.gpu_gate_check(device_index(self.device))

    def take_failure(self) -> Exception | None:
        if torch.cuda.is_current_stream_capturing():
            return None  # a capture must not wait for the GPU; the failure is kept for a later call
        failure = None
        try:
            self._native.check()
        except (EPPeerError, EPMismatchError, EPCapacityError, ValueError) as error:
            failure = error
        self._native.check_untold()
        return failure

    def refuse(self, message: str, cause: Cause = Cause.OTHER) -> None:
        if torch.cuda.is_current_stream_capturing():
            return  # no peer is in a call yet, and a capture must not wait for the GPU
        self._native.refuse(message, cause, call_stream(self.device))

    def abandon(self, message: str) -> None:
        """Tell the peers `message` in their next call: the rows of this call have been sent. If a kernel has failed the call, they know
        it already."""
        if not self._native.is_void:
            self.refuse(message)

    def settle(self) -> int:
        number = self._native.settle()
        with contextlib.suppress(ValueError):  # a gate may have read the rows of a failed call
            _C.gpu_gate_check(device_index(self.device))
        return number

    def destroy(self) -> None:
        if self._calls is not None:
            self._calls.release()
        if self.settings.expert_slot_bytes and self._native is not None:
            self._native.leave()  # tensors of the slots keep it
        self._native = self._calls = None  # type: ignore[assignment]  # no call comes after this


class NvshmemBackend(RailMemory, NvlinkBackend):
    """Ranks of a node exchange rows as in `NvlinkBackend`. A row crosses once to each node of its experts, to the rank with the sender's
    index there, through NVSHMEM's symmetric heap. A combine adds rows in each node before the sums cross (docs/design/nvshmem.md)."""

    name = "nvshmem"

    def __init__(self, settings: Settings):
        super().__init__(settings)
        self.capabilities = replace(self.capabilities, can_scale=False)
        self.add_rail()


def _tell(backend: "weakref.ref[NvlinkBackend]", error: BaseException, has_entered: bool) -> None:
    if (alive := backend()) is not None:
        tell_peers(alive, error, has_entered)


def native_mode(mode: Mode) -> "NativeMode":
    """Return the mode of a call that Python has checked."""
    num_sms = -1 if mode.num_sms is None else mode.num_sms
    native: NativeMode = torch_module.needed().Mode(num_sms, mode.is_async, mode.is_split, mode.layer, is_checked=True)
    return native
