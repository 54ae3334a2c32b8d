"""The optional module `deepep_moe._torch`, which links PyTorch: plain calls of a buffer, with their gradients, from C++ (csrc/torch).

A build in a clone makes it where it finds PyTorch and nvcc, `python -m deepep_moe.build` beside a wheel, for that PyTorch alone. Without
it the same calls are made from Python: results are equal to the bit, and the host takes longer, which shows where a layer's kernels take
less than a millisecond.
"""

import importlib
import logging
from types import ModuleType

import torch

from deepep_moe import _C

_REBUILD = "`python -m deepep_moe.build _torch` builds it for this PyTorch, 2.7 or newer; small MoE layers are slower without it"


def _load() -> tuple[ModuleType | None, str]:
    """The module, or None and why."""
    try:
        module = importlib.import_module("deepep_moe._torch")
    except ModuleNotFoundError:
        return None, f"not built; {_REBUILD}"
    except ImportError as error:
        return None, f"not loadable with torch {torch.__version__} ({error}); {_REBUILD}"
    if torch.__version__ != module.TORCH_VERSION:
        return None, f"built for torch {module.TORCH_VERSION}, this is {torch.__version__}; {_REBUILD}"
    if getattr(_C, "SHIM_BYTES", 0) != module.SHIM_BYTES:
        return None, f"of another build than deepep_moe._C; {_REBUILD}"
    return module, ""


MODULE, WHY_NOT = _load()
if MODULE is None and not WHY_NOT.startswith("not built"):
    logging.getLogger(__name__).warning("deepep_moe._torch is %s", WHY_NOT)
