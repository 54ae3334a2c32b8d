"""`deep_ep.utils`, where callers look for DeepEP's events too."""

from deepep_moe.compat.deep_ep.events import EventHandle, EventOverlap

__all__ = ["EventHandle", "EventOverlap"]
