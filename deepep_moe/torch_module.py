"""The module `deepep_moe._torch`, which links PyTorch: the calls of buffers on GPUs, with their gradients (csrc/torch).

A build in a clone makes it where it finds PyTorch and nvcc, `deepep-moe build` beside a wheel, for that PyTorch alone. CPUs need
none; on GPUs no buffer serves without it.
"""

import importlib
import logging
from types import ModuleType

import torch

from deepep_moe import _C
from deepep_moe.errors import BackendUnavailableError
from deepep_moe.installed import without_nvcc

_REBUILD = "`deepep-moe build _torch` builds it for this PyTorch, 2.7 or newer; buffers on GPUs need it"


def _load() -> tuple[ModuleType | None, str]:
    """Return the module, or None and why."""
    if not _C.build_info()["nvlink"]:
        return None, f"not built; {without_nvcc('kernels, which it calls')}"
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
    module.connect(_C.gpu_kernel_shim())
    return module, ""


def needed() -> ModuleType:
    """Return the module. Raises BackendUnavailableError with the command that builds it."""
    if MODULE is None:
        raise BackendUnavailableError(f"deepep_moe._torch is {WHY_NOT}")
    return MODULE


MODULE, WHY_NOT = _load()
if MODULE is None and not WHY_NOT.startswith("not built"):
    logging.getLogger(__name__).warning("deepep_moe._torch is %s", WHY_NOT)
