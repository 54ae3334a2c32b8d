"""Lines that the library logs in this process."""

import logging


def heard(level: int = logging.WARNING) -> list[str]:
    """Those of this level or a higher one, from now on."""
    lines: list[str] = []
    handler, logger = logging.Handler(level), logging.getLogger("deepep_moe")
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    logger.setLevel(min(level, logger.getEffectiveLevel()))
    return lines
