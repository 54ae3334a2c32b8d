"""NVIDIA's NCCL EP, which TransformerEngine ships, as a baseline in the same run: `--peer nccl_ep`."""

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.common.records import nccl_version
from benchmarks.common.verify import close_to, expected_combine, expected_dispatch, lanes_of_rank
from deepep_moe.errors import BackendUnavailableError, EPError
from deepep_moe.exchange.handle import padded
from deepep_moe.tune.operations import compare_bits
from deepep_moe.tune.workload import Inputs, Operation, Shape, make_inputs

NAME = "nccl_ep"
_PACKAGE, _MODULE = "transformer_engine", "transformer_engine.pytorch.ep"
_NUM_TOKENS_MULTIPLE = 64  # NCCL EP accepts only such bounds on the tokens of a rank
_KEY_COLUMNS = 4  # bf16 columns that fill an int64


def _unavailable(reason: object) -> BackendUnavailableError:
    return BackendUnavailableError(
        f"--peer {NAME}: NCCL EP cannot be used here ({reason}); install transformer_engine[pytorch] 2.20.2, built for this PyTorch and "
        "CUDA, and nvidia-nccl-cu13 2.32.3 with LD_PRELOAD set to its libnccl.so.2, or leave --peer out"
    )


def load() -> tuple[Any, str]:
    """Import the package. Return its `ep` module and the versions of TransformerEngine and of the NCCL that is loaded.

    Raises BackendUnavailableError, with the reason and the fix, where the package, its NCCL EP functions or its NCCL is missing.
    """
    try:
        package, module = (importlib.import_module(name) for name in (_PACKAGE, _MODULE))
        package.require_nccl_ep()
        version = f"TransformerEngine {package.__version__}, NCCL {nccl_version()}"
    except (ImportError, OSError, RuntimeError, AssertionError) as error:  # its import asserts that its three parts match
        raise _unavailable(error) from error
    if not hasattr(module.tex, "ep_initialize"):
        raise _unavailable("transformer_engine_torch was compiled without NVTE_WITH_NCCL_EP=1")
    return module, version


class NcclEP:
    """Runs `transformer_engine.pytorch.ep`: dispatch and combine of bf16 rows, sorted by expert, one row per (token, expert).

    A dispatch counts first, as ours does: it gathers the top-k of all ranks, and its host waits for the number of rows that arrive. Its
    combine applies no weights, so it has less to do than ours of the expert layout.
    """

    name = NAME

    def __init__(self, shape: Shape, group: "dist.ProcessGroup", num_max_tokens: int):
        """Set up NCCL EP over the NCCL `group`, for calls of up to `num_max_tokens` tokens a rank. Collective; once at a time in a process.

        Raises BackendUnavailableError where NCCL EP is missing or refuses this machine.
        """
        self.shape, self.rank, self.num_max_tokens = shape, dist.get_rank(group), num_max_tokens
        self.ep, self.version = load()
        bound = -(-num_max_tokens // _NUM_TOKENS_MULTIPLE) * _NUM_TOKENS_MULTIPLE
        try:
            self.ep.ep_bootstrap(group, shape.num_experts, bound, shape.hidden, shape.num_topk)
        except RuntimeError as error:  # so it refuses a GPU, or an NCCL older than the one it was built with
            raise _unavailable(error) from error
        self._new_buffer = partial(
            self.ep.EpBuffer, shape.num_topk, bound, shape.hidden, shape.num_local_experts, alignment=shape.expert_alignment
        )

    def operations(self, inputs: Inputs) -> list[Operation]:
        """Return its calls, after a check that they do the same work. `inputs` are those that `make_inputs` makes for this rank.

        Collective; raises EPError, or ValueError for too many tokens or an `expert_alignment` that is not a power of two.
        """
        num_tokens = len(inputs.x)
        if num_tokens > self.num_max_tokens:
            raise ValueError(f"inputs have {num_tokens} tokens, the peer was made for {self.num_max_tokens}; raise num_max_tokens")
        held = self._new_buffer()  # combine keeps the routing of its own dispatch
        recv_x, recv_weights, counts = self._dispatch(held, inputs)
        is_row = (recv_x != 0).any(1)  # a weight of padding may be anything
        recv_weights = torch.where(is_row, recv_weights, 0.0)
        combine = partial(self._combine, held, (recv_x * recv_weights[:, None]).to(recv_x.dtype), num_tokens)
        combined = combine()
        everyone = [make_inputs(self.shape, num_tokens, rank, inputs.x.device) for rank in range(self.shape.num_ranks)]
        check_dispatch(recv_x, recv_weights, counts, everyone, self.shape, self.rank)
        close_to("its combine", combined, expected_combine(inputs, self.shape, "expert"))
        calls: dict[str, Callable[[], Any]] = {"dispatch": partial(self._dispatch, self._new_buffer(), inputs), "combine": combine}
        return [Operation(op, "bfloat16", "expert", 2 * self.shape.hidden, call, None, self.name) for op, call in calls.items()]

    def destroy(self) -> None:
        """Give back its memory, while the group lives. Collective."""
        self.ep.ep_finalize()

    @torch.no_grad()
    def _dispatch(self, buffer: Any, inputs: Inputs) -> tuple[Tensor, Tensor, Tensor]:
        """Return (recv_tokens, recv_topk_weights, tokens_per_expert)."""
        return self.ep.ep_dispatch(buffer, inputs.x, inputs.topk_idx, inputs.topk_weights)

    @torch.no_grad()
    def _combine(self, buffer: Any, rows: Tensor, num_tokens: int) -> Tensor:
        return self.ep.ep_combine(buffer, rows, num_local_tokens=num_tokens)


def check_dispatch(recv_x: Tensor, recv_weights: Tensor, counts: Tensor, everyone: list[Inputs], shape: Shape, rank: int) -> None:
    """Raise EPError unless a dispatch gave `rank` its rows, bit for bit. The rows of one expert may have any order."""
    experts = lanes_of_rank(torch.cat([i.topk_idx for i in everyone]), shape, rank)[2]
    groups = padded(experts.bincount(minlength=shape.num_local_experts), shape.expert_alignment)
    compare_bits("its tokens_per_expert", counts, groups.to(counts.dtype))
    expected = expected_dispatch(everyone, shape, rank, "expert", is_fp8=False)
    if recv_x.shape != expected["recv_x"].shape:
        raise EPError(f"its recv_tokens is {list(recv_x.shape)}, and not {list(expected['recv_x'].shape)}")
    actual_order, order = _sorted_groups(recv_x, groups), _sorted_groups(expected["recv_x"], groups)
    compare_bits("its recv_tokens", recv_x[actual_order], expected["recv_x"][order])
    compare_bits("its recv_topk_weights", recv_weights[actual_order], expected["recv_topk_weights"][order])


def _sorted_groups(rows: Tensor, groups: Tensor) -> Tensor:
    """Return the indices that sort the `rows` of each group by their first columns. `groups` are the numbers of rows."""
    order = rows[:, :_KEY_COLUMNS].contiguous().view(torch.int64)[:, 0].argsort()
    group = torch.arange(len(groups), device=rows.device).repeat_interleave(groups)
    return order[group[order].argsort(stable=True)]
