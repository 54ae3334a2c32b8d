"""Decide where the ranks of a host run: on which cores, beside which memory, with which NICs. Nothing is changed here."""

import re
from dataclasses import dataclass

from deepep_moe.topology.machine import Gpu, NumaNode, Topology


@dataclass(frozen=True)
class Placement:
    """Where a rank belongs: its GPU, NUMA node, CPUs (none = leave as they are) and NICs as "name:port". `notes` say what is unknown."""

    local_rank: int
    gpu: int | None
    node: int | None
    cpus: tuple[int, ...]
    nics: tuple[str, ...]
    notes: tuple[str, ...]


def place(topology: Topology, num_ranks: int, visible_devices: str | None = None) -> tuple[Placement, ...]:
    """Return the places of the ranks 0 to `num_ranks` - 1 of a host.

    A rank uses the GPU of its number among those of `visible_devices` (the value of CUDA_VISIBLE_DEVICES, None = all); further ranks begin
    again at the first. Ranks of a NUMA node share its cores evenly; each gets all SMT siblings of its cores. Without GPUs the ranks are
    spread over the NUMA nodes in order.

    Raises ValueError where `num_ranks` is not positive.
    """
    if num_ranks < 1:
        raise ValueError(f"`num_ranks` is {num_ranks}; pass the number of ranks of this host, at least 1")
    gpus, note = visible_gpus(topology, visible_devices)
    chosen = [gpus[rank % len(gpus)] if gpus else None for rank in range(num_ranks)]
    nodes = [gpu.pci.node for gpu in chosen if gpu is not None] or _spread(topology, num_ranks, unknown=bool(note))
    places = []
    for rank, (gpu, index) in enumerate(zip(chosen, nodes, strict=True)):
        node = topology.node(index)
        ranks = [other for other, theirs in enumerate(nodes) if theirs == index]
        cpus, why = _share(topology, node, ranks.index(rank), len(ranks)) if node else ((), _unknown(gpu))
        nics = tuple(f"{nic.name}:{nic.active_ports[0].number}" for nic in topology.nearest_nics(gpu)) if gpu else ()
        notes = tuple(filter(None, (note, why if not note else "")))
        places.append(Placement(rank, gpu.index if gpu else None, node.index if node else None, cpus, nics, notes))
    return tuple(places)


def _unknown(gpu: Gpu | None) -> str:
    return f"the NUMA node of GPU {gpu.index} is unknown" if gpu else "the machine's NUMA nodes are unknown"


def _spread(topology: Topology, num_ranks: int, *, unknown: bool) -> list[int | None]:
    """Spread ranks without GPUs over the nodes that have cores for them. Where it is unknown which GPU a rank has, no node is right."""
    nodes = [] if unknown else [node.index for node in topology.nodes if topology.allowed_cores(node)]
    return [nodes[rank * len(nodes) // num_ranks] if nodes else None for rank in range(num_ranks)]


def _share(topology: Topology, node: NumaNode, place: int, num_ranks: int) -> tuple[tuple[int, ...], str]:
    cores = topology.allowed_cores(node)
    if not cores:
        return (), f"this process may use no CPU of NUMA node {node.index}"
    if num_ranks > len(cores):
        everything = tuple(sorted(cpu for core in cores for cpu in core))
        return everything, f"{num_ranks} ranks share {len(cores)} cores of NUMA node {node.index}; start at most as many ranks as cores"
    own = cores[place * len(cores) // num_ranks : (place + 1) * len(cores) // num_ranks]
    return tuple(sorted(cpu for core in own for cpu in core)), ""


def visible_gpus(topology: Topology, visible_devices: str | None) -> tuple[tuple[Gpu, ...], str]:
    """Return the GPUs in CUDA's order under CUDA_VISIBLE_DEVICES=`visible_devices`, and why they are unknown, "" where they are not.

    CUDA ends the list at the first entry that it does not know, and so does this.
    """
    if len({gpu.name for gpu in topology.gpus}) > 1:
        return (), "the GPUs are of different kinds, and CUDA orders them by speed; start ranks on GPUs of one kind"
    if visible_devices is None:
        return topology.gpus, ""
    if "MIG-" in visible_devices:
        return (), f"CUDA_VISIBLE_DEVICES={visible_devices} names parts of a GPU (MIG); bind ranks on whole GPUs"
    found: list[Gpu] = []
    for entry in filter(None, map(str.strip, visible_devices.split(","))):
        by_uuid = [gpu for gpu in topology.gpus if entry.startswith("GPU-") and gpu.uuid.startswith(entry)]
        by_index = topology.gpus[int(entry) : int(entry) + 1] if re.fullmatch(r"\d{1,4}", entry) else ()
        if not (by_uuid or by_index):
            break
        found.append((*by_uuid, *by_index)[0])
    if topology.gpus and visible_devices.strip() and not found:
        return (), f"CUDA_VISIBLE_DEVICES={visible_devices} names no GPU of this machine; give indices from 0 to {len(topology.gpus) - 1}"
    return tuple(found), ""
