"""Copies of hot experts in `MoELayer`: ranks with few rows compute rows of experts of other ranks."""

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from deepep_moe.arguments import as_int
from deepep_moe.device import FLOATS
from deepep_moe.exchange.buffer import Buffer
from deepep_moe.exchange.expert_slots import ALIGNMENT, MAX_SLOTS, ExpertSlots
from deepep_moe.exchange.failures import ENDS, notify_peers_on_failure
from deepep_moe.library import Context
from deepep_moe.ops.copies import CopyPlan, plan_copies
from deepep_moe.ops.lanes import count_lanes

if TYPE_CHECKING:
    from deepep_moe.nn.grouped_experts import GroupedExperts

_Result = TypeVar("_Result")
_WORDS = 4  # of the rows that `ExpertSlots` moves: multiples of 16 bytes


class Balance:
    """Copies of hot experts, planned in each forward from the rows of all ranks, so that ranks compute similar numbers of rows.

    In a forward every rank computes the same plan (`deepep_moe.ops.plan_copies`), and the homes of the chosen experts send their weights to
    the ranks that hold copies. Rows go to the copies as to any expert. The backward fetches the weights again, as layers share the memory,
    and brings the gradients home: an expert's gradient is home's part and then the copies', by ascending ranks, each rounded to the
    parameters' dtype, added in fp32 and rounded once. Parameters, optimizers and checkpoints stay as they are. A weight is frozen on all
    ranks or on none.

    A token's rows are summed by the ranks that compute them, so outputs may differ in last bits from those without copies. `Metrics` count
    rows where they are computed: the slots of a rank come after its experts.

    Args:
        num_slots: copies that a rank may hold, 1 to 32. Their memory is num_slots x the bytes of an expert's weights and gradients.
        cost: rows that a rank computes in the time that moving a copy takes. A copy takes at least as many rows. The default is for bf16 on
            H100 and H200 GPUs of one host, where it does not depend on the size of experts.

    Layers of one group with equal experts that run one after another should share one. The first forward makes the memory. `destroy` ends
    it for all of them.
    """

    def __init__(self, num_slots: int = 4, *, cost: int = 2048):
        self.num_slots, self.cost = as_int("num_slots", num_slots, least=1), as_int("cost", cost, least=0)
        if self.num_slots > MAX_SLOTS:
            raise ValueError(f"num_slots is {self.num_slots}; at most {MAX_SLOTS} are possible")
        self._copies: Copies | None = None

    def __deepcopy__(self, _memo: object) -> "Balance":
        return self  # a copy of a layer shares it, as it shares the buffer

    @torch.compiler.disable
    @torch.inference_mode(False)  # of the memory, which training uses too
    def of_layer(self, experts: "GroupedExperts", buffer: Buffer) -> "Copies":
        """Return the copies, which the first forward makes. Collective over the buffer's group then."""
        group = tuple(dist.get_process_group_ranks(buffer._group))
        sizes = (tuple(experts.up.shape), tuple(experts.down.shape), experts.up.dtype, experts.up.device, group)
        if self._copies is None:
            self._copies = Copies(self, experts, buffer, sizes)
        elif self._copies.sizes != sizes:
            raise ValueError(
                "balance serves a layer with other experts or ranks (shapes, dtype, device, ranks): "
                f"{self._copies.sizes}, these are {sizes}; give this layer a Balance of its own"
            )
        return self._copies

    def destroy(self) -> None:
        """Leave the peers: on `nvlink` their forwards raise EPPeerError then. Layers that have it cannot run any more. May be repeated."""
        if self._copies is not None:
            self._copies.slots.destroy()


class Parts(NamedTuple):
    """One tensor for each weight of the experts."""

    up: Tensor
    down: Tensor


class Copies:
    """The expert slots of this rank, and what goes through them: counts of rows, weights, gradients."""

    def __init__(self, balance: Balance, experts: "GroupedExperts", buffer: Buffer, sizes: tuple[object, ...]):
        num_ranks, dtype = buffer.num_ranks, experts.up.dtype
        self.sizes, self._rank, self._num_slots, self._cost = sizes, buffer.rank, balance.num_slots, balance.cost
        self._num_experts = num_ranks * experts.num_local_experts
        if num_ranks > MAX_SLOTS or dtype not in FLOATS or self._num_slots > self._num_experts:
            raise ValueError(
                f"balance serves up to {MAX_SLOTS} ranks, experts in {list(FLOATS)}, and no more slots than experts; these are "
                f"{num_ranks}, {dtype}, {self._num_slots} and {self._num_experts}"
            )
        width = -(-self._num_experts // _WORDS) * _WORDS
        shapes = [(self._num_slots, *weight.shape[1:]) for weight in (experts.up, experts.down)]
        bytes_of = [2 * torch.Size(shape).numel() * dtype.itemsize for shape in shapes] + [num_ranks * width * 4]
        backend = buffer.backend if buffer.backend == "nvlink" else "collective"
        self.slots = ExpertSlots(buffer._group, sum(bytes_of) + 5 * ALIGNMENT, backend=backend)
        device = self.slots.memory.device
        if device.type != experts.up.device.type:
            raise ValueError(
                f"the group's collectives move memory on {device}, and the experts are on {experts.up.device}; use NCCL's group"
            )
        self._counts = self.slots.empty(num_ranks, width, dtype=torch.int32).fill_(0)
        self.weights, self._gradients = (Parts(*(self.slots.empty(*shape, dtype=dtype) for shape in shapes)) for _ in range(2))
        # As if the counts of rank r were the weights of expert r, of which every other rank has a copy.
        ranks = torch.arange(num_ranks, dtype=torch.int32, device=device)
        self._all = torch.where(torch.eye(num_ranks, dtype=torch.bool, device=device), -1, ranks)

    @torch.compiler.disable
    def telling(self, buffer: Buffer, function: Callable[..., _Result], *args: object) -> _Result:
        """`notify_peers_on_failure`, also for peers that wait in a call of the slots."""
        num_calls = self.slots.num_calls
        try:
            return notify_peers_on_failure(buffer, function, *args)
        except BaseException as error:
            if self.slots.num_calls == num_calls and not isinstance(error, ENDS):
                self.slots.refuse(error)
            raise

    @torch.compiler.disable
    def plan(self, topk_idx: Tensor) -> "Planned":
        """Plan the copies of a forward. topk_idx: [num_tokens, num_topk], the experts of this rank's tokens. Collective."""
        own = self._counts.new_zeros(1, self._counts.shape[1])
        own[0, : self._num_experts] = count_lanes(topk_idx, self._num_experts, 1)[1]
        self.slots.fetch(self._all, self._counts, own)
        self._counts[self._rank] = own[0]
        counts = self._counts[:, : self._num_experts]
        return Planned(self, plan_copies(topk_idx, counts, self._rank, num_slots=self._num_slots, cost=self._cost))

    def fetch(self, plan: CopyPlan, up: Tensor, down: Tensor) -> None:
        self.slots.fetch(plan.copies, self.weights, (up.detach(), down.detach()))

    def bring_home(self, plan: CopyPlan, of_copies: list[Tensor | None], of_home: list[Tensor | None]) -> None:
        """Add the gradients of copies to those of their experts at home. None in of_home: that weight is frozen, in all ranks. None in
        of_copies: this rank has no copy. Collective."""
        slots, home = [], []
        for slot, gradient, at_home in zip(self._gradients, of_copies, of_home, strict=True):
            if at_home is not None:
                slots.append(slot if gradient is None else slot.copy_(gradient))
                home.append(at_home)
        if home:
            self.slots.return_gradients(plan.copies, slots, home)


class Planned(NamedTuple):
    """The copies of one forward."""

    copies: Copies
    plan: CopyPlan

    @torch.compiler.disable
    def run(self, experts: "GroupedExperts", x: Tensor, num_rows: list[int]) -> Tensor:
        """Return the outputs of rows x [num_rows, hidden] of this rank's experts, then of its copies. num_rows: of each, in this order.
        Collective, as its backward is."""
        num_local = experts.num_local_experts
        at_home, in_slots = num_rows[:num_local], num_rows[num_local:]
        self.copies.fetch(self.plan, experts.up, experts.down)
        # `data`, as autograd is not to see that other layers use the memory in between.
        held = (part.data for part in self.copies.weights)
        due = _Due(self, sum(in_slots) > 0)
        home, guests, *weights = _Begin.apply(x, experts.up, experts.down, *held, sum(at_home), due)
        outputs = (
            experts.with_weights(rows, counts, *pair, delay=later.__setitem__)
            for rows, counts, pair, later in ((home, at_home, weights[:2], due.home), (guests, in_slots, weights[2:], due.guests))
        )
        y: Tensor = _End.apply(*outputs, experts.up, experts.down, due)
        return y


class _Due:
    """Gradients of weights that the products' backward has left, by the names w1 (up) and w2 (down)."""

    def __init__(self, planned: Planned, has_guests: bool):
        self.planned, self.has_guests = planned, has_guests
        self.home: dict[str, Callable[..., Tensor]] = {}
        self.guests: dict[str, Callable[..., Tensor]] = {}


class _Begin(torch.autograd.Function):
    """Splits rows into those of the experts at home and those of copies. Its backward, after those of the products, makes the gradients of
    the weights and brings those of copies home. So the products take their weights from it, at home and in slots, and return none."""

    @staticmethod
    def forward(
        ctx: Context, x: Tensor, up: Tensor, down: Tensor, held_up: Tensor, held_down: Tensor, num_at_home: int, due: _Due
    ) -> tuple[Tensor, ...]:
        ctx.due = due
        ctx.set_materialize_grads(False)
        weights = [weight.view_as(weight) for weight in (up, down, held_up, held_down)]
        is_trained = (up.requires_grad, down.requires_grad) * 2
        ctx.mark_non_differentiable(*(weight for weight, trained in zip(weights, is_trained, strict=True) if not trained))
        return x[:num_at_home], x[num_at_home:], *weights

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, grad_home: Tensor, grad_guests: Tensor, *_: None) -> tuple[Tensor | None, ...]:
        due, (needs_x, needs_up, needs_down, *_) = ctx.due, ctx.needs_input_grad
        names = ("w1" if needs_up else None, "w2" if needs_down else None)
        copies, plan = due.planned
        dtype = copies.weights.up.dtype  # that of the parameters, which autocast has cast
        of_home = [due.home[name]().to(dtype) if name else None for name in names]
        of_guests = [due.guests[name]() if name and due.has_guests else None for name in names]
        due.home.clear(), due.guests.clear()
        copies.bring_home(plan, of_guests, of_home)
        return torch.cat([grad_home, grad_guests]) if needs_x else None, *of_home, None, None, None, None


class _End(torch.autograd.Function):
    """Joins the outputs. Its backward, before those of the products, fetches the weights again."""

    @staticmethod
    def forward(ctx: Context, home: Tensor, guests: Tensor, up: Tensor, down: Tensor, due: _Due) -> Tensor:
        ctx.due, ctx.num_at_home, ctx.is_trained = due, len(home), any(ctx.needs_input_grad[2:4])
        ctx.save_for_backward(up, down)
        return torch.cat([home, guests])

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor | None, ...]:
        up, down = ctx.saved_tensors  # first: it may repeat the forward of a checkpoint, which uses the slots
        copies, plan = ctx.due.planned
        copies.fetch(plan, up, down)
        if ctx.is_trained:
            torch.autograd.Variable._execution_engine.queue_callback(_Watch(copies.slots))
        return grad[: ctx.num_at_home], grad[ctx.num_at_home :], None, None, None


class _Watch:
    """A callback that PyTorch calls at the end of a backward pass, and drops without a call if the pass fails. The peers, which wait for
    this rank's gradients then, are told."""

    def __init__(self, slots: ExpertSlots):
        self._slots, self._num_calls, self._is_over = slots, slots.num_calls, False

    def __call__(self) -> None:
        self._is_over = True

    def __del__(self) -> None:
        if not self._is_over and self._slots.num_calls == self._num_calls:
            self._slots.refuse(RuntimeError("its backward pass failed; see its output for the error"))
