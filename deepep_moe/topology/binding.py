"""Bind a rank to the cores, the memory and the NICs beside its GPU. Call it first thing, before CUDA starts and memory is allocated."""

import argparse
import contextlib
import ctypes
import os
import sys
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from deepep_moe import config
from deepep_moe.topology.machine import Topology
from deepep_moe.topology.nccl import configured
from deepep_moe.topology.placement import Placement, place
from deepep_moe.topology.reader import allowed_cpus_of, format_cpulist, read

_NVSHMEM = ("NVSHMEM_ENABLE_NIC_PE_MAPPING", "NVSHMEM_HCA_LIST", "NVSHMEM_HCA_PE_MAPPING")  # they work together
_LIBNUMA = "libnuma.so.1"


@dataclass(frozen=True)
class Binding:
    """The settings that `bind` made for a rank (`done`), and those that it left as they were, with the reason (`left`)."""

    placement: Placement
    done: tuple[str, ...]
    left: tuple[str, ...]

    def __str__(self) -> str:
        parts = [f"bound: {'; '.join(self.done) or 'nothing'}", *([f"left alone: {'; '.join(self.left)}"] if self.left else [])]
        return f"local rank {self.placement.local_rank} " + ". ".join(parts)


def bind(local_rank: int | None = None, num_ranks: int | None = None, *, root: str | Path = "/") -> Binding:
    """Bind this process, local rank `local_rank` of `num_ranks` on this host, and return what was done. `print` of it makes one line.

    By default both numbers are what torchrun says (`LOCAL_RANK`, `LOCAL_WORLD_SIZE`). All threads get cores of their own on the NUMA node
    of the rank's GPU. Memory is preferred there. NVSHMEM and NCCL are told the NICs beside the GPUs, by variables that nobody has set. What
    cannot be known is not bound. A rank that another launcher gave its share of the CPUs keeps it; else all ranks begin with the same CPUs.

    Raises:
        ValueError: the numbers do not fit each other.
    """
    unknown = config.names_no_local_rank() if local_rank is None else ""
    local_rank = config.local_rank() if local_rank is None else local_rank
    num_ranks = config.local_world_size() if num_ranks is None else num_ranks
    if not 0 <= local_rank < num_ranks:
        raise ValueError(f"`local_rank` is {local_rank} of {num_ranks} ranks; pass one from 0 to {num_ranks - 1}, or start with torchrun")
    topology = read(root)
    places = place(topology, num_ranks, config.variables(["CUDA_VISIBLE_DEVICES"]).get("CUDA_VISIBLE_DEVICES"))
    own_place = places[local_rank]
    if unknown:  # every process would take the place of rank 0
        return Binding(own_place, (), (unknown,))
    if config.mark_bound():  # the CPUs that this process may use are its own share already
        return Binding(own_place, (), ("this process was bound before",))
    done: list[str] = []
    left = list(own_place.notes)
    # Another launcher, such as `srun --cpu-bind`, may have given this rank its share of the CPUs: dividing it again would leave a share of
    # a share. A cpuset that all ranks have together is larger.
    parent, allowed = allowed_cpus_of(os.getppid(), root) or (), topology.allowed_cpus or ()
    if num_ranks > 1 and allowed and len(allowed) * num_ranks <= len(parent):
        left.append(f"CPUs {format_cpulist(allowed)} are this rank's share already, by who started it")
        config.mark_bound(has_own_cpus=True)
    elif own_place.cpus:
        why_not = set_affinity(own_place.cpus)
        config.mark_bound(has_own_cpus=not why_not)
        results = {f"CPUs {format_cpulist(own_place.cpus)}": why_not}
        if own_place.node is not None:
            results[f"memory of NUMA node {own_place.node}"] = prefer_memory(own_place.node)
        done += [what for what, reason in results.items() if not reason]
        left += [f"{what}: {reason}" for what, reason in results.items() if reason]
    variables, reason = network_variables(topology, places)
    if "NCCL_IB_HCA" in variables and (set_there := configured(Path(root)).get("NCCL_IB_HCA")):
        del variables["NCCL_IB_HCA"]  # the environment would win over the file of the machine's owner
        left.append(f"NCCL_IB_HCA is set in {set_there[1]}")
    new = config.set_unless_given(variables)
    done += [f"{name}={value}" for name, value in new.items()]
    left += [*filter(None, (reason,)), *(f"{name} is set" for name in variables if name not in new)]
    return Binding(own_place, tuple(done), tuple(left))


def add_bind(parser: argparse._ActionsContainer) -> None:
    """Add the option `--bind` of programs whose ranks a launcher starts, or that start ranks themselves."""
    parser.add_argument("--bind", action="store_true", help="bind each rank to cores, memory and NICs beside its GPU (docs/topology.md)")


def bind_this_rank() -> None:
    """Bind this process, the local rank that its launcher says it is, and print what was done as one line on stderr."""
    sys.stderr.write(f"{bind()}\n")  # at once: torchrun's ranks do not buffer, and print would write the end of the line on its own
    sys.stderr.flush()


def set_affinity(cpus: tuple[int, ...]) -> str:
    """Let all threads of this process, those of libraries too, run on `cpus` only. Return why the kernel refused, "" where it did not."""
    try:
        for thread in os.listdir("/proc/self/task"):
            with contextlib.suppress(ProcessLookupError):  # it ended meanwhile
                os.sched_setaffinity(int(thread), cpus)
    except OSError as error:
        return f"the kernel refused ({error.strerror})"  # or shows no threads, as without /proc
    return ""


def prefer_memory(node: int) -> str:
    """Prefer memory of NUMA node `node` in this thread and those that it starts. Return why not, "" where it is done."""
    try:
        numa = ctypes.CDLL(_LIBNUMA)
    except OSError:
        return f"{_LIBNUMA} is not installed; the kernel still prefers the node whose CPU first touches a page"
    if numa.numa_available() < 0:
        return "the kernel has no memory policies, or this container forbids them"
    numa.numa_set_preferred(node)
    preferred = numa.numa_preferred()
    return "" if preferred == node else f"libnuma reports node {preferred} afterwards"


def network_variables(topology: Topology, places: tuple[Placement, ...]) -> tuple[dict[str, str], str]:
    """Return the variables that name NICs to NVSHMEM and NCCL, the same for all ranks of a host, and what is left to them, with the reason.

    NVSHMEM takes the NIC of a rank's place in the list. NCCL chooses for each GPU itself, among the NICs that the list allows; ranks that
    allowed different ones would plan different rings.
    """
    if not topology.nics:
        return {}, ""
    if not all(rank_place.nics for rank_place in places):
        return {}, "NICs: not every rank has a GPU and a NIC beside it; NVSHMEM and NCCL choose"
    if any(nic.driver == "efa" for nic in topology.nics):
        return {}, "NICs: EFA's libfabric chooses them"
    allowed = dict.fromkeys(nic for rank_place in places for nic in rank_place.nics)
    nccl = {"NCCL_IB_HCA": "=" + ",".join(allowed)}  # "=": else mlx5_1 would allow mlx5_10 too
    if preset := config.variables(_NVSHMEM):
        return nccl, f"NVSHMEM's NICs: {', '.join(preset)} is set"
    runs = [(nic, len(list(ranks))) for nic, ranks in groupby(rank_place.nics[0] for rank_place in places)]
    if len({nic for nic, _ in runs}) < len(runs):
        return nccl, "NVSHMEM's NICs: ranks that share a NIC do not follow each other; NVSHMEM chooses"
    if len(runs) == len(places):
        names = {"NVSHMEM_HCA_LIST": ",".join(nic for nic, _ in runs)}
    else:
        names = {"NVSHMEM_HCA_PE_MAPPING": ",".join(f"{nic}:{count}" for nic, count in runs)}
    return nccl | {"NVSHMEM_ENABLE_NIC_PE_MAPPING": "1"} | names, ""
