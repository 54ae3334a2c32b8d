"""On GPUs: the dispatcher against alltoall's, and a few steps of the example."""

import contextlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron_cases import HIDDEN, assert_same, build_layer, forward_backward, layer_config, model_parallel
from on_ranks import on_ranks

from deepep_moe.integrations.common.process_groups import default_group
from deepep_moe.integrations.megatron.plugin import selection
from deepep_moe.testing.launch import run_ranks

pytest.importorskip("megatron.core")

ROOT = Path(__file__).parents[3]


# Rank r is on GPU r.
ON_GPUS = pytest.mark.parametrize("num_ranks", (pytest.param(1, marks=pytest.mark.gpu), pytest.param(2, marks=pytest.mark.multi_gpu(2))))


@on_ranks(2)
def test_default_group_is_replaced(rank: int, num_ranks: int) -> None:
    before = dist.group.WORLD
    with default_group("gloo"):
        assert (dist.get_rank(), dist.get_world_size()) == (rank, num_ranks) and dist.group.WORLD is not before
        gathered = [torch.zeros(1) for _ in range(num_ranks)]
        dist.all_gather(gathered, torch.full((1,), float(rank)))
        assert torch.cat(gathered).tolist() == list(range(num_ranks))
    assert not dist.is_initialized()


def parity(rank: int, num_ranks: int, backend: str) -> str:
    with model_parallel("cuda", ep=num_ranks, backend=backend) as sizes:
        ours, theirs = (build_layer(layer_config(**sizes, **selection(name))) for name in ("deepep_moe", "alltoall"))
        theirs.load_state_dict(ours.state_dict())
        for num_rows in (5 + 40 * rank, 64):  # the first agrees on the bound
            generator = torch.Generator().manual_seed(rank)
            inputs = [torch.randn(num_rows, 2, HIDDEN, generator=generator).cuda() for _ in range(2)]
            passes = [forward_backward(layer, *inputs) for layer in (ours, theirs)]
            assert_same(*passes, f"{num_rows} rows, rank {rank}", tolerance=5e-6)
        return ours.token_dispatcher.buffer.backend


@ON_GPUS
@on_ranks()
def test_recomputed_layer(rank: int, num_ranks: int) -> None:
    """A layer under recompute repeats its dispatch along the handle, to the bit, and counts no rows again."""
    from test_megatron_recompute import RECOMPUTED, watch

    with model_parallel("cuda", ep=num_ranks, backend="nvlink") as sizes:
        recomputed, plain = (build_layer(layer_config(**sizes, **selection(), **changes)) for changes in (RECOMPUTED, {}))
        for seed in range(3):
            generator = torch.Generator().manual_seed(10 * seed + rank)
            inputs = [torch.randn(12, 1, HIDDEN, generator=generator).cuda() for _ in range(2)]
            expected = forward_backward(plain, *inputs)
            handles = watch(plain.token_dispatcher.buffer)
            assert_same(forward_backward(recomputed, *inputs), expected, f"rank {rank}", tolerance=0.0)
            assert [handle is None for handle in handles] == [True, False]
            del plain.token_dispatcher.buffer.dispatch


def _step(model: torch.nn.Module, data_iterator: list[Any], **_: Any) -> dict[str, torch.Tensor]:
    """Output and gradients of a micro batch, as a forward_backward_func of Megatron-Core is called."""
    data = next(data_iterator[0])
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.zero_()
    output, _ = model(data["x"])
    output.backward(data["cotangent"])
    return {"output": output.detach()} | {
        name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None
    }


def _full_iteration(rank: int, num_ranks: int) -> None:
    from megatron.core import full_cuda_graph
    from megatron.core.tensor_parallel.random import initialize_rng_tracker

    initialize_rng_tracker(use_cudagraphable_rng=True)
    with contextlib.ExitStack() as undo:
        sizes = undo.enter_context(model_parallel("cuda", ep=num_ranks, backend="nvlink", grouped_experts=True, sync_free=True))
        switches = {"bf16": True, "params_dtype": torch.bfloat16, "cuda_graph_impl": "local", "cuda_graph_scope": "full_iteration"}
        try:
            config = layer_config(**sizes, **selection(), **switches)
        except (TypeError, AssertionError, ValueError):  # 0.19: a name of its own
            config = layer_config(**sizes, **selection(), **switches | {"cuda_graph_impl": "full_iteration", "cuda_graph_scope": None})
        undo.enter_context(torch.cuda.stream(torch.cuda.Stream()))  # autograd's nodes that stay must not belong to the legacy stream
        layer = build_layer(config).cuda()
        wrapper = full_cuda_graph.FullCudaGraphWrapper(_step, cuda_graph_warmup_steps=2)
        for seed in range(6):
            generator = torch.Generator().manual_seed(10 * seed + rank)
            data = {name: torch.randn(12, 1, HIDDEN, generator=generator).bfloat16().cuda() for name in ("x", "cotangent")}
            got = wrapper(model=layer, data_iterator=iter([data]), num_microbatches=1, seq_length=12, forward_only=False)
            got = {name: value.clone() for name, value in got.items()}
            for name, expected in _step(layer, [iter([data])]).items():
                assert torch.equal(got[name], expected), f"rank {rank}, step {seed}: {name}"
        assert full_cuda_graph.FullCudaGraphWrapper.cuda_graph["training"] is not None, "steps were replayed"


@ON_GPUS
def test_full_iteration_graph(num_ranks):
    """Megatron-Core's graph of a whole step: replays equal eager steps to the bit."""
    pytest.importorskip("megatron.core.full_cuda_graph")
    run_ranks(_full_iteration, num_ranks)


@pytest.mark.multi_gpu(2)
@pytest.mark.parametrize("backend", ["nvlink", "collective"])
def test_outputs_and_gradients_equal_alltoall_on_gpus(backend):
    assert run_ranks(parity, 2, backend) == [backend] * 2


@pytest.mark.multi_gpu(2)
def test_example_on_gpus(tmp_path):
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    environment.pop("PYTHONSAFEPATH", None)  # the example finds the files beside it
    command = [sys.executable, "-W", "ignore", str(ROOT / "examples" / "megatron" / "train.py"), "--device", "cuda", "--num-ranks", "2"]
    command += ["--steps", "8", "--compare", "alltoall", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "nvlink" in done.stdout and "loss curves of deepep_moe and alltoall agree" in done.stdout
