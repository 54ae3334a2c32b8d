"""Set a rank up for DeepSpeed on the CPU or on a GPU, and take it down again.

The example, the benchmark and the tests share this. A training script needs none of it.
"""

import contextlib
import logging
from collections.abc import Iterator

import torch
import torch.distributed as dist
from gpu_ranks import take_gpu

from deepep_moe.integrations.common.registry import destroy_all

DEVICES = ("cpu", "cuda")


@contextlib.contextmanager
def engine_ready(device_type: str = "cpu") -> Iterator[torch.device]:
    """Start DeepSpeed's communication over the ranks of torch.distributed, of which this process is one, and yield the rank's device.

    "cpu" keeps the default process group, over gloo. "cuda" replaces it by one over NCCL, with rank r on GPU r. At the end the shared
    buffers are destroyed. DeepSpeed keeps its groups, so a process can do this only once.

    Raises ValueError for another device type or too few GPUs.
    """
    if device_type not in DEVICES:
        raise ValueError(f"device_type is {device_type!r}; it must be one of {list(DEVICES)}")
    with contextlib.ExitStack() as undo:
        device = _set_up_gpu(undo) if device_type == "cuda" else _set_up_cpu()
        yield device
        if device.type == "cuda":
            torch.cuda.synchronize()
            dist.barrier(device_ids=[device.index])  # memory stays while a peer's kernel may write to it
        destroy_all()


def _set_up_cpu() -> torch.device:
    import deepspeed
    from deepspeed.accelerator import set_accelerator
    from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

    set_accelerator(CPU_Accelerator())
    # DeepSpeed compiles its all-reduce over shared memory for a minute when it is first used. gloo has one.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    _quiet()
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    return torch.device("cpu")


def _set_up_gpu(undo: contextlib.ExitStack) -> torch.device:
    device = take_gpu(undo)
    import deepspeed

    _quiet()
    deepspeed.init_distributed(dist_backend="nccl", verbose=False)
    return device


def _quiet() -> None:
    """Silence DeepSpeed's INFO lines, which it logs for every step of its own."""
    from deepspeed.utils import logger

    logger.setLevel(logging.WARNING)
