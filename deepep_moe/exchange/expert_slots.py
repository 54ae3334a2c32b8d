"""`ExpertSlots` holds copies of other ranks' experts, and brings their gradients home."""

from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from deepep_moe import _C
from deepep_moe.arguments import as_int, check_is_tensor
from deepep_moe.device import FLOATS
from deepep_moe.errors import EPError, describe
from deepep_moe.exchange.backends.base import Backend, MoveExpertsArgs, tell_peers
from deepep_moe.exchange.backends.select import make_backend
from deepep_moe.exchange.checks import check_num_sms
from deepep_moe.group.reach import are_on_gpus, find_nodes
from deepep_moe.group.rendezvous import introduce, join
from deepep_moe.group.settings import Settings, check_settings

_Tensors = Tensor | Sequence[Tensor]
_BACKENDS = ("auto", "nvlink", "collective")
ALIGNMENT = 128
"""Each tensor in the slots begins at a multiple of this many bytes."""
_MAX_TENSORS = 8
"""One call moves at most this many tensors."""
MAX_SLOTS = 32
"""A rank holds at most this many copies."""
_MAX_EXPERTS = 2**15 - 1


class ExpertSlots:
    """Holds copies of other ranks' experts in memory of this rank.

    Rank r of R is the home of experts r * E / R to (r + 1) * E / R - 1. The tensors at home have E / R as first dimension. The parameters
    stay at home, where `fetch` reads them and `return_gradients` adds gradients.

    Both are collective: all ranks make the same calls in the same order, with equal `copies` and with slots at the same places, from one
    thread. On GPUs the calls run on the current stream and return at once. A failure there is raised by the next call, or by `check`. Calls
    of another object or of a Buffer may run beside them, on another stream.

    Args:
        group, timeout_s: as for `Buffer`.
        num_bytes: memory of each rank for the slots.

        backend: "auto", "nvlink" or "collective". "auto" takes `nvlink` if every rank sees a GPU of one host and the group has NCCL, else
            `collective`. `nvlink` moves the copies by kernels: no host reads `copies`, and both calls can be captured in CUDA graphs.
            `collective` uses the group's own collectives, on GPUs too.

    Raises: as `Buffer`.
    """

    backend: str
    """The name of the backend in use."""
    memory: Tensor
    """[num_bytes, rounded up to 128] uint8. Its tensors stay valid after `destroy`."""

    def __init__(self, group: "dist.ProcessGroup | None", num_bytes: int, *, backend: str = "auto", timeout_s: float | None = None) -> None:
        group, num_ranks, rank = join(group, "ExpertSlots")
        s = Settings(num_ranks, rank, 1, _C.ROW_ALIGNMENT, num_ranks, 1, 300.0)  # sizes of an exchange that moves no rows
        error: Exception | None = None
        try:
            num_bytes = as_int("num_bytes", num_bytes, least=1)
            s = replace(check_settings(s, backend, _BACKENDS, timeout_s), expert_slot_bytes=_aligned(num_bytes))
        except Exception as refused:
            error = refused
        peers = introduce(s, backend, 1, error, group, kind="ExpertSlots")
        s = find_nodes(s, peers)
        if backend == "auto" and not (are_on_gpus(peers) and s.num_nodes == 1):
            backend = "collective"
        self._num_ranks, self._used = num_ranks, 0
        self._backend: Backend | None = make_backend(backend, s, peers, group)
        self.backend = self._backend.name
        self.memory = self._backend.expert_slots()

    def empty(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """Return a new tensor [num_slots, ...] in the memory, uninitialized; all ranks must take the same tensors in the same order.

        Raises:
            ValueError: the memory is full.
        """
        num_bytes = torch.Size(shape).numel() * dtype.itemsize
        end = self._used + num_bytes
        if end > len(self.memory):
            raise ValueError(f"{num_bytes} bytes were asked for, and {len(self.memory) - self._used} of num_bytes are left")
        part = self.memory[self._used : end]
        self._used = _aligned(end)
        return part.view(dtype).view(shape)

    def fetch(
        self, copies: Tensor, slots: Tensor | Sequence[Tensor], weights: Tensor | Sequence[Tensor], *, num_sms: int | None = None
    ) -> None:
        """Fill slots with copies: slot j gets the weights of expert `copies[rank, j]` from its home. Slots of -1 stay as they are.

        copies: [num_ranks, num_slots] int32, contiguous: the expert in each slot of each rank, or -1. A copy is on another rank than home,
            and a rank holds an expert once. At most 32 slots.
        slots: at most 8 tensors [num_slots, ...] in `memory`.
        weights: as many tensors [num_local_experts, ...] of any dtype and shape. Each expert is contiguous, and may lie anywhere at equal
            distances. It has as many bytes as its slot; bytes and distances are multiples of 16.
        num_sms: SMs of a GPU that send, 1 or more. None: as many as a dispatch takes without a profile (docs/tuning.md).

        Raises:
            TypeError: an argument has another type or dtype.
            ValueError: an argument has another shape, device or value.
            EPPeerError: a peer has raised one of these.
            EPMismatchError: ranks disagree, but different `copies` on GPUs are not seen.
            EPTimeoutError: a peer died or stalled.
        """
        self._move(copies, slots, weights, False, num_sms)

    def return_gradients(
        self, copies: Tensor, slots: Tensor | Sequence[Tensor], grads: Tensor | Sequence[Tensor], *, num_sms: int | None = None
    ) -> None:
        """Add the gradients in slots to those of the same experts at home: in fp32, home first, then copies by ascending ranks, with one
        rounding to the dtype of grads. So results are equal in every run.

        slots, grads: as in `fetch`. All slots have one dtype: float32, bfloat16 or float16; grads are float32, or as slots are. An expert
            has a multiple of 8 elements in each.
        num_sms: SMs of a GPU that read. None: twice as many as in `fetch`.

        Raises: as `fetch`.
        """
        self._move(copies, slots, grads, True, num_sms)

    def check(self) -> None:
        """Look at what a GPU has reported of earlier calls. Not collective. Raises: as `fetch`."""
        self._alive().check()

    @property
    def num_calls(self) -> int:
        """Return the number of calls that this rank has made."""
        return self._backend.num_calls if self._backend is not None else -1

    def refuse(self, error: BaseException) -> None:
        """Make the peers raise EPPeerError with this error in their next call, which this rank does not make."""
        if self._backend is not None:
            self._backend.refuse(describe(error))

    def destroy(self) -> None:
        """Leave the peers: on `nvlink` their calls raise EPPeerError then. Not collective, may be repeated. The memory lives as long as
        this object or a tensor of it."""
        if self._backend is not None:
            self._backend.destroy()
        self._backend = None

    def _alive(self) -> Backend:
        if self._backend is None:
            raise EPError("these ExpertSlots were destroyed; create new ones")
        return self._backend

    def _move(self, copies: Tensor, slots: _Tensors, home: _Tensors, returns: bool, num_sms: int | None) -> None:
        backend = self._alive()
        try:
            failure = backend.take_failure()  # raised once this call is made, so that ranks stay in step
            args = self._checked(copies, slots, home, returns, num_sms)
        except Exception as error:
            backend.refuse(describe(error))
            raise
        num_calls = backend.num_calls
        try:
            backend.move_experts(args)
        except BaseException as error:
            tell_peers(backend, error, has_entered=backend.num_calls > num_calls)
            raise
        if failure is not None:
            raise failure

    def _checked(self, copies: Tensor, of_slots: _Tensors, of_home: _Tensors, returns: bool, num_sms: int | None) -> MoveExpertsArgs:
        """Return the call's arguments. Raises TypeError or ValueError."""
        slots, home = ([side] if isinstance(side, Tensor) else list(side) for side in (of_slots, of_home))
        at_home = "grads" if returns else "weights"
        if not 1 <= len(slots) == len(home) <= _MAX_TENSORS:
            raise ValueError(f"{len(slots)} tensors of slots and {len(home)} of {at_home}; give 1 to {_MAX_TENSORS} of both")
        check_is_tensor("copies", copies)
        wanted = copies.dtype == torch.int32 and copies.dim() == 2 and copies.shape[0] == self._num_ranks and copies.is_contiguous()
        if not wanted or not 1 <= copies.shape[1] <= MAX_SLOTS or copies.device != self.memory.device:
            raise ValueError(
                f"copies is {copies.dtype} of shape {list(copies.shape)} on {copies.device}; it must be contiguous int32 "
                f"[{self._num_ranks}, 1 to {MAX_SLOTS}] on {self.memory.device}"
            )
        self._check_tensors("slots", slots, copies.shape[1], returns)
        self._check_tensors(at_home, home, None, returns, may_be_apart=not returns)
        if self._num_ranks * home[0].shape[0] > _MAX_EXPERTS:
            raise ValueError(f"{at_home} have {home[0].shape[0]} experts a rank; all ranks together may have {_MAX_EXPERTS}")
        if returns and len({tensor.data_ptr() for tensor in home}) < len(home):
            raise ValueError("grads has a tensor twice; give each once")
        if returns and home[0].dtype not in (torch.float32, slots[0].dtype):
            raise TypeError(f"grads are {home[0].dtype} and slots {slots[0].dtype}; grads must be float32, or as slots are")
        begin, end = self.memory.data_ptr(), self.memory.data_ptr() + len(self.memory)
        if any(tensor.data_ptr() < begin or tensor.data_ptr() + tensor.nbytes > end for tensor in slots):
            raise ValueError("slots has a tensor outside the memory of these ExpertSlots; take it from `empty`")
        slots, home = ([_rows(tensor, returns) for tensor in tensors] for tensors in (slots, home))
        step, unit = (8, "elements") if returns else (_C.ROW_ALIGNMENT, "bytes")
        for here, there in zip(slots, home, strict=True):
            if here.shape[1] != there.shape[1] or here.shape[1] % step or here.shape[1] == 0:
                raise ValueError(
                    f"an expert has {here.shape[1]} {unit} in slots and {there.shape[1]} in {at_home}; both must be equal, and a multiple "
                    f"of {step}"
                )
        num_sms = check_num_sms(num_sms)
        if num_sms == 0:
            raise ValueError("num_sms is 0; copy engines move no experts: give 1 or more, or None")
        return MoveExpertsArgs(copies, slots, home, returns, num_sms)

    def _check_tensors(
        self, name: str, tensors: list[Tensor], count: int | None, are_gradients: bool, *, may_be_apart: bool = False
    ) -> None:
        """Raise ValueError or TypeError for a tensor that cannot be moved. count: the first dimension; None: any, the same for all.
        may_be_apart: only each of its entries must be contiguous."""
        for tensor in tensors:
            check_is_tensor(name, tensor)
            is_whole = tensor.dim() > 1 and tensor.data_ptr() % _C.ROW_ALIGNMENT == 0
            if is_whole and may_be_apart and len(tensor) > 0:
                distance = tensor.stride(0) * tensor.element_size() if len(tensor) > 1 else 0
                is_whole = tensor[0].is_contiguous() and distance % _C.ROW_ALIGNMENT == 0
            elif is_whole:
                is_whole = tensor.is_contiguous()
            if not is_whole or tensor.device != self.memory.device:
                raise ValueError(
                    f"{name} has a tensor of shape {list(tensor.shape)} on {tensor.device}; each must be contiguous, of two dimensions or "
                    f"more, on {self.memory.device}, at a multiple of {_C.ROW_ALIGNMENT} bytes"
                )
            if tensor.shape[0] != (tensors[0].shape[0] if count is None else count) or tensor.shape[0] == 0:
                raise ValueError(f"{name} has a tensor of shape {list(tensor.shape)}; all must have one first dimension, not 0")
            if are_gradients and (tensor.dtype != tensors[0].dtype or tensor.dtype not in FLOATS):
                raise TypeError(f"{name} has a tensor of {tensor.dtype}; all must have one dtype of {list(FLOATS)}")


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def _rows(tensor: Tensor, are_elements: bool) -> Tensor:
    """Return the elements or bytes of experts, [n, m]."""
    rows = tensor.detach().view(tensor.shape[0], -1)
    return rows if are_elements else rows.view(torch.uint8)
