"""Small messages between the ranks of a group, with a deadline, and with the name of the rank that stays silent."""

import datetime
import pickle
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from deepep_moe.errors import EPTimeoutError

_TAG = 0xDEE9  # of this library's point-to-point messages in the caller's group


def moves_cpu_tensors(group: "dist.ProcessGroup") -> bool:
    """Does the group have a backend for CPU tensors, such as gloo?"""
    return "cpu:" in str(dist.get_backend_config(group))


def exchange(own: Tensor, group: "dist.ProcessGroup", phase: str, timeout_s: float) -> Tensor:
    """`own` [n] of every rank, a CPU tensor of the same size on each: [num_ranks, n].

    Raises EPTimeoutError naming the rank that died or did not answer in time. A group for GPU tensors only goes through the current
    device and has no deadline but its own.
    """
    num_ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    if not moves_cpu_tensors(group):
        gathered = torch.empty(num_ranks, len(own), dtype=own.dtype, device="cuda")
        dist.all_gather_into_tensor(gathered, own.cuda(), group=group)
        return gathered.cpu()
    rows = own.repeat(num_ranks, 1)
    works: list[tuple[int, Any]] = []
    peer = rank
    try:
        for peer in [(rank + offset) % num_ranks for offset in range(1, num_ranks)]:
            works.append((peer, dist.isend(own, group=group, group_dst=peer, tag=_TAG)))
            works.append((peer, dist.irecv(rows[peer], group=group, group_src=peer, tag=_TAG)))
        for peer, work in works:  # noqa: B007 (named in the error)
            work.wait(datetime.timedelta(seconds=timeout_s))
    except RuntimeError as error:
        raise EPTimeoutError(
            f"rank {rank}: rank {peer} did not deliver within {timeout_s:g} s; phase '{phase}', expected 1 message, seen 0; "
            f"torch.distributed says: {error}",
            rank=peer, phase=phase, expected=1, seen=0,
        ) from error  # fmt: skip
    return rows


def gather_objects(value: Any, group: "dist.ProcessGroup | None", num_ranks: int, phase: str, timeout_s: float) -> list[Any]:
    """`value` of every rank. Collective; raises as `exchange`."""
    if group is None or num_ranks == 1:
        return [value]
    data = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
    sizes = exchange(torch.tensor([len(data)]), group, phase, timeout_s).flatten().tolist()
    padded = torch.zeros(max(sizes), dtype=torch.uint8)
    padded[: len(data)] = data
    rows = exchange(padded, group, phase, timeout_s)
    return [pickle.loads(row[:size].numpy().tobytes()) for row, size in zip(rows, sizes, strict=True)]
