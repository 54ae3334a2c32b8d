"""Messages of this library go to the logger "deepep_moe". A program sets it up like any other, or `DEEPEP_MOE_LOG` does."""

import logging

from deepep_moe import config

logger = logging.getLogger("deepep_moe")


def follow_environment() -> None:
    """Send messages of the level that `DEEPEP_MOE_LOG` names, and above, to stderr, each with the rank that a launcher gave. Without the
    variable nothing is changed. Raises ValueError where it is no level."""
    level = config.log_level()
    if level is None:
        return
    rank = config.launched_rank()
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter(f"%(levelname)s{'' if rank is None else f' rank {rank}'} %(name)s: %(message)s"))
    logger.handlers = [handler]
    logger.setLevel(level)
    logger.propagate = False  # or handlers of the program would print them again
