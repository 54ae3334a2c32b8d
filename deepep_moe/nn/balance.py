"""Copies of hot experts, for `MoELayer` and Megatron-Core: ranks with few rows compute rows of experts of other ranks."""

import contextlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from deepep_moe import _C
from deepep_moe.arguments import as_int
from deepep_moe.device import FLOATS, is_gpu, launch, readable
from deepep_moe.errors import EPError
from deepep_moe.exchange.buffer import Buffer
from deepep_moe.exchange.calls import ENDS, PASS_FAILED, notify_peers, watch_pass
from deepep_moe.exchange.expert_slots import ALIGNMENT, MAX_SLOTS, ExpertSlots
from deepep_moe.exchange.handle import DispatchHandle
from deepep_moe.library import Context, Function
from deepep_moe.ops.copies import CopyPlan, plan_copies
from deepep_moe.ops.lanes import count_lanes
from deepep_moe.ops.quantized import QuantizedRows

if TYPE_CHECKING:
    from deepep_moe.nn.grouped_experts import GroupedExperts

_Result = TypeVar("_Result")
CALLS_OF_PLAN = 2
"""Calls of the slots that `Copies.plan` makes."""
_WORDS = 4  # of the rows that `ExpertSlots` moves: multiples of 16 bytes


class Balance:
    """Copies of hot experts, planned in each forward from the rows of all ranks, so that ranks compute similar numbers of rows.

    In a forward every rank computes the same plan (`deepep_moe.ops.plan_copies`). The homes of the chosen experts send their weights to the
    ranks that hold copies. Rows go to the copies as to any expert. The backward fetches the weights again, as layers share the memory, and
    brings the gradients home. An expert's gradient is home's part and then the copies', by ascending ranks. Each part is rounded to the
    parameters' dtype; they are added in fp32, and the sum is rounded once.

    Parameters, optimizers and checkpoints stay as they are. A weight is frozen on all ranks or on none.

    On GPUs the host looks at counts only once the products at home are queued, and with `num_recv_rows` not at all. Hooks of the experts'
    outputs get those of copies too, for which the host waits at once, or with `num_recv_rows` the GPU for the copies.

    A token's rows are summed by the ranks that compute them, so outputs may differ in last bits from those without copies, but not with
    `sums="lanes"` on H100 and H200 GPUs. `Metrics` count rows where they are computed: the slots of a rank come after its experts.

    Args:
        num_slots: copies that a rank may hold, 1 to 32. Their memory is num_slots x the bytes of an expert's weights and gradients.
        cost: rows that a rank computes in the time that moving a copy takes. A copy takes at least as many rows. The default is for bf16 on
            H100 and H200 GPUs of one host, where it does not depend on the size of experts.

    Instances of `MoELayer` of one group with equal experts that run one after another should share one. The first forward makes the memory.
    After an error call `destroy` on all ranks, before `Buffer.recover`; the next forward makes the memory again.

    Raises:
        TypeError, ValueError: a number is none, or out of bounds.
    """

    def __init__(self, num_slots: int = 4, *, cost: int = 2048):
        self.num_slots = as_int("num_slots", num_slots, least=1, most=MAX_SLOTS)
        self.cost = as_int("cost", cost, least=0)
        self._copies: Copies | None = None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Balance) and (self.num_slots, self.cost) == (other.num_slots, other.cost)

    def __hash__(self) -> int:
        return hash((self.num_slots, self.cost))

    def __repr__(self) -> str:
        return f"Balance({self.num_slots}, cost={self.cost})"

    def __deepcopy__(self, _memo: object) -> "Balance":
        return self  # a copy of a layer shares it, as it shares the buffer

    def of_layer(self, experts: "GroupedExperts", buffer: Buffer) -> "Copies":
        """Return the copies, which the first forward makes. Collective over the buffer's group then."""
        weights = Parts(experts.up, experts.down)
        sizes = sizes_of(weights, buffer)
        if self._copies is None or self._copies.is_over:
            self._copies = Copies(self, weights, buffer)
        elif self._copies.sizes != sizes:
            raise ValueError(
                "balance serves a layer with other experts or ranks (shapes, dtype, device, ranks): "
                f"{self._copies.sizes}, these are {sizes}; give this layer a Balance of its own"
            )
        return self._copies

    def destroy(self) -> None:
        """Leave the peers, whose forwards fail with EPPeerError on `nvlink` until they do the same. May be repeated."""
        if self._copies is not None:
            self._copies.destroy()


class Parts(NamedTuple):
    """One tensor for each weight of the experts."""

    up: Tensor
    down: Tensor


Product = Callable[[tuple[Tensor, ...], Tensor, Parts, bool], Tensor]
"""Returns the outputs of rows: their tensors, the first of which is [num_rows, hidden]; the counts of groups; the groups' weights; whether
these are the experts at home."""


def check_is_balance(balance: object) -> None:
    if not isinstance(balance, Balance):
        raise TypeError(f"balance is {balance!r}; pass deepep_moe.nn.Balance(num_slots)")


def has_hooks(experts: nn.Module) -> bool:
    """Return whether hooks see what the experts return, or the gradient of that. The outputs of copies must be part of it then."""
    return bool(experts._forward_hooks or experts._backward_hooks or experts._backward_pre_hooks)


def sizes_of(weights: Parts, buffer: Buffer) -> tuple[object, ...]:
    """Return what layers that share copies have in common."""
    group = tuple(dist.get_process_group_ranks(buffer._group))
    return tuple(weights.up.shape), tuple(weights.down.shape), weights.up.dtype, weights.up.device, group


class Copies:
    """The expert slots of this rank, and what goes through them: counts of rows, weights, gradients."""

    @torch.inference_mode(False)  # training uses the memory too
    def __init__(self, balance: Balance, weights: Parts, buffer: Buffer):
        num_ranks, dtype, self._num_local = buffer.num_ranks, weights.up.dtype, len(weights.up)
        self.sizes, self._rank, self.num_slots, self._cost = sizes_of(weights, buffer), buffer.rank, balance.num_slots, balance.cost
        self._num_experts = num_ranks * self._num_local
        if num_ranks > MAX_SLOTS or dtype not in FLOATS or self.num_slots > self._num_experts:
            raise ValueError(
                f"balance serves up to {MAX_SLOTS} ranks, experts in {list(FLOATS)}, and no more slots than experts; these are "
                f"{num_ranks}, {dtype}, {self.num_slots} and {self._num_experts}"
            )
        width = -(-self._num_experts // _WORDS) * _WORDS
        shapes = [(self.num_slots, *weight.shape[1:]) for weight in weights]
        bytes_of = [2 * torch.Size(shape).numel() * dtype.itemsize for shape in shapes] + [num_ranks * width * 4]
        backend = buffer.backend if buffer.backend == "nvlink" else "collective"
        self.slots = ExpertSlots(buffer._group, sum(bytes_of) + 5 * ALIGNMENT, backend=backend)
        device = self.slots.memory.device
        if device.type != weights.up.device.type:
            raise ValueError(
                f"the group's collectives move memory on {device}, and the experts are on {weights.up.device}; use NCCL's group"
            )
        self._counts = self.slots.empty(num_ranks, width, dtype=torch.int32).fill_(0)
        self.weights, self._gradients = (Parts(*(self.slots.empty(*shape, dtype=dtype) for shape in shapes)) for _ in range(2))
        # As if the counts of rank r were the weights of expert r, of which every other rank has a copy.
        ranks = torch.arange(num_ranks, dtype=torch.int32, device=device)
        self._all = torch.where(torch.eye(num_ranks, dtype=torch.bool, device=device), -1, ranks)
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # of fetches
        self._fetching: bool | None = None  # whether the fetch that nobody waits for yet is part of a CUDA graph

    def telling(self, buffer: Buffer) -> Callable[..., Any]:
        """Return `notify_peers_on_failure` for the parts of a forward that begins now. Peers in calls of the slots are told first."""
        last_call = self.slots.num_calls + CALLS_OF_PLAN

        def tell(function: Callable[..., _Result], *args: object) -> _Result:
            of_buffer = buffer.num_calls
            try:
                return function(*args)
            except BaseException as error:
                self.tell(error, last_call)
                notify_peers(buffer, error, of_buffer)
                raise

        return tell

    def tell(self, error: BaseException, num_calls: int) -> None:
        """Tell the peers that this rank does not make its calls of the slots, up to this number, because of `error`."""
        if not isinstance(error, ENDS):
            with contextlib.suppress(EPError, RuntimeError):  # missing peers or a failed GPU: `error` says more
                for _ in range(num_calls - self.slots.num_calls):
                    self.slots.refuse(error)

    def destroy(self) -> None:
        """Leave the peers, and give the memory back. A graph that has used it may live on."""
        self.slots.destroy()
        for part in (self.slots.memory, self._counts, *self.weights, *self._gradients):
            part.data = part.new_empty(0)

    def plan(self, topk_idx: Tensor, weights: Parts, is_whole: bool, capacity: int | None = None) -> "Planned":
        """Plan the copies of a forward, and begin to fetch them. topk_idx: [num_tokens, num_topk], the experts of this rank's tokens.
        is_whole: see `Planned`. capacity: as in `plan_copies`. Collective. Raises ValueError for weights that FSDP has taken apart."""
        if any(hasattr(weight, "device_mesh") for weight in weights):
            raise ValueError("FSDP wraps the experts themselves, but balance is given; wrap the whole layer, or leave out balance")
        self.join()
        own = self._counts.new_zeros(1, self._counts.shape[1])
        own[0, : self._num_experts] = count_lanes(topk_idx, self._num_experts, 1)[1]
        self.slots.fetch(self._all, self._counts, own)
        self._counts[self._rank] = own[0]
        counts = self._counts[:, : self._num_experts]
        plan = plan_copies(topk_idx, counts, self._rank, num_slots=self.num_slots, cost=self._cost, capacity=capacity)
        return self.follow(plan, weights, is_whole, capacity is not None)

    def follow(self, plan: CopyPlan, weights: Parts, is_whole: bool, is_bounded: bool) -> "Planned":
        """Begin to fetch the copies of a plan. is_bounded: it has a capacity. Collective."""
        self.join()
        self.fetch(plan, weights)
        return Planned(self, plan, weights, is_whole, is_bounded)

    @property
    def is_over(self) -> bool:
        return self.slots.num_calls < 0

    def rows_of_experts(self) -> Tensor:
        """Return the rows of this rank's experts in the latest plan, wherever they are computed. [num_local_experts] int32."""
        return self._counts[:, self._rank * self._num_local : (self._rank + 1) * self._num_local].sum(0, dtype=torch.int32)

    def fetch(self, plan: CopyPlan, weights: Parts) -> None:
        """Begin to fetch the weights of the copies. On GPUs that runs beside the current stream until `join`. Collective."""
        at_home = [weight.detach() for weight in weights]
        if self._stream is None:
            return self.slots.fetch(plan.copies, self.weights, at_home)
        self._fetching = torch.cuda.is_current_stream_capturing()
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            self.slots.fetch(plan.copies, self.weights, at_home)
        plan.copies.record_stream(self._stream)

    def join(self) -> None:
        """Let the current stream wait for the fetch. A CUDA graph must not wait for one from before its capture."""
        if self._stream is not None and self._fetching == torch.cuda.is_current_stream_capturing():
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)
        self._fetching = None

    def bring_home(self, plan: CopyPlan, of_copies: Sequence[Tensor | None], of_home: Sequence[Tensor | None]) -> None:
        """Add the gradients of copies to those of their experts at home. None in of_home: that weight is frozen, in all ranks. None in
        of_copies: this rank has no copy. Collective."""
        slots, home = [], []
        for slot, gradient, at_home in zip(self._gradients, of_copies, of_home, strict=True):
            if at_home is not None:
                slots.append(slot if gradient is None else slot.copy_(gradient))
                home.append(at_home)
        if home:
            self.slots.return_gradients(plan.copies, slots, home)


class Planned:
    """The copies of one forward, which calls `run`, `end` and `fetch_in_backward` in this order.

    Products at home do not wait for the host or for copies. If it `is_whole`, they do: `run` returns the outputs of copies too, for hooks
    of the experts. If it `is_bounded`, the host never learns the counts.
    """

    def __init__(self, copies: Copies, plan: CopyPlan, weights: Parts, is_whole: bool, is_bounded: bool):
        self.copies, self.plan, self._at_home, self.is_whole, self._is_bounded = copies, plan, weights, is_whole, is_bounded

    def run(
        self,
        product: Product,
        tensors: tuple[Tensor, ...],
        counts: Tensor,
        main_grads: tuple[Tensor | None, Tensor | None] = (None, None),
    ) -> Tensor:
        """Return the outputs of this rank's experts, [num_rows, ...]. Those of the rows of copies, which lie behind, `end` adds.

        Args:
            product: computes rows of experts, and in `end` those of copies.
            tensors: the rows, [num_rows] or [num_rows, columns] each, which may be `QuantizedRows`.
            counts: the rows of the experts and of the copies. They may be on a GPU, but for what `is_whole` and not bounded.
            main_grads: fp32 tensors for up and down, or None. The gradients of weights are added there, those of copies too.
        """
        copies, num_local = self.copies, len(self._at_home.up)
        held = (part.data for part in copies.weights)  # autograd is not to see that other layers use the memory
        weights = _Weights.apply(*self._at_home, *held, copies, self.plan, main_grads)
        self._grads: list[list[tuple[_Place, Tensor]]] = [[] for _ in tensors]
        pairs = [_Rows.apply(tensor, grads) for tensor, grads in zip(tensors, self._grads, strict=True)]
        self._rows, self._in_slots, self._weights = [rows for _, rows in pairs], counts[num_local:], Parts(*weights[2:])
        self._product = product
        y = product(tuple(rows for rows, _ in pairs), counts[:num_local], Parts(*weights[:2]), True)
        return self._add_guests(y, counts) if self.is_whole else y

    def end(self, y: Tensor, handle: DispatchHandle) -> Tensor:
        """Return y, the result of `run` for the rows of this handle, with the outputs of copies."""
        if self.is_whole:
            return y
        return self._add_guests(y, handle.num_rows_per_expert if self._is_bounded else handle.num_rows_per_expert_list)

    def _add_guests(self, y: Tensor, counts: Tensor | list[int]) -> Tensor:
        self.copies.join()
        place, guests = _Place(counts, len(self._at_home.up)), None
        if not place.is_empty:
            parts = [_Guests.apply(rows, place, grads) for rows, grads in zip(self._rows, self._grads, strict=True)]
            guests = self._product(tuple(parts), self._in_slots, self._weights, False)
        joined: Tensor = _Join.apply(y, guests, place, self.copies)
        return joined

    def fetch_in_backward(self, y: Tensor) -> Tensor:
        """Return y, the output of the layer, whose backward begins with a fetch, as other layers have used the slots. Collective then."""
        fetched: Tensor = _Fetch.apply(y, *self._at_home, self.copies, self.plan)
        return fetched


class _Place:
    """Where the rows of copies lie: behind those at home. If only a GPU knows, they are moved to the begin of tensors with as many rows."""

    def __init__(self, counts: Tensor | list[int], num_home: int):
        """counts: rows of the experts and of the copies. Those on a GPU stay there."""
        self._num_home, self._rows = num_home, None
        if isinstance(counts, Tensor) and is_gpu(counts.device):
            self._ends = counts.cumsum(0, dtype=torch.int32)
        else:
            sizes = counts.tolist() if isinstance(counts, Tensor) else counts
            self._rows = slice(sum(sizes[:num_home]), sum(sizes))

    @property
    def is_empty(self) -> bool:
        """Return whether the host knows that there are no such rows."""
        return self._rows is not None and self._rows.start == self._rows.stop

    def take(self, x: Tensor) -> Tensor:
        """Return the rows of copies. x: those of a rank, or `QuantizedRows`."""
        if isinstance(x, QuantizedRows):
            return QuantizedRows(self.take(x.values), self.take(x.scales))
        if self._rows is not None:
            return x[self._rows]
        x = readable(x)
        return self._move(x, torch.empty_like(x), is_back=False)

    def put(self, of_copies: Tensor, x: Tensor) -> None:
        """Write what `take` has returned, or values of it, to its place in x."""
        if self._rows is not None:
            x[self._rows] = of_copies
        else:
            self._move(x, readable(of_copies), is_back=True)

    def _move(self, x: Tensor, of_copies: Tensor, is_back: bool) -> Tensor:
        launch(_C.gpu_rows_of_copies, x, of_copies, self._ends, self._num_home, is_back, on=x)
        return of_copies


class _Weights(Function):
    """The weights of the products at home and of those of copies. Its backward, after those of the products, brings the gradients of
    copies home."""

    @staticmethod
    def forward(
        ctx: Context, up: Tensor, down: Tensor, held_up: Tensor, held_down: Tensor, copies: Copies, plan: CopyPlan,
        main_grads: tuple[Tensor | None, Tensor | None],
    ) -> tuple[Tensor, ...]:  # fmt: skip
        ctx.copies, ctx.plan, ctx.main_grads = copies, plan, main_grads
        ctx.set_materialize_grads(False)
        weights = [weight.view_as(weight) for weight in (up, down, held_up, held_down)]
        is_trained = (up.requires_grad, down.requires_grad) * 2
        ctx.mark_non_differentiable(*(weight for weight, trained in zip(weights, is_trained, strict=True) if not trained))
        return tuple(weights)

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        of_weights = [
            grad.contiguous() if grad is not None and needed else None
            for grad, needed in zip(grads[:2], ctx.needs_input_grad[:2], strict=True)
        ]
        sums = [grad if grad is None or into is None else into for grad, into in zip(of_weights, ctx.main_grads, strict=True)]
        ctx.copies.bring_home(ctx.plan, grads[2:], sums)
        return *of_weights, None, None, None, None, None


class _Rows(Function):
    """The rows of the products at home, and again for `_Guests`, which are taken out once their place is known."""

    @staticmethod
    def forward(ctx: Context, x: Tensor, of_guests: list[tuple[_Place, Tensor]]) -> tuple[Tensor, Tensor]:
        ctx.of_guests = of_guests
        ctx.set_materialize_grads(False)
        return x.view_as(x), x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, grad: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, None]:
        if grad is None:
            return None, None
        grad = readable(grad)
        for place, of_guests in ctx.of_guests:
            place.put(of_guests, grad)
        ctx.of_guests.clear()
        return grad, None


class _Guests(Function):
    """Rows of copies. `_Rows` gets their gradient through a list, so that nobody adds zeros to all the other rows."""

    @staticmethod
    def forward(ctx: Context, x: Tensor, place: _Place, of_guests: list[tuple[_Place, Tensor]]) -> Tensor:
        ctx.shape, ctx.place, ctx.of_guests = x.shape, place, of_guests
        return place.take(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor, None, None]:
        ctx.of_guests.append((ctx.place, grad))
        return grad.new_empty(()).expand(ctx.shape), None, None


class _Join(Function):
    """Writes the outputs of copies behind those at home."""

    @staticmethod
    def forward(ctx: Context, home: Tensor, guests: Tensor | None, place: _Place, copies: Copies) -> Tensor:
        ctx.copies, ctx.place = copies, place
        ctx.mark_dirty(home)
        if guests is not None:
            place.put(guests, home)
        return home

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor | None, ...]:
        ctx.copies.join()
        return grad, None if ctx.place.is_empty else ctx.place.take(grad), None, None


class _Fetch(Function):
    """Fetches the weights of copies at the begin of the layer's backward, beside the dispatch of the gradients."""

    @staticmethod
    def forward(ctx: Context, y: Tensor, up: Tensor, down: Tensor, copies: Copies, plan: CopyPlan) -> Tensor:
        ctx.copies, ctx.plan = copies, plan
        ctx.save_for_backward(up, down)
        ctx.mark_dirty(y)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor | None, ...]:
        weights = Parts(*ctx.saved_tensors)  # first: it may repeat the forward of a checkpoint, which uses the slots
        ctx.copies.fetch(ctx.plan, weights)
        if any(ctx.needs_input_grad[1:3]):
            watch_pass(partial(_pass_failed, ctx.copies.slots, ctx.copies.slots.num_calls))
        return grad, None, None, None, None


def _pass_failed(slots: ExpertSlots, num_calls: int) -> None:
    """Tell the peers, which wait for this rank's gradients of copies."""
    if slots.num_calls == num_calls:
        slots.refuse(PASS_FAILED)
