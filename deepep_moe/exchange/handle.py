"""The results of a dispatch, and the handle that later calls reuse."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from operator import attrgetter, is_
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, NoReturn

import torch
from torch import Tensor

from deepep_moe.event import Event

if TYPE_CHECKING:
    from deepep_moe._torch import Calls as NativeCalls
    from deepep_moe._torch import Handle as NativeHandle


@dataclass(frozen=True, eq=False)
class DispatchHandle:
    """The routing of one dispatch. `combine` uses it to bring rows back, and a cached dispatch to repeat the routing.

    Immutable; usable any number of times until its buffer is destroyed. All tensors lie on the device of the dispatch.
    """

    buffer_id: int
    layout: str
    """"rank" or "expert"."""
    expert_alignment: int
    num_rows: int
    """Rows of `recv_x`, padding included."""
    topk_idx: Tensor
    """[num_tokens, num_topk] int32: this rank's routing, -1 = no expert."""
    recv_row_idx: Tensor
    """[num_recv_tokens, num_topk] int32: the row of each lane of each token received, -1 = none; empty in the rank layout. With backend
    `nvlink` it may have more rows than tokens; ignore their contents."""
    recv_counts: Tensor
    """[num_ranks, num_channels] int32: tokens received from each rank, in the order they were sent. With backend `nvlink` the first entry
    is negative if the dispatch has failed."""
    num_recv_tokens_per_expert: Tensor
    """[num_local_experts] int32, without padding."""
    call: Tensor
    """int64 on the CPU. Entry 0 is the number of the dispatch among the buffer's calls; ranks compare it to detect different handles.
    With backend `nvlink` follow [num_ranks] tokens sent to each rank, [num_ranks] tokens received from each rank, and
    [num_local_experts] tokens of each local expert, -1 where the host does not know."""
    recv_topk_idx: Tensor | None
    """[num_rows, num_topk] local experts, -1 = another rank's (rank layout only)."""

    native: ClassVar[Any] = None
    """`_torch.Handle` in a `PackedHandle`, else None."""
    sealed: ClassVar[tuple[tuple[object, ...], tuple[int, ...]] | None] = None
    """The `parts` when the dispatch finished, and PyTorch's in-place version counters of the tensors among them. `seal` sets it on the
    instance."""
    is_late: ClassVar[bool] = False
    """True while the dispatch has guessed its rows, and the host does not know yet that they fit."""
    is_traced: ClassVar[bool] = False
    """True for a `TracedHandle`."""

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """Return the tensors that lie on the device of the rows."""
        return self.topk_idx, self.recv_row_idx, self.recv_counts, self.num_recv_tokens_per_expert, self.recv_topk_idx

    def seal(self) -> "DispatchHandle":
        """Record the tensors' versions once the dispatch has made them. If a caller changes one in place afterwards, the next call raises
        an error. A copy with other fields is not sealed."""
        parts = self.parts
        self.__dict__["sealed"] = parts, _versions(parts)
        if self.recv_topk_idx is not None:
            self.__dict__["recv_topk_idx_version"] = self.recv_topk_idx._version
        return self

    @property
    def parts(self) -> tuple[object, ...]:
        """Return the fields that calls along the handle read."""
        return self.buffer_id, self.layout, self.expert_alignment, self.num_rows, *self.to_save()

    @property
    def is_unchanged(self) -> bool:
        """Return whether neither fields nor tensors have changed since the dispatch."""
        return self.has_parts and self.sealed is not None and self.sealed[1] == _versions(self.sealed[0])

    @property
    def has_parts(self) -> bool:
        """Return whether the fields are the dispatch's own objects; their contents are not checked."""
        return self.sealed is not None and all(map(is_, self.parts, self.sealed[0]))

    @property
    def has_recv_topk_idx(self) -> bool:
        """Return whether `recv_topk_idx` is unchanged. A dispatch along the handle returns it again; combine does not read it."""
        return self.recv_topk_idx is None or self.is_traced or self.recv_topk_idx._version == self.__dict__.get("recv_topk_idx_version")

    @property
    def num_tokens(self) -> int:
        """Return the number of tokens that this rank dispatched."""
        return self.topk_idx.shape[0]

    @property
    def has_failed(self) -> bool:
        """Return whether the dispatch has failed on a GPU, as far as it has run. No call may use such a handle."""
        return int(self.recv_counts.flatten()[0]) < 0

    def __reduce__(self) -> NoReturn:
        raise TypeError("a DispatchHandle says where the rows of this process are and cannot be saved or sent; dispatch again")

    def to_save(self) -> tuple[Tensor, ...]:
        """Return the tensors that a backward saves; `rebuild` makes the handle from them."""
        return self.topk_idx, self.recv_row_idx, self.recv_counts, self.num_recv_tokens_per_expert, self.call

    def rebuild(self) -> "Callable[..., DispatchHandle]":
        """Return a function of (num_rows, *to_save()) that makes the handle again, without recv_topk_idx. It holds no tensor."""
        return partial(_of_tensors, self.buffer_id, self.layout, self.expert_alignment)

    @property
    def num_rows_per_expert(self) -> Tensor:
        """Return [num_local_experts] int32: rows of each expert's group, padding included."""
        return padded(self.counts(), self.expert_alignment)

    def counts(self) -> Tensor:
        """Return num_recv_tokens_per_expert for a caller. `is_unchanged` detects a change in place, except in a traced handle, which
        therefore returns a copy."""
        return self.num_recv_tokens_per_expert.clone() if self.is_traced else self.num_recv_tokens_per_expert

    @property
    def num_rows_per_expert_list(self) -> list[int]:
        """Return `num_rows_per_expert` on the host, [num_local_experts]. On a GPU it is known when `dispatch` returns, before the rows
        arrive; if `num_recv_rows` was given, reading it waits for the stream."""
        counts = self._counts_on_host()
        if not counts or counts[0] < 0:
            counts = self.num_recv_tokens_per_expert.tolist()
        alignment = self.expert_alignment
        return counts if alignment == 1 else [-(-count // alignment) * alignment for count in counts]

    @property
    def num_rows_per_expert_on_host(self) -> Tensor:
        """Return `num_rows_per_expert_list` as a tensor, int64 on the CPU, made at each read."""
        return torch.tensor(self.num_rows_per_expert_list, dtype=torch.int64, device="cpu")

    def _counts_on_host(self) -> list[int]:
        """Return the [num_local_experts] tokens received. The list is empty or negative if the host does not know them."""
        counts: list[int] = self.call.tolist()[1 + 2 * self.recv_counts.shape[0] :]
        return counts if len(counts) == len(self.num_recv_tokens_per_expert) else []


def _of_tensors(buffer_id: int, layout: str, expert_alignment: int, num_rows: int, *tensors: Tensor) -> DispatchHandle:
    return DispatchHandle(buffer_id, layout, expert_alignment, num_rows, *tensors, recv_topk_idx=None).seal()  # type: ignore[misc]


def _versions(parts: tuple[object, ...]) -> tuple[int, ...]:
    return tuple([part._version for part in parts if isinstance(part, Tensor)])


@dataclass(frozen=True, eq=False)
class TracedHandle(DispatchHandle):
    """A handle built from the tensors of an operator. PyTorch does not count changes of those, so calls check that they fit the buffer."""

    memory: Tensor
    """int32: the memory of a `PackedHandle`, of which the other tensors are copies; empty if the dispatch made no packed handle."""

    is_traced = True

    def to_save(self) -> tuple[Tensor, ...]:
        return *super().to_save(), self.memory

    def rebuild(self) -> Callable[..., DispatchHandle]:
        return partial(traced, self.buffer_id, self.layout, self.expert_alignment)

    def packed(self, calls: "NativeCalls") -> "PackedHandle":
        """Return the handle that `memory` holds. calls: `_torch.Calls` of its buffer."""
        how = self.num_tokens, self.layout == "expert", self.expert_alignment, self.num_rows
        return PackedHandle(calls.handle_of(self.memory, self.call, *how))


def traced(
    buffer_id: int, layout: str, expert_alignment: int, num_rows: Any, *tensors: Tensor, recv_topk_idx: Tensor | None = None
) -> TracedHandle:
    """Return the handle whose `to_save` are these tensors."""
    idx, row_idx, counts, tokens_per_expert, call, memory = tensors
    parts = idx, row_idx, counts, tokens_per_expert, call, recv_topk_idx, memory
    return TracedHandle(buffer_id, layout, expert_alignment, num_rows, *parts)


def _shown(name: str, kind: Callable[[Any], Any] = property) -> Any:
    return kind(attrgetter(f"native.{name}"))


class PackedHandle(DispatchHandle):
    """A handle that `deepep_moe._torch` has made. Its tensors are views of one allocation, made on access: four allocations would delay a
    host that waits for a GPU's counts."""

    buffer_id: int = _shown("buffer_id")
    layout: str = _shown("layout")
    expert_alignment: int = _shown("expert_alignment")
    num_rows: int = _shown("num_rows")
    num_tokens: int = _shown("num_tokens")
    topk_idx: Tensor = _shown("topk_idx")
    recv_row_idx: Tensor = _shown("recv_row_idx")
    recv_counts: Tensor = _shown("recv_counts")
    num_recv_tokens_per_expert: Tensor = _shown("num_recv_tokens_per_expert", cached_property)  # every call along it returns it
    call: Tensor = _shown("call")
    recv_topk_idx: Tensor | None = _shown("recv_topk_idx")
    is_unchanged: bool = _shown("is_unchanged")
    has_recv_topk_idx: bool = _shown("has_recv_topk_idx")
    is_late: bool = _shown("is_late")  # type: ignore[misc]
    has_parts = True  # they cannot be set

    __slots__ = ("native",)

    def __init__(self, native: object):
        _set_native(self, native)

    @property
    def sealed(self) -> "NativeHandle | None":  # type: ignore[override]
        return getattr(self, "native", None)  # None before __init__

    def seal(self) -> "PackedHandle":
        return self  # C++ has sealed it

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        return self.native.memory, self.recv_topk_idx

    def to_save(self) -> tuple[Tensor, ...]:
        return self.native.memory, self.call

    def rebuild(self) -> Callable[..., DispatchHandle]:
        return partial(_of_memory, self.native.emptied())

    @property
    def num_rows_per_expert_on_host(self) -> Tensor:
        rows: Tensor | None = self.native.num_rows_per_expert_on_host
        return super().num_rows_per_expert_on_host if rows is None else rows

    def _counts_on_host(self) -> list[int]:
        counts: list[int] = self.native.counts_on_host
        return counts


_set_native = PackedHandle.native.__set__  # a frozen class refuses plain assignment


def _of_memory(native: "NativeHandle", _num_rows: int, memory: Tensor, call: Tensor) -> DispatchHandle:
    return PackedHandle(native.replaced(memory, call))


def padded(counts: Tensor, alignment: int) -> Tensor:
    """Return `counts` rounded up to multiples of `alignment`; the same tensor if that is 1."""
    return counts if alignment == 1 else (counts + (alignment - 1)) // alignment * alignment


class DispatchOutput(NamedTuple):
    """The results of a dispatch. docs/design/contract.md has the symbols of shapes. N counts (token, expert) pairs and padding in the
    expert layout, tokens in the rank layout."""

    recv_x: Tensor
    """[N, H], dtype of `x`. With backend `nvlink` it may be the first rows of an allocation up to a sixteenth larger."""
    recv_x_scales: Tensor | None
    """[N, ceil(H / 128)] fp32, with `x_scales` or `fp8=True`."""
    recv_topk_idx: Tensor | None
    """[N, K] local experts, -1 = another rank's; rank layout only."""
    recv_topk_weights: Tensor | None
    """fp32, with `topk_weights`: [N] in the expert layout (0 in padding), [N, K] in the rank layout (0 where no expert is here)."""
    num_recv_tokens_per_expert: Tensor
    """[E / R] int32: rows of each local expert, without padding."""
    handle: DispatchHandle
    event: Event | None
    """With `async_op=True`: wait for it before you read any of the tensors above, except the counts."""
    hook: Callable[[], None] | None
    """With `return_hook=True`: call it before you read any of the tensors above, except the counts."""


class Layout(NamedTuple):
    """Counts of this rank's tokens, before sending."""

    num_tokens_per_rank: Tensor
    """[num_ranks] int32."""
    num_tokens_per_expert: Tensor
    """[num_experts] int32."""
    is_token_in_rank: Tensor
    """[num_tokens, num_ranks] bool."""
