"""The nvlink backend on a processor: csrc/cuda compiled against tests/emulation, and a `torch.cuda` that knows one more device.

`python tests/emulated_gpu.py` builds it and runs the GPU tests that need nothing but kernels.
"""

import os
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

ROOT = Path(__file__).resolve().parent.parent
SITE = ROOT / "build" / "emulation" / "site"
VARIABLE = "DEEPEP_MOE_EMULATED_GPU"
FLAGS = ["-std=c++20", "-O1", "-fPIC", "-fvisibility=hidden", "-ffp-contract=off", "-pthread", "-U_FORTIFY_SOURCE", "-DDEEPEP_MOE_CUDA=1"]
SUITES = {
    "exchange": ("tests/exchange",),
    "low_latency": ("tests/low_latency", "tests/nn/test_overlap.py"),
    "gate": ("tests/gate", "tests/nn/test_router.py", "tests/integrations/deepspeed/test_deepspeed_gates.py"),
}
NEEDS_A_GPU = "cuda_graph or other_stream or dead_peer or interrupted or one_graph or gates_to_the_bit"


def is_chosen() -> bool:
    return bool(os.environ.get(VARIABLE))


def is_up_to_date(target: Path) -> bool:
    """Whether `target` is newer than all that the compiler read for it, as it noted beside it, and than the flags."""
    notes = target.with_suffix(".d")
    if not target.exists() or not notes.exists():
        return False
    inputs = [Path(__file__), *map(Path, notes.read_text().replace("\\\n", " ").split()[1:])]
    return all(path.exists() for path in inputs) and target.stat().st_mtime > max(path.stat().st_mtime for path in inputs)


def compile_object(source: Path) -> Path:
    import pybind11

    target = SITE.parent / "objects" / f"{source.parent.name}-{source.name}.o"
    target.parent.mkdir(parents=True, exist_ok=True)
    if is_up_to_date(target):
        return target
    include = [ROOT / "tests" / "emulation", ROOT / "csrc", pybind11.get_include(), sysconfig.get_paths()["include"]]
    macros = ['-DDEEPEP_MOE_VERSION="emulated"', "-DDEEPEP_MOE_FOUND_NVSHMEM=false", "-Wno-unknown-pragmas"]
    if source.parent.name == "torch":
        import torch
        from torch.utils.cpp_extension import include_paths

        macros += [f'-DDEEPEP_MOE_TORCH="{torch.__version__}"', *(f"-isystem{path}" for path in include_paths())]
    command = ["g++", *FLAGS, *macros, *(f"-I{path}" for path in include), "-x", "c++", "-MMD", "-c", str(source), "-o", str(target)]
    subprocess.run(command, check=True)
    return target


def build() -> Path:
    """A folder for PYTHONPATH that holds the package with the emulated module."""
    module = ROOT / "csrc" / "torch"
    sources = [path for path in (ROOT / "csrc").rglob("*.*") if path.suffix in (".cpp", ".cu") and path.parent != module]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = list(pool.map(compile_object, [*sources, ROOT / "tests" / "emulation" / "emulation.cpp"]))
        functions = list(pool.map(compile_object, module.glob("*.cpp")))
    package = SITE / "deepep_moe"
    package.mkdir(parents=True, exist_ok=True)
    for link in package.iterdir():
        if link.is_symlink() and not link.exists():  # of a module that was moved
            link.unlink()
    for path in (ROOT / "deepep_moe").iterdir():
        link = package / path.name
        if not path.name.startswith(("_C.cp", "_torch.cp", "__pycache__")) and not link.is_symlink():
            link.symlink_to(path)
    if not (package / "integrations").is_symlink():
        (package / "integrations").symlink_to(ROOT / "integrations")
    link_module(package, "_C", objects)
    link_module(package, "_torch", functions, *torch_libraries())
    return SITE


def torch_libraries() -> list[str]:
    from torch.utils.cpp_extension import library_paths

    return [*(f"-L{path}" for path in library_paths()), "-lc10", "-ltorch_cpu", "-ltorch_python"]


def link_module(package: Path, name: str, objects: list[Path], *libraries: str) -> None:
    module = package / f"{name}{sysconfig.get_config_var('EXT_SUFFIX')}"
    if not module.exists() or module.stat().st_mtime < max(path.stat().st_mtime for path in objects):
        subprocess.run(["g++", "-shared", "-pthread", *map(str, objects), *libraries, "-o", str(module)], check=True)


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """pytest, in a process of its own, on the emulated device."""
    return execute("-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", *arguments)


def execute(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Python, with the emulated device."""
    paths = os.pathsep.join(map(str, (build(), ROOT / "tests", ROOT / "tests" / "support")))
    environment = {"DEEPEP_MOE_STRESS_ROUNDS": "30"} | os.environ  # a round takes a second or more
    environment |= {VARIABLE: "1", "PYTHONPATH": paths, "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-P", *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def install() -> None:
    """Make this process believe in the device: its tensors lie in CPU memory."""
    import torch

    from deepep_moe import device
    from deepep_moe.exchange.backends import nvlink
    from deepep_moe.low_latency import nvlink as low_latency

    event = SimpleNamespace(record=lambda _: None, query=lambda: True, device=None)
    stream = SimpleNamespace(cuda_stream=0, wait_stream=lambda _: None, wait_event=lambda _: None, record_event=lambda: event)
    torch.cuda.is_available = lambda: True
    torch.cuda.current_device = lambda: 0
    torch.cuda.current_stream = lambda device=None: stream
    torch.cuda.synchronize = lambda device=None: None
    torch.cuda.is_current_stream_capturing = lambda: False
    device.GPU = "cpu"
    nvlink.torch = SimpleNamespace(**{name: getattr(torch, name) for name in dir(torch) if not name.startswith("__")})
    nvlink.torch.device = lambda *_: torch.device("cpu")
    nvlink.torch.cuda = SimpleNamespace(
        current_device=torch.cuda.current_device,
        current_stream=torch.cuda.current_stream,
        is_current_stream_capturing=torch.cuda.is_current_stream_capturing,
        Stream=lambda device: stream,
        Event=lambda: event,
    )

    low_latency.torch = nvlink.torch
    low_latency.NvlinkLowLatencyBackend._keep = lambda *_: None


if __name__ == "__main__":
    result = run(*(sys.argv[1:] or [*sum(SUITES.values(), ()), "-k", f"not ({NEEDS_A_GPU})"]))
    print(result.stdout)
    sys.exit(result.returncode)
