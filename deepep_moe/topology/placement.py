"""Decide where the ranks of a host run: on which cores, beside which memory, with which NICs. Nothing is changed here."""

from dataclasses import dataclass

from deepep_moe.topology.machine import Gpu, NumaNode, Topology


@dataclass(frozen=True)
class Placement:
    """The place of a rank: its GPU, NUMA node, CPUs (none = leave as they are) and NICs as "name:port". `notes` say what is unknown."""

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

    Raises:
        ValueError: `num_ranks` is not positive.
    """
    if num_ranks < 1:
        raise ValueError(f"`num_ranks` is {num_ranks}; pass the number of ranks of this host, at least 1")
    gpus, note = visible_gpus(topology, visible_devices)
    chosen: list[Gpu | None] = [gpus[rank % len(gpus)] for rank in range(num_ranks)] if gpus else [None] * num_ranks
    if gpus:
        nodes = [topology.node(gpu.pci.node) for gpu in chosen if gpu]
    else:  # where it is unknown which GPU a rank has, no node is right
        usable = [] if note else [node for node in topology.nodes if topology.allowed_cores(node)]
        nodes = [usable[rank * len(usable) // num_ranks] if usable else None for rank in range(num_ranks)]
    places = []
    for rank, (gpu, node) in enumerate(zip(chosen, nodes, strict=True)):
        if node:
            cpus, why = _share(topology, node, nodes[:rank].count(node), nodes.count(node))
        else:
            cpus, why = (), f"the NUMA node of GPU {gpu.index} is unknown" if gpu else "the machine's NUMA nodes are unknown"
        nics = tuple(f"{nic.name}:{nic.active_ports[0].number}" for nic in topology.nearest_nics(gpu)) if gpu else ()
        notes = tuple(filter(None, [note or why]))
        places.append(Placement(rank, gpu.index if gpu else None, node.index if node else None, cpus, nics, notes))
    return tuple(places)


def _share(topology: Topology, node: NumaNode, place: int, num_ranks: int) -> tuple[tuple[int, ...], str]:
    """Return the CPUs of the rank `place` of `num_ranks` ranks of a node, and what is wrong with them."""
    cores, note = topology.allowed_cores(node), ""
    if not cores:
        note = f"this process may use no CPU of NUMA node {node.index}"
    elif num_ranks > len(cores):
        note = f"{num_ranks} ranks share {len(cores)} cores of NUMA node {node.index}; start at most as many ranks as cores"
    else:
        cores = cores[place * len(cores) // num_ranks : (place + 1) * len(cores) // num_ranks]
    return tuple(sorted(cpu for core in cores for cpu in core)), note


def visible_gpus(topology: Topology, visible_devices: str | None) -> tuple[tuple[Gpu, ...], str]:
    """Return the GPUs in CUDA's order under CUDA_VISIBLE_DEVICES=`visible_devices`, and why they are unknown, "" where they are not.

    CUDA ends the list at the first entry that it does not know, and so does this.
    """
    if len({gpu.name for gpu in topology.gpus}) > 1:
        return (), "the GPUs are of different kinds, and CUDA orders them by speed; start ranks on GPUs of one kind"
    if visible_devices is None:
        return topology.gpus, ""
    visible: list[Gpu] = []
    for entry in filter(None, map(str.strip, visible_devices.split(","))):
        known = [gpu for gpu in topology.gpus if str(gpu.index) == entry or (entry.startswith("GPU-") and gpu.uuid.startswith(entry))]
        if not known:
            break
        visible.append(known[0])
    if topology.gpus and visible_devices.strip() and not visible:
        return (
            (),
            f"CUDA_VISIBLE_DEVICES={visible_devices} names no whole GPU of this machine; give indices from 0 to {len(topology.gpus) - 1}",
        )
    return tuple(visible), ""
