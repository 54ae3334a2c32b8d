"""`deep_ep.utils.event`, where version 2 has its events."""

from deepep_moe.compat.deep_ep.events import EventHandle, EventOverlap

__all__ = ["EventHandle", "EventOverlap"]
