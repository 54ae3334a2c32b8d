"""Copies of hot experts in `MoELayer`: ranks with few rows compute rows of experts of other ranks."""

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from deepep_moe.arguments import as_int
from deepep_moe.device import FLOATS
from deepep_moe.exchange.buffer import Buffer
from deepep_moe.exchange.expert_slots import ALIGNMENT, MAX_SLOTS, ExpertSlots
from deepep_moe.library import Context
from deepep_moe.ops.copies import CopyPlan, plan_copies
from deepep_moe.ops.lanes import count_lanes

if TYPE_CHECKING:
    from deepep_moe.nn.grouped_experts import GroupedExperts

_WORDS = 4  # of the rows that `ExpertSlots` moves: multiples of 16 bytes


class Balance:
    """Copies of hot experts, planned in each forward from the rows of all ranks, so that ranks compute similar numbers of rows.

    In a forward every rank computes the same plan (`deepep_moe.ops.plan_copies`), and the homes of the chosen experts send their weights to
    the ranks that hold copies. Rows go to the copies as to any expert. The backward fetches the weights again, as layers share the memory,
    and brings the gradients home: an expert's gradient is home's part and then the copies', by ascending ranks, each rounded to the
    parameters' dtype, added in fp32 and rounded once. Parameters, optimizers and checkpoints stay as they are.

    A token's rows are summed by the ranks that compute them, so outputs may differ in last bits from those without copies.

    Args:
        num_slots: copies that a rank may hold, 1 to 32. Their memory is num_slots x the bytes of an expert's weights and gradients.
        cost: rows that a rank computes in the time that moving a copy takes. A copy takes at least as many rows. The default is for bf16 on
            H100 and H200 GPUs of one host, where it does not depend on the size of experts.

    Layers with equal experts that run one after another should share one. `destroy` ends it for all of them.
    """

    def __init__(self, num_slots: int = 4, *, cost: int = 2048):
        self.num_slots, self.cost = as_int("num_slots", num_slots, least=1), as_int("cost", cost, least=0)
        if self.num_slots > MAX_SLOTS:
            raise ValueError(f"num_slots is {self.num_slots}; at most {MAX_SLOTS} are possible")
        self._copies: Copies | None = None

    def of_layer(self, experts: "GroupedExperts", buffer: Buffer) -> "Copies":
        """Return the copies, which the first layer makes. Collective over the buffer's group."""
        sizes = (tuple(experts.up.shape), tuple(experts.down.shape), experts.up.dtype, buffer.num_ranks)
        if self._copies is None:
            self._copies = Copies(self, experts, buffer, sizes)
        elif self._copies.sizes != sizes:
            raise ValueError(
                f"balance serves a layer with other experts: {_shown(self._copies.sizes)}, these are {_shown(sizes)}; give this layer a "
                "Balance of its own"
            )
        return self._copies

    def destroy(self) -> None:
        """Leave the peers, whose forwards raise EPPeerError then. Layers that have it cannot run any more. May be repeated."""
        if self._copies is not None:
            self._copies.slots.destroy()


def _shown(sizes: tuple[object, ...]) -> str:
    up, down, dtype, num_ranks = sizes
    return f"{list(up)} and {list(down)} {dtype} on {num_ranks} ranks"  # type: ignore[call-overload]


class Parts(NamedTuple):
    """One tensor for each weight of the experts."""

    up: Tensor
    down: Tensor


class Copies:
    """The expert slots of this rank, and what goes through them: counts of rows, weights, gradients."""

    def __init__(self, balance: Balance, experts: "GroupedExperts", buffer: Buffer, sizes: tuple[object, ...]):
        num_ranks, dtype = buffer.num_ranks, experts.up.dtype
        if num_ranks > MAX_SLOTS or dtype not in FLOATS:
            raise ValueError(f"balance serves {MAX_SLOTS} ranks and experts in {list(FLOATS)}; these are {num_ranks} and {dtype}")
        self.sizes, self._rank, self._num_slots, self._cost = sizes, buffer.rank, balance.num_slots, balance.cost
        self._num_experts = num_ranks * experts.num_local_experts
        width = -(-self._num_experts // _WORDS) * _WORDS
        shapes = [(balance.num_slots, *weight.shape[1:]) for weight in (experts.up, experts.down)]
        bytes_of = [2 * torch.Size(shape).numel() * dtype.itemsize for shape in shapes] + [num_ranks * width * 4]
        self.slots = ExpertSlots(
            buffer._group, sum(bytes_of) + 5 * ALIGNMENT, backend=buffer.backend if buffer.backend == "nvlink" else "collective"
        )
        device = self.slots.memory.device
        self._counts = self.slots.empty(num_ranks, width, dtype=torch.int32).fill_(0)
        self.weights, self._gradients = (Parts(*(self.slots.empty(*shape, dtype=dtype) for shape in shapes)) for _ in range(2))
        # As if the counts of rank r were the weights of expert r, of which every other rank has a copy.
        ranks = torch.arange(num_ranks, dtype=torch.int32, device=device)
        self._all = torch.where(torch.eye(num_ranks, dtype=torch.bool, device=device), -1, ranks)

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
        """Add the gradients of copies to those of their experts at home. None: that weight is frozen, in all ranks. Collective."""
        slots, home = [], []
        for slot, gradient, at_home in zip(self._gradients, of_copies, of_home, strict=True):
            if gradient is not None and at_home is not None:
                slots.append(slot.copy_(gradient))
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
        y: Tensor = _Balanced.apply(x, experts.up, experts.down, experts, num_rows, *self)
        return y


class _Balanced(torch.autograd.Function):
    """The experts' own rows, then the copies'. A graph of its own is kept for each, so that weights are there before the backward needs
    them and gradients come home before it ends."""

    @staticmethod
    def forward(
        ctx: Context, x: Tensor, up: Tensor, down: Tensor, experts: "GroupedExperts", num_rows: list[int], copies: Copies, plan: CopyPlan
    ) -> Tensor:
        num_local = experts.num_local_experts
        first = sum(num_rows[:num_local])
        needs_x, needs_up, needs_down, *_ = ctx.needs_input_grad
        home, guests = (part.detach().requires_grad_(needs_x) for part in (x[:first], x[first:]))
        # `data`, as autograd is not to see that other layers use the memory in between.
        weights = Parts(copies.weights.up.data.requires_grad_(needs_up), copies.weights.down.data.requires_grad_(needs_down))
        copies.fetch(plan, up, down)
        with torch.set_grad_enabled(needs_x or needs_up or needs_down):
            ours = experts.with_weights(home, num_rows[:num_local], up, down)
            theirs = experts.with_weights(guests, num_rows[num_local:], *weights)
        ctx.kept = copies, plan, (home, guests), (up, down), weights, (ours, theirs)
        return torch.cat([ours.detach(), theirs.detach()])

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor | None, ...]:
        if not hasattr(ctx, "kept"):
            raise RuntimeError("a layer with copies of experts keeps nothing for a second backward; run its forward again")
        copies, plan, rows, home, weights, outputs = ctx.kept
        del ctx.kept  # the graphs, which would last as long as the output
        copies.fetch(plan, *home)
        inputs = [*rows, *home, *weights]
        wanted = [tensor for tensor in inputs if tensor.requires_grad]
        made = iter(torch.autograd.grad(outputs, wanted, grad.split([len(part) for part in rows])))
        grads = [next(made) if tensor.requires_grad else None for tensor in inputs]
        copies.bring_home(plan, grads[4:], grads[2:4])
        grad_x = None if grads[0] is None else torch.cat(grads[:2])  # type: ignore[arg-type]
        return grad_x, grads[2], grads[3], None, None, None, None
