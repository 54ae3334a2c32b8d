"""Which ranks can reach each other's memory, from what they told of themselves."""

from deepep_moe import _C
from deepep_moe.errors import BackendUnavailableError
from deepep_moe.group.rendezvous import Introduction
from deepep_moe.group.settings import Settings


def are_on_gpus(peers: list[Introduction]) -> bool:
    """Do all ranks see a GPU, in an NCCL group?"""
    return all(peer.has_gpu and "nccl" in peer.group_backend for peer in peers)


def why_not_shm(peers: list[Introduction]) -> str | None:
    """The reason the shm backend cannot serve these ranks, or None."""
    if len(peers) > _C.MAX_RANKS:
        return f"it serves at most {_C.MAX_RANKS} ranks, this group has {len(peers)}"
    hosts = {peer.host for peer in peers}
    if len(hosts) > 1:
        return f"its ranks must share one host and process namespace, this group spans {len(hosts)}: {sorted(hosts)}"
    if any(peer.group_backend != "none" and "cpu:" not in peer.group_backend for peer in peers):
        return f"it moves CPU tensors, and the group is for GPU tensors only ({peers[0].group_backend})"
    return None


def why_not_nvshmem(peers: list[Introduction], settings: Settings) -> str | None:
    """The reason the nvshmem backend cannot serve these ranks, or None."""
    if settings.num_nodes == 1:
        return f"it serves several nodes, and all {settings.num_ranks} ranks are one; backend='nvlink' serves that"
    if settings.num_nodes > _C.MAX_GPU_NODES:
        return f"it serves at most {_C.MAX_GPU_NODES} nodes, this group has {settings.num_nodes}"
    for first in range(0, settings.num_ranks, settings.ranks_per_node):
        why = why_not_nvlink(peers[first : first + settings.ranks_per_node])
        if why is not None:
            return f"of node {first // settings.ranks_per_node}, ranks {first} and up: {why}"
    return None


def why_not_one_node(settings: Settings) -> str | None:
    """The reason a backend of one node cannot serve these ranks, or None."""
    if settings.num_nodes == 1:
        return None
    return f"it serves one node, and ranks_per_node is {settings.ranks_per_node} for {settings.num_ranks} ranks; 'nvshmem' serves several"


def why_not_nvlink(peers: list[Introduction]) -> str | None:
    """The reason the nvlink backend cannot serve these ranks, or None."""
    if not hasattr(_C, "NvlinkExchange"):
        return "it was not compiled, as the build found no nvcc; install the CUDA toolkit and build again"
    if len(peers) > _C.MAX_GPU_RANKS:
        return f"it serves at most {_C.MAX_GPU_RANKS} ranks, this group has {len(peers)}"
    hosts = {peer.host for peer in peers}
    if len(hosts) > 1:
        return f"its ranks must share one host and process namespace, this group spans {len(hosts)}: {sorted(hosts)}"
    without = [rank for rank, peer in enumerate(peers) if not peer.has_gpu]
    return f"ranks {without} see no CUDA device" if without else None


def check_torch(peers: list[Introduction]) -> None:
    """Raise BackendUnavailableError where GPUs could serve these ranks, and the module `_torch` of one is missing."""
    for rank, peer in enumerate(peers):
        if peer.lacks_torch:
            raise BackendUnavailableError(f"deepep_moe._torch of rank {rank} is {peer.lacks_torch}")
