"""What this build can do."""

from deepep_moe import _C


def features() -> dict[str, bool | str]:
    """What was compiled into the native module and what its build found.

    Keys: `version`; `compiler`; backends `shm`, `nvlink`, `nvshmem`, `collective` (True where they can be used); `nvcc` and
    `nvshmem_home`, what the build found of them ("" = not found).
    """
    return {"version": _C.__version__, **_C.build_info()}
