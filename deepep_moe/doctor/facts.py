"""Import PyTorch, look at CUDA, then import the library of the folder that is given. The doctor runs this as a process of its own, as what
it imports may end or hang it. It prints a line of JSON after each, so that a crash leaves those before it."""

import ctypes
import json
import sys
from typing import Any

_P2P_ATOMICS = 3  # CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED, which NVLink has


def tell(**facts: object) -> None:
    print(json.dumps(facts), flush=True)


def has_atomics(first: int, second: int) -> bool:
    value = ctypes.c_int()
    ctypes.CDLL("libcuda.so.1").cuDeviceGetP2PAttribute(ctypes.byref(value), _P2P_ATOMICS, first, second)
    return bool(value.value)


def cuda() -> dict[str, Any]:
    """Return the GPUs; `reach`, pairs of which the first can map the second's memory; `atomics`, those with atomics on their link."""
    import torch

    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:  # the second where PyTorch is built without CUDA
        return {"error": str(error).splitlines()[0], "gpus": [], "reach": [], "atomics": []}
    properties = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    gpus = [{"name": gpu.name, "capability": [gpu.major, gpu.minor]} for gpu in properties]
    pairs = [(first, second) for first in range(len(gpus)) for second in range(len(gpus)) if first != second]
    reach = [pair for pair in pairs if torch.cuda.can_device_access_peer(*pair)]
    return {"error": "", "gpus": gpus, "reach": reach, "atomics": [pair for pair in reach if has_atomics(*pair)]}


def main(folder: str) -> None:
    if folder not in sys.path:
        sys.path.insert(0, folder)
    import torch

    tell(torch={"version": torch.__version__, "cuda": torch.version.cuda})
    tell(cuda=cuda())

    import deepep_moe
    from deepep_moe import nvshmem_module

    tell(features=deepep_moe.features())
    loaded = nvshmem_module.load() if nvshmem_module.is_built() else "not built"
    tell(nvshmem=loaded if isinstance(loaded, str) else ".".join(map(str, loaded.version_found())))


if __name__ == "__main__":
    main(sys.argv[1])
