"""`deep_ep.hybrid_ep_buffer`, where callers look for HybridEP's names too."""

from deepep_moe.compat.deep_ep.dense_routing import indices_to_map
from deepep_moe.compat.deep_ep.hybrid import HybridEPBuffer

__all__ = ["HybridEPBuffer", "indices_to_map"]
