"""The optional module `deepep_moe._nvshmem`, which links NVSHMEM (csrc/nvshmem). A buffer over several nodes loads it; nothing else does.

The build makes it where it finds nvcc and NVSHMEM. It serves the major and minor version that it was built for: device code of one version
and a host library of another can pass NVSHMEM's own check and hang.
"""

import ctypes
import importlib
import importlib.util
import os
from pathlib import Path
from types import ModuleType

from deepep_moe import config

WHY_NOT_SUSPEND = "NVSHMEM returns the memory of its symmetric heap only when the process ends its use of NVSHMEM"
_HOST_LIBRARY = "libnvshmem_host.so.3"
_REBUILD = "install NVSHMEM (pip install nvidia-nvshmem-cu13==3.4.5, or NVSHMEM_HOME), then, with nvcc, `deepep-moe build _nvshmem`"


def is_built() -> bool:
    return importlib.util.find_spec("deepep_moe._nvshmem") is not None


def load() -> ModuleType | str:
    """Return the module, or the reason why it cannot be used and what to do."""
    if not is_built():
        return f"the module deepep_moe._nvshmem is not built; {_REBUILD}"
    library = _load_host_library()
    try:
        module = importlib.import_module("deepep_moe._nvshmem")
    except ImportError as error:
        return f"the module deepep_moe._nvshmem does not load with {library}: {error}; {_REBUILD}"
    built, loaded = module.version_built(), module.version_found()
    if built[:2] != loaded[:2]:
        return (
            f"deepep_moe._nvshmem was built for NVSHMEM {dotted(built)}, and this process has {dotted(loaded)} ({library}); "
            f"install NVSHMEM {built[0]}.{built[1]}, or build deepep_moe again for this one"
        )
    return module


def dotted(version: tuple[int, ...] | list[int]) -> str:
    return ".".join(map(str, version))


def _load_host_library() -> str:
    """Load the host library, unless this process has one, such as PyTorch's: the module finds it by its name then. Return which it is."""
    try:
        ctypes.CDLL(_HOST_LIBRARY, mode=os.RTLD_NOLOAD | os.RTLD_NOW)
        return f"the {_HOST_LIBRARY} that was loaded before"
    except OSError:
        pass
    for path in _candidates():
        if path.is_file():
            ctypes.CDLL(str(path))
            return str(path)
    looked = f"{config.nvshmem_home()}/lib of NVSHMEM_HOME" if config.nvshmem_home() else "the pip package"
    return f"LD_LIBRARY_PATH, as there is no {_HOST_LIBRARY} in {looked}"


def _candidates() -> list[Path]:
    home = config.nvshmem_home()
    if home is not None:
        return [Path(home) / "lib" / _HOST_LIBRARY]
    package = importlib.util.find_spec("nvidia") and importlib.util.find_spec("nvidia.nvshmem")  # of the wheel nvidia-nvshmem-cuXX
    return [Path(folder) / "lib" / _HOST_LIBRARY for folder in (package and package.submodule_search_locations) or ()]
