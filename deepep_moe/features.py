"""What this build can do."""

from deepep_moe import _C, nvshmem_module, torch_module


def features() -> dict[str, bool | str]:
    """What was compiled into the native modules and what their build found.

    Keys: `version`; `compiler`; backends `shm`, `nvlink`, `collective` (True where compiled in); `nvshmem`: True where the module that
    links NVSHMEM is built; `found_nvcc` and `found_nvshmem`, whether the build found them; `autograd`: True where the module that
    buffers on GPUs need (`_torch`) is there and of this PyTorch, else why it is not.
    """
    return {
        "version": _C.__version__,
        **_C.build_info(),
        "nvshmem": nvshmem_module.is_built(),
        "autograd": torch_module.WHY_NOT or True,
    }
