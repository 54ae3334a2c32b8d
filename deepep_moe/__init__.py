"""Expert parallelism for mixture-of-experts training.

`Buffer` moves tokens between ranks and their experts; `deepep_moe.ops` has gating; `deepep_moe.nn` a router and a MoE layer;
`deepep_moe.integrations` the adapters; `deepep_moe.reference` what every operation means.
"""

from deepep_moe import errors
from deepep_moe._C import __version__
from deepep_moe.buffer import Buffer, DispatchOutput, Layout
from deepep_moe.event import Event
from deepep_moe.features import features
from deepep_moe.handle import DispatchHandle

__all__ = ["Buffer", "DispatchHandle", "DispatchOutput", "Event", "Layout", "__version__", "errors", "features"]
