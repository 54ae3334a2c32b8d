"""A mixture-of-experts layer on `Buffer` and `Router`, and the experts most models use."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from deepep_moe import config
from deepep_moe.arguments import check_bool, check_is_tensor
from deepep_moe.exchange.buffer import Buffer, new_layer
from deepep_moe.exchange.calls import notify_peers_on_failure
from deepep_moe.exchange.checks import BLOCKWISE, GUESS
from deepep_moe.exchange.handle import DispatchOutput
from deepep_moe.group.rendezvous import check_same, gather_objects
from deepep_moe.library import untraced
from deepep_moe.nn.balance import Balance, Copies, Parts, Planned, check_is_balance, has_hooks
from deepep_moe.nn.grouped_experts import GroupedExperts
from deepep_moe.nn.metrics import count_repeat, count_rows, timed
from deepep_moe.nn.rank_parameters import RankExperts
from deepep_moe.nn.router import Router
from deepep_moe.ops.fp8_kept import check_is_first_microbatch, kept_in
from deepep_moe.ops.fp8_products import GROUP_ALIGNMENT, check_alignment, check_products, check_widths


class SwiGLU(nn.Module):
    """The gated feed-forward network of an expert: down(silu(gate(x)) * up(x)), without biases (arXiv 2002.05202).

    hidden, intermediate: columns of the input and of the inner product. Takes and returns [num_rows, hidden].
    """

    def __init__(self, hidden: int, intermediate: int, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None):
        super().__init__()
        factory: dict[str, Any] = {"bias": False, "device": device, "dtype": dtype}
        self.gate_up = nn.Linear(hidden, 2 * intermediate, **factory)
        self.down = nn.Linear(intermediate, hidden, **factory)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        y: Tensor = self.down(nn.functional.silu(gate) * up)
        return y


class LocalExperts(nn.Module):
    """The experts of one rank, one module per expert, applied to rows grouped by expert.

    Every module is called, even with 0 rows, so that every parameter has a gradient on every rank.
    """

    def __init__(self, experts: Sequence[nn.Module]):
        super().__init__()
        self.experts = nn.ModuleList(experts)

    def forward(self, x: Tensor, num_rows_per_expert: Tensor | list[int]) -> Tensor:
        """Return the experts' outputs [num_rows, hidden]. x: [num_rows, hidden] grouped by expert. num_rows_per_expert:
        [num_local_experts], with the sum num_rows. Prefer a list: the host waits for a tensor on a GPU."""
        counts = num_rows_per_expert.tolist() if isinstance(num_rows_per_expert, Tensor) else num_rows_per_expert
        outputs = [expert(rows) for expert, rows in zip(self.experts, x.split(counts), strict=True)]
        for index, y in enumerate(outputs):
            if not isinstance(y, Tensor):  # checked first, as the name is costly to build
                check_is_tensor(f"the output of local expert {index}", y)
        return torch.cat(outputs)


def _num_experts(experts: nn.Module) -> int | None:
    if isinstance(experts, LocalExperts):
        return len(experts.experts)
    return experts.num_local_experts if isinstance(experts, GroupedExperts) else None


def _check_output(who: str, y: Any, x: Tensor) -> None:
    check_is_tensor(f"the output of {who}", y)
    if y.shape != x.shape:
        raise ValueError(f"{who} returned shape {list(y.shape)} for rows of shape {list(x.shape)}; the shapes must be the same")


def _check_fp8(experts: nn.Module, hidden: int, expert_alignment: int, num_recv_rows: int | None) -> None:
    if not isinstance(experts, GroupedExperts):
        raise ValueError(f"fp8 is True, but experts are {type(experts).__name__}; pass GroupedExperts, or leave fp8 out")
    if experts.up_bias is not None:
        raise ValueError("fp8 is True, but the experts have biases; pass bias=False to GroupedExperts, or leave fp8 out")
    check_widths(hidden=hidden, intermediate=experts.intermediate)
    check_alignment("expert_alignment", expert_alignment)
    check_alignment("num_recv_rows", num_recv_rows or 0)


def _check_balance(experts: nn.Module) -> None:
    if not isinstance(experts, GroupedExperts) or type(experts).forward is not GroupedExperts.forward or experts.up_bias is not None:
        raise ValueError("balance needs experts that are GroupedExperts without biases")


class MoELayer(RankExperts):
    """Routed experts spread over the ranks of a group, and an optional shared expert for all tokens.

    `Buffer.dispatch` sends tokens to their experts in the expert layout, so the experts get rows grouped by expert. A weighted
    `Buffer.combine` brings rows back, and adds the shared expert's output before it rounds.

    Call `mark_experts(model)` before `DistributedDataParallel` wraps a model with such layers; otherwise it gives all ranks the experts of
    rank 0. docs/data_parallel.md describes each wrapper.

    Args:
        router: chooses the experts; its hidden, num_experts and num_topk are the layer's. Its parameters are replicated on all ranks.
        experts: the experts of this rank. A sequence has a module [num_rows, hidden] -> [num_rows, hidden] for each local expert. One
            module, such as `GroupedExperts`, is called as `experts(x, num_rows_per_expert)`. `x` is [num_rows, hidden]; the counts are
            [num_local_experts] on its device.
        shared_expert: a module [num_tokens, hidden] -> [num_tokens, hidden], replicated on all ranks.
        buffer: a buffer for the router's settings. Layers that run one after another should share one: on a GPU, for 4096 tokens, it takes
            from 0.4 GiB (4 ranks, hidden 4096) to 1.5 GiB (8 ranks, hidden 7168). None: the layer makes its own.
        group, num_max_tokens_per_rank, backend, sums: arguments of `Buffer`, only without `buffer`. The default of tokens is 4096.
        expert_alignment: rows of an expert are padded with zero rows to a multiple of it. None: 1, or 128 with `fp8`.
        num_recv_rows: a bound on the rows that this rank receives in a forward, padding included, as in `Buffer.dispatch`. The host then
            waits for nothing. Not allowed with a sequence of experts, which needs counts on the host. A bound of ranks x tokens of a rank x
            min(top-k, experts of a rank), plus padding, is always enough. None: no bound. With `balance` it bounds the rows of
            copies too, and is the same on all ranks. Plans keep them within it where slots suffice.
        fp8: send rows as fp8 in both passes, quantized once; the experts' products take them (docs/design/fp8_training.md). Needs bf16
            tokens, `GroupedExperts` without biases, and multiples of 128 for `hidden`, `intermediate`, `expert_alignment` and
            `num_recv_rows`. The experts weight the rows, so a token's sum is rounded at another place than without `fp8`.
        balance: plan copies of hot experts in each forward (`Balance`). Needs `GroupedExperts` without biases. A `buffer` of
            several ranks then has `balance.num_slots` more experts for each rank. One rank alone has nothing to balance.

    Raises:
        ValueError: the number of experts or the buffer does not fit the router, `buffer` was given with settings of a buffer, or fp8 does
            not serve the experts. Also the errors of `Buffer`.
    """

    def __init__(
        self,
        router: Router,
        experts: nn.Module | Sequence[nn.Module],
        shared_expert: nn.Module | None = None,
        *,
        buffer: Buffer | None = None,
        group: "dist.ProcessGroup | None" = None,
        num_max_tokens_per_rank: int | None = None,
        backend: str | None = None,
        expert_alignment: int | None = None,
        num_recv_rows: int | None = None,
        fp8: bool = False,
        sums: str | None = None,
        balance: Balance | None = None,
    ):
        super().__init__()
        self._layer = new_layer()
        self.router = router
        is_list = not isinstance(experts, nn.Module) or isinstance(experts, (nn.ModuleList, nn.Sequential))
        self.experts: nn.Module = LocalExperts(list(experts)) if is_list else experts  # type: ignore[arg-type, assignment]
        self.shared_expert = shared_expert
        check_bool("fp8", fp8)
        self.fp8: str | bool = BLOCKWISE if fp8 else False
        if expert_alignment is None:
            expert_alignment = GROUP_ALIGNMENT if fp8 else 1
        self.expert_alignment = expert_alignment
        if num_recv_rows is not None and is_list:
            raise ValueError("num_recv_rows is given, but experts are called one by one, with counts on the host; pass GroupedExperts")
        self.num_recv_rows = num_recv_rows
        if isinstance(self.experts, GroupedExperts):
            self.experts.zero_tail = False  # no combine reads it
        if fp8:
            _check_fp8(self.experts, router.hidden, self.expert_alignment, num_recv_rows)
        settings = {"group": group, "num_max_tokens_per_rank": num_max_tokens_per_rank, "backend": backend, "sums": sums}
        beside = [name for name, value in settings.items() if value is not None]
        if buffer is not None and beside:
            raise ValueError(f"a buffer was given, which has its own {', '.join(beside)}; leave {'it' if len(beside) == 1 else 'them'} out")
        if balance is not None:
            check_is_balance(balance)
            _check_balance(self.experts)
        num_ranks = buffer.num_ranks if buffer is not None else dist.get_world_size(group) if dist.is_initialized() else 1
        num_slots = balance.num_slots if balance is not None and num_ranks > 1 else 0
        if buffer is None:
            num_tokens = 4096 if num_max_tokens_per_rank is None else num_max_tokens_per_rank
            sizes = num_tokens, router.hidden, router.num_experts + num_ranks * num_slots, router.num_topk
            buffer = Buffer(group, *sizes, backend=backend or "auto", sums=sums or "ranks")
        self.buffer = buffer
        if fp8 and buffer.sums != "ranks":
            raise ValueError(f"fp8 is True, whose experts weight the rows, but the buffer's sums={buffer.sums!r} weight them in combine")
        made_for = (self.buffer.hidden, self.buffer.num_experts - num_ranks * num_slots, self.buffer.num_topk)
        if made_for != (router.hidden, router.num_experts, router.num_topk):
            raise ValueError(
                f"the buffer was made for hidden, num_experts, num_topk = {made_for}, "
                f"the router has {(router.hidden, router.num_experts, router.num_topk)}; they must be the same"
                + (f", beside the {num_slots} expert slots of each rank that balance needs in its num_experts" if num_slots else "")
            )
        given = _num_experts(self.experts)
        num_local_experts = self.buffer.num_local_experts - num_slots
        if given is not None and given != num_local_experts:
            raise ValueError(
                f"{given} experts were given; this rank of {self.buffer.num_ranks} holds {num_local_experts} of {router.num_experts}"
            )
        self.check_wrappers()
        self._balance = balance if num_slots else None
        self._agreed: dict[str, object] = {}

    @untraced
    def forward(self, x: Tensor, mask: Tensor | None = None, *, is_first_microbatch: bool | None = None) -> Tensor:
        """Return the layer's output, in the shape of x and the dtype of the experts' outputs. Collective over the buffer's group.

        x: [..., hidden]. mask: [num_tokens] bool, True for tokens to leave out (padding).
        is_first_microbatch: only for fp8. Pass True in the first forward after an optimizer step: it quantizes the experts' weights and
        keeps the copies, 2 bytes per parameter. Pass False in the other forwards, which use the copies (docs/design/fp8_training.md).
        None: each forward quantizes.

        Raises:
            TypeError: the experts' outputs are no tensors.
            ValueError: x has another width or no values, outputs another shape; `is_first_microbatch=False` without copies; a
                data-parallel wrapper has mixed the experts of ranks.
            BackendUnavailableError: fp8 on a GPU without fp8 products.
            EPPeerError: a peer has raised one of these, or what `Buffer.dispatch`, router and experts raise.
        """
        check_is_first_microbatch(is_first_microbatch)
        tell: Callable[..., Any] = partial(notify_peers_on_failure, self.buffer)
        copies = None
        if self._balance is not None:
            copies = tell(self._copies, self._balance)
            tell = copies.telling(self.buffer)
        rows, out, planned = tell(self._dispatch, x, mask, copies)
        y, shared = tell(self._run_both, rows, out, is_first_microbatch, planned)
        settled = self.buffer.settle(out)  # if it raises, the dispatch has failed, which the peers know
        if settled is not out:
            count_repeat(self)
            y = tell(self._run_experts, settled, is_first_microbatch, planned)
        combined: Tensor = tell(self._combine, y, shared, settled, planned)
        return (combined if planned is None else planned.fetch_in_backward(combined)).view(x.shape)

    def _copies(self, balance: Balance) -> Copies:
        """Return the copies of the experts. Collective at first, when ranks compare what their plans follow from."""
        copies = balance.of_layer(self.experts, self.buffer)  # type: ignore[arg-type]
        names = "num_recv_rows", "expert_alignment", "balance"
        settings: dict[str, object] = dict(zip(names, (self.num_recv_rows, self.expert_alignment, repr(balance)), strict=True))
        if settings != self._agreed:
            sizes = self.buffer._group, self.buffer.num_ranks, "comparison of layers", config.timeout_s()
            gathered: list[dict[str, object]] = gather_objects(settings, *sizes)
            check_same(gathered, "construct the layer with the same on every rank, as plans of copies follow from it")
            self._agreed = settings
        return copies

    def _dispatch(self, x: Tensor, mask: Tensor | None, copies: Copies | None = None) -> tuple[Tensor, DispatchOutput, Planned | None]:
        self.check_wrappers()
        if x.shape[-1] != self.router.hidden:
            raise ValueError(f"x has shape {list(x.shape)}; its last dimension must be hidden, {self.router.hidden}")
        rows = x.reshape(-1, self.router.hidden).contiguous()
        try:
            topk_idx, topk_weights, _ = self.router(rows, mask)
        except RuntimeError:
            if rows.is_meta:
                raise ValueError("x is on meta, so it has no values; give tokens on a CPU or a GPU") from None
            raise
        planned, bound = None, self.num_recv_rows
        if copies is not None:
            experts: Any = self.experts
            padding = (self.expert_alignment - 1) * self.buffer.num_local_experts
            most = None if bound is None else max(bound - padding, 0)
            planned = copies.plan(topk_idx, Parts(experts.up, experts.down), has_hooks(experts), most)
            topk_idx = planned.plan.topk_idx
        if self.fp8:
            check_products(rows.device)
        # Experts of another class, or with another forward, may not know of rows behind the last group.
        guesses = bound is None and type(self.experts).forward is GroupedExperts.forward
        guesses = guesses and not (planned is not None and planned.is_whole)
        how: dict[str, Any] = {"expert_alignment": self.expert_alignment, "num_recv_rows": GUESS if guesses else bound}
        how |= {"fp8": self.fp8, "layer": self._layer}
        with timed(self, rows):
            out = self.buffer.dispatch(rows, topk_idx, topk_weights, **how)
        count_rows(self, lambda: out.handle.num_rows_per_expert)
        return rows, out, planned

    def _run_both(
        self, rows: Tensor, out: DispatchOutput, is_first_microbatch: bool | None, planned: Planned | None
    ) -> tuple[Tensor, Tensor | None]:
        """Return the outputs of the experts and of the shared expert."""
        y, shared = self._run_experts(out, is_first_microbatch, planned), None
        if self.shared_expert is not None:
            shared = self.shared_expert(rows)
            _check_output("the shared expert", shared, rows)
            shared = shared.to(y.dtype).contiguous()  # under autocast one of them may be in fp32
        return y, shared

    def _combine(self, y: Tensor, shared: Tensor | None, out: DispatchOutput, planned: Planned | None = None) -> Tensor:
        y = y.contiguous()
        if planned is not None:
            y = planned.end(y, out.handle)
        weights = None if self.fp8 else out.recv_topk_weights
        with timed(self, y):
            combined: Tensor = self.buffer.combine(y, out.handle, weights, bias=shared, fp8=self.fp8)
        return combined

    def _run_experts(self, out: DispatchOutput, is_first_microbatch: bool | None, planned: Planned | None = None) -> Tensor:
        which: dict[str, Any] = {} if planned is None else {"planned": planned}
        counts: Tensor | list[int] = out.handle.num_rows_per_expert
        if isinstance(self.experts, LocalExperts):
            counts = out.handle.num_rows_per_expert_list
        elif planned is not None and planned.is_whole and self.num_recv_rows is None:
            counts = out.handle.num_rows_per_expert_on_host
        if self.fp8 and is_first_microbatch is not None:
            which["is_first_microbatch"] = is_first_microbatch
        probs = [out.recv_topk_weights] if self.fp8 else []  # a weighted combine of fp8 rows would need their gradients in bf16
        y: Tensor = self.experts(out.recv_x, counts, *probs, **which)
        _check_output("the experts", y, out.recv_x)
        return y

    def release_fp8_weights(self) -> None:
        """Drop the kept fp8 copies of the experts' weights. Pass True or None as `is_first_microbatch` to the next forward."""
        for kept in kept_in(self.experts):
            kept.release()
