"""What this build can do."""

from deepep_moe import _C


def features() -> dict[str, bool | str]:
    """What was compiled into the native module and what its build found.

    Keys: `version`; `compiler`; backends `shm`, `nvlink`, `nvshmem`, `collective` (True where compiled in); `found_nvcc` and
    `found_nvshmem`, whether the build found them.
    """
    return {"version": _C.__version__, **_C.build_info()}
