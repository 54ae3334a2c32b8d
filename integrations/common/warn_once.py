"""What users are told once."""

import functools
import logging

import torch.distributed as dist

_log = logging.getLogger(__name__)


@functools.cache
def warn_once(message: str, *groups: "dist.ProcessGroup | None", on_all_ranks: bool = False) -> None:
    """A warning on the rank that is the first of all `groups`, or on whichever rank has one; the first time only. Without groups rank 0
    says it; a layer's warning needs those of its stage of a pipeline, as rank 0 may be in one without such layers."""
    if on_all_ranks or is_first(*groups):
        _log.warning(message)


def is_first(*groups: "dist.ProcessGroup | None") -> bool:
    """Whether this rank is the first one of all `groups`; None stands for all ranks, and so do no groups."""
    return not dist.is_initialized() or all(dist.get_rank(group) == 0 for group in groups or (None,))
