"""The optional module `deepep_moe._torch`, which links PyTorch: plain calls of a buffer, with their gradients, from C++ (csrc/torch).

The build makes it where it finds PyTorch and nvcc, for that PyTorch alone. Without it the same calls are made from Python: results are
equal to the bit, and the host takes longer, which shows where a layer's kernels take less than a millisecond.
"""

import importlib
import logging
from types import ModuleType

import torch

from deepep_moe import _C

_REBUILD = (
    "to install deepep_moe again, by pip or with --no-build-isolation, builds it for the PyTorch that is there, 2.7 or newer, on a machine "
    "with nvcc"
)


def _load() -> tuple[ModuleType | None, str]:
    """The module, or None and why."""
    try:
        module = importlib.import_module("deepep_moe._torch")
    except ModuleNotFoundError:
        return None, f"not built; {_REBUILD}"
    except ImportError as error:
        return None, f"not to be loaded with torch {torch.__version__}; {_REBUILD}: {error}"
    if torch.__version__ != module.TORCH_VERSION:
        return None, f"built for torch {module.TORCH_VERSION}, this is {torch.__version__}; {_REBUILD}"
    if getattr(_C, "SHIM_BYTES", 0) != module.SHIM_BYTES:
        return None, f"of another build than deepep_moe._C; {_REBUILD}"
    return module, ""


MODULE, WHY_NOT = _load()
if MODULE is None and not WHY_NOT.startswith("not built"):
    logging.getLogger(__name__).warning("deepep_moe._torch is %s", WHY_NOT)
