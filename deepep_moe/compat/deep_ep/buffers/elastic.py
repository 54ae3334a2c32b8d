"""`deep_ep.buffers.elastic`, where version 2 has `ElasticBuffer`."""

from deepep_moe.compat.deep_ep.elastic import ElasticBuffer
from deepep_moe.compat.deep_ep.elastic_handle import EPHandle
from deepep_moe.compat.deep_ep.events import EventHandle, EventOverlap

__all__ = ["EPHandle", "ElasticBuffer", "EventHandle", "EventOverlap"]
