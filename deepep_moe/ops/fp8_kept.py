"""fp8 copies of experts' weights that several forwards share, because weights change once an optimizer step and not once a micro-batch."""

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from deepep_moe.ops.quant import quantize_fp8_weights_both


class Fp8Copies(NamedTuple):
    """Holds one weight as fp8: values and scales for the forward, and transposed ones for the backward."""

    plain: tuple[Tensor, Tensor]
    transposed: tuple[Tensor, Tensor]

    @classmethod
    def of(cls, w: Tensor) -> "Fp8Copies":
        """Quantize w, as `deepep_moe.ops.quantize_fp8_weights` documents it."""
        return cls(*quantize_fp8_weights_both(w.detach()))


class _State(NamedTuple):
    """The state of a weight when it was quantized, to detect later writes."""

    form: tuple[Any, ...]
    address: int
    version: int
    num_steps: int

    @classmethod
    def of(cls, w: Tensor) -> "_State":
        form = tuple(w.shape), w.stride(), w.dtype, w.device
        return cls(form, w.data_ptr(), 0 if w.is_inference() else w._version, _steps().count)


class KeptWeights:
    """The fp8 copies of the two weights of `grouped_mlp`, from one micro-batch to the next (TransformerEngine's `is_first_microbatch`).

    The copies take 2 bytes a parameter, and fp32 scales of 1/2048 of that, until they are replaced or released. They are in no state dict;
    deep copies and pickles of this object have none.

    The first forward of an optimizer step makes new copies. An earlier forward that has not run its backward keeps those it has used. A
    recomputation, a forward inside a backward, uses the copies that are there.

    Copies that were made while a CUDA graph was captured are filled by its replays. They serve only forwards that are captured too.
    """

    def __init__(self) -> None:
        self._copies: tuple[Fp8Copies, ...] = ()
        self._states: tuple[_State, ...] = ()
        self._captured, self._stream = False, 0

    @property
    def num_bytes(self) -> int:
        """Bytes of the kept copies."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self._tensors())

    def release(self) -> None:
        """Drop the copies. Their memory is free once no backward needs it."""
        self._copies, self._states = (), ()

    def has(self, *weights: Tensor) -> bool:
        """Return whether a forward with these weights may pass False: copies of them are kept, whether or not they were written since."""
        return self._why_others(weights) is None

    def take(self, is_first_microbatch: bool | None, w1: Tensor, w2: Tensor) -> tuple[Fp8Copies, ...] | None:
        """Return the copies of w1 and w2 for a forward; None if the forward makes its own.

        Args:
            is_first_microbatch: True quantizes the weights and keeps the copies. False returns those that were kept; if an optimizer of
                this process has made a step since, or a weight was written otherwise, it quantizes them again. Writes to `weight.data`
                outside of optimizers are not seen. None returns None, and what is kept stays.
            w1, w2: as in `grouped_mlp`.

        Raises:
            ValueError: is_first_microbatch is False, and no copies are kept, or those of weights of another shape, dtype, device or memory.
            TypeError: is_first_microbatch is something else.
        """
        check_is_first_microbatch(is_first_microbatch)
        if is_first_microbatch is None:
            return None
        weights = w1, w2
        other = self._why_others(weights)
        if not is_first_microbatch and other is not None:
            raise ValueError(
                f"is_first_microbatch is False, but {other}; pass True in the first forward after each optimizer step, or None to quantize "
                "in each forward"
            )
        is_anew = is_first_microbatch and not _is_recomputation()
        if is_anew or other is not None or self._states != _states_of(weights):
            self._quantize(weights)
        elif _stream_of(w1) != self._stream:
            self._record_stream(torch.cuda.current_stream(w1.device))
        return self._copies

    def _quantize(self, weights: tuple[Tensor, ...]) -> None:
        self.release()  # before the new ones, which then may take the same memory
        self._copies = tuple(Fp8Copies.of(w) for w in weights)
        self._states, self._captured, self._stream = _states_of(weights), is_captured(weights[0]), _stream_of(weights[0])

    def _record_stream(self, stream: torch.Stream) -> None:
        """Keep the memory until the work enqueued on `stream` is done."""
        for tensor in self._tensors():
            tensor.record_stream(stream)

    def _tensors(self) -> Iterator[Tensor]:
        return (tensor for copies in self._copies for pair in copies for tensor in pair)

    def _why_others(self, weights: tuple[Tensor, ...]) -> str | None:
        """Return why the kept copies do not serve these weights, or None."""
        if not self._copies:
            return "no fp8 copies of the weights are kept"
        if self._captured != is_captured(weights[0]):
            how = ("inside", "outside") if self._captured else ("outside", "inside")
            return f"the fp8 copies were made {how[0]} of a CUDA graph's capture, and this forward is {how[1]}"
        for name, w, before in zip(("w1", "w2"), weights, self._states, strict=True):
            now = _State.of(w)
            if now.form != before.form:
                return f"the fp8 copies are of {name} {_form(before)}, which now is {_form(now)}"
            if now.address != before.address:
                return f"{name} lies in other memory than when its fp8 copies were made"
        return None

    def __deepcopy__(self, memo: dict[int, object]) -> "KeptWeights":
        return KeptWeights()

    def __reduce__(self) -> tuple[Any, ...]:
        return KeptWeights, ()

    def __repr__(self) -> str:
        return f"KeptWeights({self.num_bytes} bytes)"


class NothingKept(KeptWeights):
    """For weights in memory that others use between the forward and the backward: each pass quantizes them."""

    def take(self, is_first_microbatch: bool | None, w1: Tensor, w2: Tensor) -> None:
        return None


def check_is_first_microbatch(value: object) -> None:
    """Raise TypeError unless `value` is True, False or None."""
    if value is not None and not isinstance(value, bool):
        raise TypeError(f"is_first_microbatch is {value!r}; it must be True, False or None")


def kept_in(module: torch.nn.Module) -> Iterator[KeptWeights]:
    """Yield the `KeptWeights` of all experts in a module."""
    for each in module.modules():
        kept = each.__dict__.get("kept_weights")
        if isinstance(kept, KeptWeights):
            yield kept


def _states_of(weights: tuple[Tensor, ...]) -> tuple[_State, ...]:
    return tuple(_State.of(w) for w in weights)


def _form(state: _State) -> str:
    shape, _, dtype, device = state.form
    return f"{str(dtype).removeprefix('torch.')} {list(shape)} on {device}"


def is_captured(w: Tensor) -> bool:
    """Return whether the forward is captured into a CUDA graph, of which nobody knows to which micro-batches it will be replayed."""
    return w.is_cuda and torch.cuda.is_current_stream_capturing()


def _stream_of(w: Tensor) -> int:
    return torch.cuda.current_stream(w.device).cuda_stream if w.is_cuda else 0


def _is_recomputation() -> bool:
    """Return whether a backward is running, which runs a checkpointed forward again."""
    return torch._C._current_graph_task_id() != -1


class _Steps:
    """Counts the steps of all optimizers of this process. Optimizers may write weights without a change of autograd's version counters."""

    def __init__(self) -> None:
        self.count = 0
        register_optimizer_step_post_hook(self._add)

    def _add(self, *_: object) -> None:
        self.count += 1


@functools.cache
def _steps() -> _Steps:
    return _Steps()
