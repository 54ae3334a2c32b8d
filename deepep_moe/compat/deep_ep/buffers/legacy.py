"""`deep_ep.buffers.legacy`, where version 2 has the `Buffer` of version 1."""

from deepep_moe.compat.deep_ep.buffer import Buffer
from deepep_moe.compat.deep_ep.config import Config
from deepep_moe.compat.deep_ep.events import EventHandle, EventOverlap

__all__ = ["Buffer", "Config", "EventHandle", "EventOverlap"]
