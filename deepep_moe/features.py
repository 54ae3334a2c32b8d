"""The features of this build."""

from deepep_moe import _C, nvshmem_module, torch_module


def features() -> dict[str, bool | str]:
    """Return the features that were compiled into the native modules, and the tools that their build found.

    Keys: `version`; `compiler`; backends `shm`, `nvlink`, `collective` (True if compiled in). `nvshmem` is True if the module that links
    NVSHMEM is built. `found_nvcc` and `found_nvshmem` tell whether the build found them. `autograd` is True if the module `_torch`, which
    buffers on GPUs need, fits this PyTorch; else it is the reason why not.
    """
    return {
        "version": _C.__version__,
        **_C.build_info(),
        "nvshmem": nvshmem_module.is_built(),
        "autograd": torch_module.WHY_NOT or True,
    }
