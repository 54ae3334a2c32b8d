"""The nvlink backend on a processor: csrc/cuda compiled against tests/emulation, and a `torch.cuda` that knows one more device.

`python tests/emulated_gpu.py` builds it and runs the GPU tests that need nothing but kernels. DEEPEP_MOE_SANITIZE names sanitizers of the
compiler to build it with, all of the CPU library included: `.ci/sanitize cpu` runs both so.
"""

import contextlib
import fcntl
import os
import subprocess
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

ROOT = Path(__file__).resolve().parent.parent
SANITIZERS = os.environ.get("DEEPEP_MOE_SANITIZE", "")  # as -fsanitize takes them
SITE = ROOT / "build" / ("emulation-" + SANITIZERS if SANITIZERS else "emulation") / "site"
DEVICE = "libemulated_gpu.so"  # beside the modules, which share it
VARIABLE = "DEEPEP_MOE_EMULATED_GPU"
FLAGS = ["-std=c++20", "-O1", "-fPIC", "-fvisibility=hidden", "-ffp-contract=off", "-pthread", "-U_FORTIFY_SOURCE", "-DDEEPEP_MOE_CUDA=1"]
# vptr takes a member function of a second base class, as pybind11 calls it, for one of another object.
SANITIZE = f"-fsanitize={SANITIZERS} -fno-sanitize=vptr -fno-sanitize-recover=all -fno-omit-frame-pointer -g1".split() if SANITIZERS else []
SANITIZE += ["-Wno-tsan"] if SANITIZERS == "thread" else []  # says of each fence that it is not followed
SUITES = {
    "exchange": ("tests/exchange", "tests/faults", "tests/compat", "tests/nn/test_fp8_layer.py", "tests/nn/test_expert_copies.py"),
    "low_latency": ("tests/low_latency", "tests/nn/test_overlap.py", "tests/examples/test_overlap_example.py"),
    "gate": ("tests/gate", "tests/nn/test_router.py", "tests/ops", "tests/integrations/deepspeed/test_deepspeed_gates.py"),
    "tuning": ("tests/tuning",),
}
# Some tests of each kind, which `make test` runs; the suites then leave them out.
SLICE = (
    "tests/exchange/test_exchange.py::test_two_ranks_by_hand", "tests/exchange/test_exchange.py::test_fp8_rows_with_scales",
    "tests/exchange/test_exchange.py::test_equals_reference[[5, 0, 17]-nvlink", "tests/exchange/test_nvlink.py::test_loads_and_stores",
    "tests/exchange/test_nvlink.py::test_ways_to_send[0-now", "tests/exchange/test_nvlink.py::test_ways_to_send[7-hook",
    "tests/exchange/test_nvlink_errors.py::test_bad_arguments",
    "tests/faults/test_contract.py::test_too_small_a_bound_on_gpus[nvlink-2",
    "tests/exchange/test_nvlink_failed_calls.py::test_one_failed_handle", "tests/exchange/test_nvlink_peers.py::test_peer_that_is_gone",
    "tests/exchange/test_autograd.py::test_gradients_equal_reference", "tests/exchange/test_quant.py",
    "tests/exchange/test_nvshmem_exchange.py::test_equals_reference", "tests/exchange/test_nvshmem_exchange.py::test_one_row_crosses",
    "tests/exchange/test_fp8_training.py::test_rows_and_gradients[nvlink-2",
    "tests/exchange/test_by_expert.py::test_outputs_that_cannot_be_read_where_they_are[nvlink-strided]",
    "tests/exchange/test_by_expert.py::test_outputs_that_cannot_be_read_where_they_are[nvlink-folded]",
    "tests/low_latency/test_low_latency.py::test_by_hand", "tests/low_latency/test_low_latency.py::test_fp8[640",
    "tests/low_latency/test_low_latency_masks.py::test_masked_by_hand", "tests/low_latency/test_low_latency_errors.py::test_bad_arguments",
    "tests/gate/test_gate.py", "tests/gate/test_gate_errors.py",
    "tests/compat/test_deep_ep_normal.py::test_scenarios[nvlink-fp8-topk-async-previous",
    "tests/tuning/test_profile_of_buffer.py", "tests/tuning/test_tune_ranks.py::test_command",
    "tests/tuning/test_tune_ranks.py::test_nothing_is_faster",
)  # fmt: skip
NEEDS_A_GPU = (
    "cuda_graph or cudamalloc or other_stream or dead_peer or interrupted or one_graph or gates_to_the_bit or layer_on_gpus or in_triton "
    "or row_products or last_backward"
)


def is_chosen() -> bool:
    return bool(os.environ.get(VARIABLE))


def is_up_to_date(target: Path, command: list[str]) -> bool:
    """Return whether `command` built `target`, and no file that the compiler read (its dependency file lists them) has changed since."""
    notes, made_by = target.with_suffix(".d"), target.with_suffix(".command")
    if not all(path.exists() for path in (target, notes, made_by)) or made_by.read_text() != " ".join(command):
        return False
    inputs = [Path(path) for path in notes.read_text().replace("\\\n", " ").split()[1:]]
    return all(path.exists() for path in inputs) and target.stat().st_mtime > max(path.stat().st_mtime for path in inputs)


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Wait until no other process builds: two lanes of tests share the folder."""
    SITE.parent.mkdir(parents=True, exist_ok=True)
    with open(SITE.parent / "lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def compile_object(source: Path, *others: Path) -> Path:
    """Compile a file, and `others` with it: headers that take most of the time, as PyTorch's do, are then read once."""
    import pybind11

    target = SITE.parent / "objects" / f"{source.parent.name}-{source.name}.o"
    target.parent.mkdir(parents=True, exist_ok=True)
    include = [ROOT / "tests" / "emulation", ROOT / "csrc", pybind11.get_include(), sysconfig.get_paths()["include"]]
    macros = ['-DDEEPEP_MOE_VERSION="emulated"', "-DDEEPEP_MOE_FOUND_NVSHMEM=false", "-Wno-unknown-pragmas"]
    if source.parent.name == "torch":
        import torch
        from torch.utils.cpp_extension import include_paths

        macros += [f'-DDEEPEP_MOE_TORCH="{torch.__version__}"', *(f"-isystem{path}" for path in include_paths())]
    flags = [*FLAGS, *SANITIZE, *macros, *(f"-I{path}" for path in include)]
    flags += ["-O2"] if source.parent.name == "emulation" else []  # a small part of what is compiled, and most of what runs
    flags += [word for other in others for word in ("-include", str(other))]
    command = ["g++", *flags, "-x", "c++", "-MMD", "-c", str(source), "-o", str(target)]
    if not is_up_to_date(target, command):
        subprocess.run(command, check=True)
        target.with_suffix(".command").write_text(" ".join(command))
    return target


def compile_objects(sources: Iterable[Path]) -> list[Path]:
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(compile_object, sources))


@alone()
def build() -> Path:
    """A folder for PYTHONPATH that holds the package with the emulated modules."""
    apart = {name: ROOT / "csrc" / name for name in ("torch", "nvshmem")}  # a module of its own for each
    sources = [path for path in (ROOT / "csrc").rglob("*.*") if path.suffix in (".cpp", ".cu")]
    objects = compile_objects(path for path in sources if path.parent not in apart.values())
    functions = [compile_object(*sorted(apart["torch"].glob("*.cpp")))]  # one unit: names in its unnamed namespaces differ
    internode = compile_objects(path for path in sources if path.parent == apart["nvshmem"])
    package = SITE / "deepep_moe"
    package.mkdir(parents=True, exist_ok=True)
    for link in package.iterdir():
        if link.is_symlink() and not link.exists():  # of a module that was moved
            link.unlink()
    for path in (ROOT / "deepep_moe").iterdir():
        link = package / path.name
        if not path.name.startswith(("_C.cp", "_torch.cp", "_nvshmem.cp", "__pycache__")) and not link.is_symlink():
            link.symlink_to(path)
    if not (package / "integrations").is_symlink():
        (package / "integrations").symlink_to(ROOT / "integrations")
    on_device = (*build_device(package), "-Wl,-rpath,$ORIGIN")
    modules = {"_C": (objects, on_device), "_torch": (functions, torch_libraries()), "_nvshmem": (internode, on_device)}
    for name, (parts, libraries) in modules.items():
        link_objects(package / f"{name}{sysconfig.get_config_var('EXT_SUFFIX')}", parts, "-shared", libraries=libraries)
    return SITE


def build_device(package: Path) -> tuple[str, ...]:
    """The device in a folder, for all modules of a process; what links it."""
    objects = compile_objects((ROOT / "tests" / "emulation").glob("*.cpp"))
    link_objects(package / DEVICE, objects, "-shared", f"-Wl,-soname,{DEVICE}")
    return f"-L{package}", f"-l:{DEVICE}"


def torch_libraries() -> list[str]:
    from torch.utils.cpp_extension import library_paths

    return [*(f"-L{path}" for path in library_paths()), "-lc10", "-ltorch_cpu", "-ltorch_python"]


def link_objects(target: Path, objects: list[Path], *how: str, libraries: Iterable[str] = ()) -> Path:
    if not target.exists() or target.stat().st_mtime < max(path.stat().st_mtime for path in objects):
        subprocess.run(["g++", "-pthread", *how, *SANITIZE, *map(str, objects), *libraries, "-o", str(target)], check=True)
    return target


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """pytest, in a process of its own, on the emulated device."""
    return execute("-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", *arguments)


def execute(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Python, with the emulated device."""
    paths = os.pathsep.join(map(str, (build(), ROOT / "tests", ROOT / "tests" / "support")))
    environment = {"DEEPEP_MOE_STRESS_ROUNDS": "30"} | os.environ  # a round takes a second or more
    environment |= {VARIABLE: "1", "PYTHONPATH": paths}
    command = [sys.executable, "-P", *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def install() -> None:
    """Make this process believe in the device: its tensors lie in CPU memory."""
    import torch

    from deepep_moe import device
    from deepep_moe.exchange.backends import nvlink
    from deepep_moe.low_latency import nvlink as low_latency

    event = SimpleNamespace(record=lambda _: None, query=lambda: True, wait=lambda: None)
    stream = SimpleNamespace(
        cuda_stream=0, synchronize=lambda: None, wait_stream=lambda _: None, wait_event=lambda _: None, record_event=lambda: event
    )
    torch.cuda.is_available = lambda: True
    torch.cuda.current_device = lambda: 0
    torch.cuda.current_stream = lambda device=None: stream
    torch.cuda.synchronize = lambda device=None: None
    torch.cuda.is_current_stream_capturing = lambda: False
    torch.cuda.get_device_name = lambda device=None: "emulated GPU"
    torch.cuda.get_device_capability = lambda device=None: (9, 0)
    torch.cuda.get_rng_state = lambda device=None: torch.empty(0)  # which Dynamo keeps
    torch.cuda.set_rng_state = lambda state, device=None: None
    device.GPU = "cpu"
    nvlink.torch = SimpleNamespace(**{name: getattr(torch, name) for name in dir(torch) if not name.startswith("__")})
    nvlink.torch.device = lambda *_: torch.device("cpu")
    nvlink.torch.cuda = SimpleNamespace(
        current_device=torch.cuda.current_device,
        current_stream=torch.cuda.current_stream,
        is_current_stream_capturing=torch.cuda.is_current_stream_capturing,
        get_device_name=torch.cuda.get_device_name,
        get_device_capability=torch.cuda.get_device_capability,
    )

    low_latency.torch = nvlink.torch


if __name__ == "__main__":
    result = run(*(sys.argv[1:] or [*sum(SUITES.values(), ()), "-k", f"not ({NEEDS_A_GPU})"]))
    print(result.stdout)
    sys.exit(result.returncode)
