"""`deep_ep.utils.envs`: what version 2 asks of a machine. It has no start of processes and no measurements of links: tests use those."""

import torch

from deepep_moe.compat.deep_ep.elastic import get_logical_domain_size, get_physical_domain_size

__all__ = ["check_nvlink_connections", "check_torch_deterministic", "get_logical_domain_size", "get_physical_domain_size"]


def check_nvlink_connections(group: object) -> None:
    """Do nothing: a buffer looks itself whether its GPUs reach each other, and says which do not."""


def check_torch_deterministic() -> None:
    """Raise RuntimeError where PyTorch fills new tensors, which would run beside a call on the communication stream."""
    if torch.are_deterministic_algorithms_enabled() and torch.utils.deterministic.fill_uninitialized_memory:  # type: ignore[attr-defined]
        raise RuntimeError(
            "torch.utils.deterministic.fill_uninitialized_memory is True with deterministic algorithms; set it to False before calls of "
            "deep_ep"
        )
