"""The experts of a MoE block of transformers, each rank with its share of them."""

from collections.abc import Iterator

import torch.distributed as dist
from torch import Tensor, nn

from deepep_moe.exchange.buffer import Buffer, new_layer
from deepep_moe.exchange.calls import notify_peers_on_failure
from deepep_moe.exchange.checks import GUESS
from deepep_moe.exchange.handle import DispatchOutput
from deepep_moe.group.rendezvous import agree, check_same, join
from deepep_moe.integrations.common.warn_once import say_on
from deepep_moe.integrations.huggingface import saving
from deepep_moe.integrations.huggingface.proof import WEIGHTS, check, is_stack
from deepep_moe.library import untraced
from deepep_moe.nn import GroupedExperts, mark_experts
from deepep_moe.nn.metrics import count_repeat, count_rows, timed
from deepep_moe.nn.rank_parameters import RankExperts

_Block = tuple[str, int, int]  # name of the experts, hidden, number of experts


class SpreadExperts(RankExperts):
    """Takes the place of a block's `experts`, and is called as they are. The block keeps its router and its shared experts.

    Attributes:
        experts: `GroupedExperts` with the weights of this rank's experts.
        buffer: the exchange, which blocks of one size share.
    """

    is_spread = True  # `saving` knows its weights as those of the model

    def __init__(self, experts: nn.Module, buffer: Buffer):
        super().__init__()
        local = slice(buffer.rank * buffer.num_local_experts, (buffer.rank + 1) * buffer.num_local_experts)
        whole = [getattr(experts, weight) for weight in WEIGHTS]
        shares = [(w.detach().to_local() if hasattr(w, "to_local") else w[local].detach()).clone() for w in whole]
        num_local, inner, hidden = shares[0].shape
        self.buffer, self._layer = buffer, new_layer()
        self.experts = GroupedExperts(num_local, hidden, inner // 2, zero_tail=False, device="meta")
        self.experts.up, self.experts.down = (
            nn.Parameter(share, requires_grad=weight.requires_grad) for share, weight in zip(shares, whole, strict=True)
        )
        nn.Module.register_state_dict_pre_hook(self, saving.refuse_state_dict)
        self.check_wrappers()

    @untraced
    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Send hidden_states [num_tokens, hidden] to the experts top_k_index with top_k_weights, [num_tokens, num_topk].
        Collective over the buffer's group. Returns the shape of hidden_states.

        Raises:
            ValueError: more tokens than `spread_experts` was told, or a data-parallel wrapper has mixed the experts of ranks.
            EPError: what `Buffer.dispatch` raises.
        """
        out = notify_peers_on_failure(self.buffer, self._dispatch, hidden_states, top_k_index, top_k_weights)
        y = notify_peers_on_failure(self.buffer, self._run_experts, out)
        settled = self.buffer.settle(out)  # if it raises, the dispatch has failed, which the peers know
        if settled is not out:
            count_repeat(self)
            y = notify_peers_on_failure(self.buffer, self._run_experts, settled)
        with timed(self, y):
            combined: Tensor = self.buffer.combine(y, settled.handle, settled.recv_topk_weights)
        return combined.view(hidden_states.shape)

    def _dispatch(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> DispatchOutput:
        self.check_wrappers()
        rows, most = hidden_states.reshape(-1, hidden_states.shape[-1]).contiguous(), self.buffer.num_max_tokens_per_rank
        saving.install()
        if len(rows) > most:
            raise ValueError(
                f"hidden_states has {len(rows)} tokens, more than num_max_tokens_per_rank, which is {most}; pass a larger number to "
                "spread_experts(model, num_max_tokens_per_rank=...)"
            )
        with timed(self, rows):
            out = self.buffer.dispatch(rows, top_k_index, top_k_weights.float(), num_recv_rows=GUESS, layer=self._layer)
        count_rows(self, lambda: out.handle.num_rows_per_expert)
        return out

    def _run_experts(self, out: DispatchOutput) -> Tensor:
        y: Tensor = self.experts(out.recv_x, out.handle.num_rows_per_expert)
        return y.contiguous()


def spread_experts(
    model: nn.Module,
    *,
    num_topk: int | None = None,
    group: "dist.ProcessGroup | None" = None,
    num_max_tokens_per_rank: int = 4096,
    backend: str = "auto",
) -> list[str]:
    """Replace the experts of every MoE block of `model` by this rank's share of them, which tokens of all ranks reach.

    Call it on every rank, with the same weights on all of them, once these are loaded and lie on their device, and before an optimizer or
    `DistributedDataParallel` takes the parameters. Outputs stay those of the model, up to the order of sums. The memory of a rank's experts
    shrinks by the number of ranks. docs/data_parallel.md says what wrappers of the model do with them.

    Experts are taken only if they compute what `GroupedExperts` does: each rank runs those that it will hold on rows of many magnitudes,
    forward and backward. A model that is refused stays as it is, on all ranks.

    Args:
        model: its blocks have `experts` with `gate_up_proj [num_experts, 2 * intermediate, hidden]` and `down_proj [num_experts, hidden,
            intermediate]`. They are SwiGLU without biases and are called with (hidden_states, top_k_index, top_k_weights). Mixtral, Qwen
            MoE, DeepSeek-V2 and -V3, GLM-4 MoE, OLMoE and others have such blocks.
        num_topk: experts of a token. None: `model.config.num_experts_per_tok`.
        group, num_max_tokens_per_rank, backend: as for `Buffer`.

    Returns:
        The names of the modules that were replaced.

    Raises:
        ValueError: no block has this shape, all are spread already, or the top-k is not known. Or an expert computes something else
            (biases, another activation, limits, norms), or has something that would be lost (more parameters, hooks, LoRA).
        EPPeerError: a peer has raised one of these.
        EPMismatchError: the ranks have different blocks.
        EPError: what `Buffer` raises.
    """
    members, num_ranks, rank = join(group, "spread model")
    error: Exception | None = None
    blocks: list[_Block] = []
    try:
        if num_topk is None:
            num_topk = getattr(getattr(model, "config", None), "num_experts_per_tok", None)
        if num_topk is None:
            raise ValueError("num_topk is None, and the model has no config.num_experts_per_tok; pass num_topk")
        blocks = _find(model)
        done: set[int] = set()
        for name, _, _ in blocks:
            experts = model.get_submodule(name)
            if id(experts) not in done:
                check(name, experts, num_topk, members, rank, num_ranks)
            done.add(id(experts))
    except Exception as refused:
        error = refused
    blocks_of_ranks = agree("spread_experts", error, members, num_ranks, blocks)
    check_same([{"blocks (name, hidden, num_experts)": str(theirs)} for theirs in blocks_of_ranks], "give all ranks one model")
    assert num_topk is not None
    buffers: dict[tuple[int, int], Buffer] = {}
    try:
        for _, hidden, num_experts in blocks:
            if (hidden, num_experts) not in buffers:
                buffers[hidden, num_experts] = Buffer(group, num_max_tokens_per_rank, hidden, num_experts, num_topk, backend=backend)
    except BaseException:
        for buffer in buffers.values():
            buffer.destroy()
        raise
    spread: dict[int, SpreadExperts] = {}  # a module that stands in several places stays one
    for name, hidden, num_experts in blocks:
        experts = model.get_submodule(name)
        layer = spread.get(id(experts)) or SpreadExperts(experts, buffers[hidden, num_experts])
        spread[id(experts)] = layer
        model.get_submodule(name.rpartition(".")[0]).experts = layer
    say_on(len(spread), next(iter(buffers.values())).backend, {"deepep_moe's grouped experts in the place of the model's"}, group)
    mark_experts(model)
    saving.install()
    return [name for name, _, _ in blocks]


def expert_parameters(model: nn.Module) -> Iterator[nn.Parameter]:
    """Return the parameters that differ from rank to rank. Leave them out of an average over ranks: their gradients have the tokens of all
    ranks already. With a loss averaged over R ranks, divide them by R, unless `DistributedDataParallel` wraps the model: then that is
    done."""
    for module in model.modules():
        if isinstance(module, SpreadExperts):
            yield from module.expert_parameters()


def _find(model: nn.Module) -> list[_Block]:
    """Return the blocks of a model. Raises ValueError for a model without any, or with experts that are wrapped or shared."""
    blocks: list[_Block] = []
    owners: dict[int, set[int]] = {}
    spread: list[str] = []
    for name, module in model.named_modules(remove_duplicate=False):
        if any(hasattr(getattr(module, weight, None), "ds_id") for weight in WEIGHTS):
            raise ValueError(f"{name} is partitioned by DeepSpeed's ZeRO-3; spread_experts needs whole weights, and no ZeRO-3 around it")
        for parameter in module._parameters.values():
            owners.setdefault(id(parameter), set()).add(id(module))
        *path, last = name.split(".")
        if isinstance(module, SpreadExperts):
            spread.append(name)
        elif last == "experts" and type(module).__name__ != "ParamWrapper" and is_stack(module):
            blocks.append((name, module.gate_up_proj.shape[2], module.gate_up_proj.shape[0]))
        elif "experts" in path and is_stack(module):
            wrapper = ".".join(path)
            raise ValueError(
                f"{wrapper} is a {type(model.get_submodule(wrapper)).__name__} around experts, such as that of LoRA on experts; "
                "merge it first: model = model.merge_and_unload()"
            )
    if not blocks and spread:
        raise ValueError(f"{type(model).__name__} is already spread ({spread[0]} and {len(spread) - 1} more); call spread_experts once")
    if not blocks:
        others = [f"{name} is a {type(each).__name__}; " for name, each in model.named_modules() if name.rpartition(".")[2] == "experts"]
        raise ValueError(
            f"{type(model).__name__} has no module `experts` with gate_up_proj [num_experts, 2 * intermediate, hidden] and down_proj "
            f"[num_experts, hidden, intermediate]; {others[0] if others else ''}transformers 5 and newer has those of most models so"
        )
    for name, _, _ in blocks:
        for weight in WEIGHTS:
            if len(owners.get(id(getattr(model.get_submodule(name), weight)), ())) > 1:
                raise ValueError(
                    f"{name}.{weight} is also a parameter of another module; only experts with weights of their own can be spread"
                )
    return blocks
