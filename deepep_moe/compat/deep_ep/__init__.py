"""DeepEP's Python interface on deepep_moe: what `import deep_ep` gives after `install()` (docs/coming_from_deepep.md).

Importing this package replaces nothing: scripts that import `deep_ep` find it once `install()` was called, under
`python -m deepep_moe.compat.run`, or with the distribution `deepep-moe-compat` installed.
"""

import torch

from deepep_moe.compat.deep_ep.buffer import Buffer
from deepep_moe.compat.deep_ep.config import Config
from deepep_moe.compat.deep_ep.elastic import (
    BufferAllocator,
    ElasticBuffer,
    EPBuffer,
    get_logical_domain_size,
    get_physical_domain_size,
)
from deepep_moe.compat.deep_ep.elastic_handle import EPHandle
from deepep_moe.compat.deep_ep.events import EventHandle, EventOverlap
from deepep_moe.compat.deep_ep.hybrid import HybridEPBuffer
from deepep_moe.compat.deep_ep.modules import install
from deepep_moe.compat.deep_ep.refused import BucketBuffer, EngramBuffer, PPBuffer

__version__ = "2.1.0"
"""The version of DeepEP whose names are here, for callers that choose by it; `deepep_moe.__version__` is this library's."""

topk_idx_t = torch.int64
"""The dtype of topk_idx. Calls take torch.int32 as well."""

__all__ = [
    "BucketBuffer",
    "Buffer",
    "BufferAllocator",
    "Config",
    "EPBuffer",
    "EPHandle",
    "ElasticBuffer",
    "EngramBuffer",
    "EventHandle",
    "EventOverlap",
    "HybridEPBuffer",
    "PPBuffer",
    "__version__",
    "get_logical_domain_size",
    "get_physical_domain_size",
    "install",
    "topk_idx_t",
]
