"""Expert parallelism for mixture-of-experts training.

`Buffer` moves tokens between ranks and their experts, `LowLatencyBuffer` small batches of them; `deepep_moe.ops` has gating;
`deepep_moe.nn` a router and a MoE layer; `deepep_moe.integrations` the adapters; `deepep_moe.reference` what every operation means.
"""

import itertools
import logging
import sys
from pathlib import Path

from deepep_moe import config, errors, installed

# The doctor imports this package although it may be what is broken; it looks at it from another process.
_IS_DOCTOR = any(
    Path(program).name in ("deepep-moe", "deepep_moe") and command == "doctor" for program, command in itertools.pairwise(sys.orig_argv)
)

try:
    if not _IS_DOCTOR:
        config.follow_log_level()
        for _warning in (installed.check_torch(), installed.other_copies()):
            if _warning:
                logging.getLogger("deepep_moe").warning(_warning)
        from deepep_moe._C import __version__
except ModuleNotFoundError as error:
    if error.name != "deepep_moe._C":
        raise
    raise ModuleNotFoundError(installed.why_not_built(), name=error.name) from None
if not _IS_DOCTOR:
    from deepep_moe.event import Event
    from deepep_moe.exchange.buffer import Buffer
    from deepep_moe.exchange.expert_slots import ExpertSlots
    from deepep_moe.exchange.handle import DispatchHandle, DispatchOutput, Layout
    from deepep_moe.features import features
    from deepep_moe.low_latency.buffer import LowLatencyBuffer
    from deepep_moe.low_latency.handle import LowLatencyHandle, LowLatencyOutput

__all__ = [
    "Buffer", "DispatchHandle", "DispatchOutput", "Event", "ExpertSlots", "Layout", "LowLatencyBuffer", "LowLatencyHandle",
    "LowLatencyOutput", "__version__", "errors", "features",
]  # fmt: skip
