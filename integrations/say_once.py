"""What users are told once."""

import functools
import logging

import torch.distributed as dist

_log = logging.getLogger(__name__)


@functools.cache
def say_once(message: str, *, on_all_ranks: bool = False) -> None:
    """A warning on rank 0, or on whichever rank has one, the first time only."""
    if on_all_ranks or not dist.is_initialized() or dist.get_rank() == 0:
        _log.warning(message)
