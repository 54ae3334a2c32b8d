"""Copies of hot experts, for `MoELayer` and Megatron-Core: ranks with few rows compute rows of experts of other ranks."""

import contextlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from deepep_moe.arguments import as_int
from deepep_moe.device import FLOATS
from deepep_moe.errors import EPError
from deepep_moe.exchange.buffer import Buffer
from deepep_moe.exchange.calls import ENDS, PASS_FAILED, notify_peers, watch_pass
from deepep_moe.exchange.expert_slots import ALIGNMENT, MAX_SLOTS, ExpertSlots
from deepep_moe.exchange.handle import DispatchOutput
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
    outputs get those of copies too, for which it waits at once; with `num_recv_rows` they are refused.

    A token's rows are summed by the ranks that compute them, so outputs may differ in last bits from those without copies. `Metrics` count
    rows where they are computed: the slots of a rank come after its experts.

    Args:
        num_slots: copies that a rank may hold, 1 to 32. Their memory is num_slots x the bytes of an expert's weights and gradients.
        cost: rows that a rank computes in the time that moving a copy takes. A copy takes at least as many rows. The default is for bf16 on
            H100 and H200 GPUs of one host, where it does not depend on the size of experts.

    Instances of `MoELayer` of one group with equal experts that run one after another should share one. The first forward makes the memory.
    After an error call `destroy` on all ranks, before `Buffer.recover`; the next forward makes the memory again.
    """

    def __init__(self, num_slots: int = 4, *, cost: int = 2048):
        self.num_slots, self.cost = as_int("num_slots", num_slots, least=1), as_int("cost", cost, least=0)
        if self.num_slots > MAX_SLOTS:
            raise ValueError(f"num_slots is {self.num_slots}; at most {MAX_SLOTS} are possible")
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
        """Leave the peers, whose forwards raise EPPeerError on `nvlink` until they do the same. May be repeated."""
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
    hooks = (*experts._forward_hooks.values(), *experts._backward_hooks.values(), *experts._backward_pre_hooks.values())
    return any(not getattr(hook, "ignores_output", False) for hook in hooks)


def sizes_of(weights: Parts, buffer: Buffer) -> tuple[object, ...]:
    """Return what layers that share copies have in common."""
    group = tuple(dist.get_process_group_ranks(buffer._group))
    return tuple(weights.up.shape), tuple(weights.down.shape), weights.up.dtype, weights.up.device, group


class Copies:
    """The expert slots of this rank, and what goes through them: counts of rows, weights, gradients."""

    @torch.inference_mode(False)  # training uses the memory too
    def __init__(self, balance: Balance, weights: Parts, buffer: Buffer):
        num_ranks, dtype, self._num_local = buffer.num_ranks, weights.up.dtype, len(weights.up)
        self.sizes, self._rank, self._num_slots, self._cost = sizes_of(weights, buffer), buffer.rank, balance.num_slots, balance.cost
        self._num_experts = num_ranks * self._num_local
        if num_ranks > MAX_SLOTS or dtype not in FLOATS or self._num_slots > self._num_experts:
            raise ValueError(
                f"balance serves up to {MAX_SLOTS} ranks, experts in {list(FLOATS)}, and no more slots than experts; these are "
                f"{num_ranks}, {dtype}, {self._num_slots} and {self._num_experts}"
            )
        width = -(-self._num_experts // _WORDS) * _WORDS
        shapes = [(self._num_slots, *weight.shape[1:]) for weight in weights]
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

    def telling(self, buffer: Buffer, function: Callable[..., _Result], *args: object, most: int = 1) -> _Result:
        """`notify_peers_on_failure` for a function that calls `plan`. Peers that wait in its calls of the slots are told first."""
        num_calls, of_buffer = self.slots.num_calls, buffer.num_calls
        try:
            return function(*args)
        except BaseException as error:
            self.tell(error, num_calls + CALLS_OF_PLAN)
            notify_peers(buffer, error, of_buffer, most=most)
            raise

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
        is_whole: see `Planned`. capacity: as in `plan_copies`. Collective. Raises ValueError for weights that FSDP has taken apart,
        and for hooks beside a capacity, with which rows of copies come apart."""
        if is_whole and capacity is not None:
            raise ValueError("the experts have hooks, which see no rows of copies where rows are bounded; leave out the bound or the hooks")
        if any(hasattr(weight, "device_mesh") for weight in weights):
            raise ValueError("FSDP wraps the experts themselves, but balance is given; wrap the whole layer, or leave out balance")
        self.join()
        own = self._counts.new_zeros(1, self._counts.shape[1])
        own[0, : self._num_experts] = count_lanes(topk_idx, self._num_experts, 1)[1]
        self.slots.fetch(self._all, self._counts, own)
        self._counts[self._rank] = own[0]
        counts = self._counts[:, : self._num_experts]
        plan = plan_copies(topk_idx, counts, self._rank, num_slots=self._num_slots, cost=self._cost, capacity=capacity)
        return self.follow(plan, weights, is_whole)

    def follow(self, plan: CopyPlan, weights: Parts, is_whole: bool) -> "Planned":
        """Begin to fetch the copies of a plan. Collective."""
        self.join()
        self.fetch(plan, weights)
        return Planned(self, plan, weights, is_whole)

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
    of the experts, and takes counts on the host.
    """

    apart: DispatchOutput | None = None
    """The rows of copies, where they came in a dispatch of their own. `run_apart` then runs them, and not `end`."""

    def __init__(self, copies: Copies, plan: CopyPlan, weights: Parts, is_whole: bool):
        self.plan, self.is_whole = plan, is_whole
        self._copies, self._at_home = copies, weights

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
            tensors: the rows, [num_rows, ...] each, which may be `QuantizedRows`.
            counts: the rows of the experts and of the copies, on any device.
            main_grads: fp32 tensors for up and down, or None. The gradients of weights are added there, those of copies too.
        """
        copies, num_local = self._copies, len(self._at_home.up)
        held = (part.data for part in copies.weights)  # autograd is not to see that other layers use the memory
        weights = _Weights.apply(*self._at_home, *held, copies, self.plan, main_grads)
        self._grads: list[list[tuple[int, Tensor]]] = [[] for _ in tensors]
        pairs = [_Rows.apply(tensor, grads) for tensor, grads in zip(tensors, self._grads, strict=True)]
        self._rows, self._in_slots, self._weights = [rows for _, rows in pairs], counts[num_local:], Parts(*weights[2:])
        self._product = product
        y = product(tuple(rows for rows, _ in pairs), counts[:num_local], Parts(*weights[:2]), True)
        return self._add_guests(y, counts.tolist()) if self.is_whole else y

    @property
    def num_slots(self) -> int:
        return len(self._copies.weights.up)

    def rows_of_experts(self) -> Tensor:
        return self._copies.rows_of_experts()

    def end(self, y: Tensor, num_rows: list[int]) -> Tensor:
        """Return y, the result of `run`, with the outputs of copies. num_rows: its counts, on the host."""
        return y if self.is_whole else self._add_guests(y, num_rows)

    def _add_guests(self, y: Tensor, num_rows: list[int]) -> Tensor:
        self._copies.join()
        num_local = len(self._at_home.up)
        first, num_guests, guests = sum(num_rows[:num_local]), sum(num_rows[num_local:]), None
        if num_guests:
            parts = [_Guests.apply(rows, first, num_guests, grads) for rows, grads in zip(self._rows, self._grads, strict=True)]
            guests = self._product(tuple(parts), self._in_slots, self._weights, False)
        joined: Tensor = _Join.apply(y, guests, first, self._copies)
        return joined

    def split_choices(self) -> tuple[Tensor, Tensor]:
        """Return the plan's topk_idx twice, for dispatches apart: of the rows of experts at home, and of those of copies."""
        idx, num_local = self.plan.topk_idx, len(self._at_home.up)
        is_copy = idx % (num_local + self.num_slots) >= num_local
        return idx.masked_fill(is_copy, -1), idx.masked_fill(~is_copy, -1)

    def run_apart(self, tensors: tuple[Tensor, ...]) -> Tensor:
        """Return the outputs of copies. tensors: the rows of `apart`, as in `run`."""
        self._copies.join()
        y: Tensor = _Join.apply(self._product(tensors, self._in_slots, self._weights, False), None, 0, self._copies)
        return y

    def fetch_in_backward(self, y: Tensor) -> Tensor:
        """Return y, the output of the layer, whose backward begins with a fetch, as other layers have used the slots. Collective then."""
        fetched: Tensor = _Fetch.apply(y, *self._at_home, self._copies, self.plan)
        return fetched


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
    """The rows of the products at home, and again for `_Guests`, which the host takes out once it knows where they are."""

    @staticmethod
    def forward(ctx: Context, x: Tensor, of_guests: list[tuple[int, Tensor]]) -> tuple[Tensor, Tensor]:
        ctx.of_guests = of_guests
        ctx.set_materialize_grads(False)
        return x.view_as(x), x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, grad: Tensor, _: Tensor | None) -> tuple[Tensor, None]:
        for first, of_guests in ctx.of_guests:
            grad[first : first + len(of_guests)] = of_guests
        ctx.of_guests.clear()
        return grad, None


class _Guests(Function):
    """Rows of copies. `_Rows` gets their gradient through a list, so that nobody adds zeros to all the other rows."""

    @staticmethod
    def forward(ctx: Context, x: Tensor, first: int, num_guests: int, of_guests: list[tuple[int, Tensor]]) -> Tensor:
        ctx.shape, ctx.first, ctx.of_guests = x.shape, first, of_guests
        return _rows_of(x, slice(first, first + num_guests))

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor, None, None, None]:
        ctx.of_guests.append((ctx.first, grad))
        return grad.new_empty(()).expand(ctx.shape), None, None, None


class _Join(Function):
    """Writes the outputs of copies behind those at home."""

    @staticmethod
    def forward(ctx: Context, home: Tensor, guests: Tensor | None, first: int, copies: Copies) -> Tensor:
        ctx.copies, ctx.guests = copies, slice(first, first + (0 if guests is None else len(guests)))
        ctx.mark_dirty(home)
        if guests is not None:
            home[ctx.guests] = guests
        return home

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor | None, ...]:
        ctx.copies.join()
        guests = ctx.guests
        return grad, _rows_of(grad, guests) if guests.start < guests.stop else None, None, None


def _rows_of(x: Tensor, rows: slice) -> Tensor:
    return QuantizedRows(x.values[rows], x.scales[rows]) if isinstance(x, QuantizedRows) else x[rows]


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
