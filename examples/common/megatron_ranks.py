"""Set a rank up for Megatron-Core on the CPU or on a GPU, without TransformerEngine, and take it down again.

The example, the benchmark and the tests share this. A training script sets up everything but `enable()` itself.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from gpu_ranks import take_gpu
from megatron_cpu import disable_cpu, enable_cpu
from megatron_without_te import disable_without_te, enable_without_te

from deepep_moe.integrations.common.patches import Patches
from deepep_moe.integrations.megatron.plugin import disable, enable

DEVICES = ("cpu", "cuda")


@contextlib.contextmanager
def model_parallel(
    device_type: str = "cpu",
    *,
    ep: int = 1,
    tp: int = 1,
    etp: int = 1,
    seed: int = 1234,
    options: dict[str, Any] | None = None,
    shares_gpus: bool = False,
) -> Iterator[torch.device]:
    """Make Megatron-Core's groups and random states in this process, a rank of torch.distributed, and yield the rank's device.

    "cpu" keeps the default process group. "cuda" replaces it by one over NCCL, with rank r on GPU r. With `shares_gpus` it keeps a group
    over gloo, and ranks share the GPUs. Pass `options`, the arguments of `enable()`, or None to leave the dispatcher off. At the end all
    is undone, except after an error on a GPU: kernels and collectives that wait for peers would block the cleanup, so the process must end.

    Raises ValueError for another device type or too few GPUs.
    """
    if device_type not in DEVICES:
        raise ValueError(f"device_type is {device_type!r}; it must be one of {list(DEVICES)}")
    with contextlib.ExitStack() as undo:
        try:
            device = _set_up_gpu(undo, shares_gpus) if device_type == "cuda" else _set_up_cpu(undo)
            _initialize(undo, ep=ep, tp=tp, etp=etp, seed=seed)
            undo.callback(disable)
            if options is not None:
                enable(**options)
            yield device
            if device.type == "cuda":
                torch.cuda.synchronize()
                dist.barrier(device_ids=None if shares_gpus else [device.index])  # memory stays while a peer's kernel may write to it
        except BaseException:
            if device_type == "cuda":
                undo.pop_all()
            raise


def _set_up_cpu(undo: contextlib.ExitStack) -> torch.device:
    enable_cpu()
    undo.callback(disable_cpu)
    return torch.device("cpu")


def _set_up_gpu(undo: contextlib.ExitStack, shares_gpus: bool) -> torch.device:
    device = take_gpu(undo, shares_gpus=shares_gpus)
    if shares_gpus:
        _reduce_one_by_one(undo)
    enable_without_te()
    undo.callback(disable_without_te)
    # Megatron-Core compiles small functions with torch.compile, which takes seconds in each process and again for new shapes.
    torch.compiler.set_stance("force_eager")
    undo.callback(torch.compiler.set_stance, "default")
    return device


def _reduce_one_by_one(undo: contextlib.ExitStack) -> None:
    """Let Megatron-Core's DDP reduce its buckets in calls of their own, because gloo joins calls for CPU tensors only."""
    from megatron.core.distributed import param_and_grad_buffer

    @contextlib.contextmanager
    def one_by_one(*args: Any, **kwargs: Any) -> Iterator[None]:
        yield

    patches = Patches()
    patches.set(param_and_grad_buffer, "_coalescing_manager", one_by_one)
    undo.callback(patches.restore)


def _initialize(undo: contextlib.ExitStack, *, ep: int, tp: int, etp: int, seed: int) -> None:
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    parallel_state.initialize_model_parallel(tensor_model_parallel_size=tp, expert_model_parallel_size=ep, expert_tensor_parallel_size=etp)
    undo.callback(parallel_state.destroy_model_parallel)
    torch.manual_seed(seed)  # routers draw their weights on the CPU
    model_parallel_cuda_manual_seed(seed)
