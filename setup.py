"""Build of the native module `deepep_moe._C`.

The module links neither PyTorch nor Python packages other than pybind11's headers, so it builds in an isolated
environment and one build serves every supported PyTorch. nvcc and NVSHMEM are looked for; CUDA sources are compiled when
both they and nvcc are there. What was compiled is recorded in the module and shown by `deepep_moe.features()`.
"""

import os
import shutil
import tomllib
from pathlib import Path

from pybind11.setup_helpers import ParallelCompile, Pybind11Extension
from setuptools import setup

ROOT = Path(__file__).parent
HOST_ROOMS = ("common", "cpu", "runtime", "bindings")


def find_nvcc() -> str:
    """Path of nvcc, or "" (CUDA_HOME first, then PATH, then the usual place)."""
    candidates = [Path(os.environ["CUDA_HOME"]) / "bin" / "nvcc"] if os.environ.get("CUDA_HOME") else []
    if found := shutil.which("nvcc"):
        candidates.append(Path(found))
    candidates.append(Path("/usr/local/cuda/bin/nvcc"))
    return next((str(path) for path in candidates if path.is_file()), "")


def find_nvshmem() -> str:
    """Root of an NVSHMEM installation (include/nvshmem.h), or "" (NVSHMEM_HOME first, then the pip package)."""
    candidates = [Path(os.environ["NVSHMEM_HOME"])] if os.environ.get("NVSHMEM_HOME") else []
    try:
        import nvidia.nvshmem as package  # of the wheel nvidia-nvshmem-cuXX
    except ImportError:
        pass
    else:
        candidates += [Path(path) for path in package.__path__]
    return next((str(path) for path in candidates if (path / "include" / "nvshmem.h").is_file()), "")


def version() -> str:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]


def extension() -> Pybind11Extension:
    sources = sorted(str(path.relative_to(ROOT)) for room in HOST_ROOMS for path in (ROOT / "csrc" / room).glob("*.cpp"))
    headers = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "csrc").rglob("*.h"))
    nvcc, nvshmem = find_nvcc(), find_nvshmem()
    print(f"deepep_moe: nvcc: {nvcc or 'not found'}; NVSHMEM: {nvshmem or 'not found'}; CUDA sources: none in this version")
    return Pybind11Extension(
        "deepep_moe._C",
        sources,
        include_dirs=["csrc"],
        depends=headers,
        cxx_std=20,
        define_macros=[
            ("DEEPEP_MOE_VERSION", f'"{version()}"'),
            ("DEEPEP_MOE_NVCC", f'"{nvcc}"'),
            ("DEEPEP_MOE_NVSHMEM", f'"{nvshmem}"'),
        ],
        extra_compile_args=["-O3", "-ffp-contract=off", "-fno-trapping-math", "-pthread", "-Wall", "-Wextra"],
        extra_link_args=["-pthread"],
    )


def is_stale(object_file: str, source: str) -> bool:
    """Must `source` be compiled again? Yes when it, any header or this file is newer than its object."""
    inputs = [ROOT / source, ROOT / "setup.py", ROOT / "pyproject.toml", *(ROOT / "csrc").rglob("*.h")]
    return not os.path.exists(object_file) or os.path.getmtime(object_file) < max(path.stat().st_mtime for path in inputs)


with ParallelCompile("DEEPEP_MOE_BUILD_JOBS", default=os.cpu_count() or 1, needs_recompile=is_stale):
    setup(
        ext_modules=[extension()],
        packages=[
            "deepep_moe",
            "deepep_moe.backends",
            "deepep_moe.ops",
            "deepep_moe.reference",
            "deepep_moe.nn",
            "deepep_moe.bench",
            "deepep_moe.testing",
            "deepep_moe.integrations",
            "deepep_moe.integrations.megatron",
        ],
        package_dir={"deepep_moe": "deepep_moe", "deepep_moe.integrations": "integrations"},
        package_data={"deepep_moe": ["py.typed", "_C.pyi"]},
    )
