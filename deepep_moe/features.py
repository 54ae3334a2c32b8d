"""What this build can do."""

from deepep_moe import _C, torch_module


def features() -> dict[str, bool | str]:
    """What was compiled into the native modules and what their build found.

    Keys: `version`; `compiler`; backends `shm`, `nvlink`, `nvshmem`, `collective` (True where compiled in); `found_nvcc` and
    `found_nvshmem`, whether the build found them; `autograd`: True where the autograd functions in C++ are there and of this PyTorch, else
    why they are not.
    """
    return {"version": _C.__version__, **_C.build_info(), "autograd": torch_module.WHY_NOT or True}
