"""Build of the native module `deepep_moe._C`.

The module links neither PyTorch nor Python packages other than pybind11's headers, so it builds in an isolated
environment and one build serves every supported PyTorch. CUDA sources are compiled where nvcc is found. What was compiled
is recorded in the module and shown by `deepep_moe.features()`.

The module `deepep_moe._torch`, which buffers on GPUs need, is built where PyTorch is found as well, and serves that PyTorch alone. The
optional module `deepep_moe._nvshmem` is built where NVSHMEM is found as well, and serves that major and minor version of NVSHMEM.

A wheel for others has `_C` alone, which any PyTorch and any driver loads, and the sources of the other two (`make wheel`).
`deepep-moe build` builds these where the wheel is installed.

The build reads the environment variables CUDA_HOME and NVSHMEM_HOME, and these:
DEEPEP_MOE_CUDA=0, DEEPEP_MOE_AUTOGRAD=0 and DEEPEP_MOE_NVSHMEM=0 build without GPU backends, `_torch` and `_nvshmem`.
DEEPEP_MOE_ARCHITECTURES names the GPUs to build for (`9.0`, `8.0;9.0`, `native`); else TORCH_CUDA_ARCH_LIST, else all supported ones.
DEEPEP_MOE_MODULES names the modules to build, such as `_C` or `_torch,_nvshmem`; by default all that can be built.
DEEPEP_MOE_BUILD_JOBS is the number of compilers that run at a time, by default one for each CPU of this process.
"""

import sys

if sys.version_info < (3, 11):  # noqa: UP036, as pip asks for the version only after this file has run
    running = ".".join(map(str, sys.version_info[:3]))
    raise SystemExit(f"deepep_moe needs Python 3.11 or newer, and {sys.executable} is {running}; use another: python3.11 -m pip install .")

import importlib.util
import os
import re
import runpy
import shutil
import subprocess
import sysconfig
import threading
import tomllib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pybind11
from pybind11.setup_helpers import ParallelCompile, Pybind11Extension, build_ext
from setuptools import Extension, find_packages, setup
from setuptools.command.build_py import build_py
from setuptools.errors import CompileError

ROOT = Path(__file__).parent
HOST_FOLDERS = ("common", "cpu", "runtime", "runtime/shm", "bindings")
CUDA_FOLDERS = ("runtime/nvlink", "bindings/cuda")  # host sources that are built only with CUDA; csrc/cuda holds the kernels
# A build that names no GPUs compiles for those of these that nvcc knows. CUDA 12.8 and newer know 10.0; its PTX serves GPUs after it.
DEFAULT_ARCHITECTURES = "8.0;9.0;10.0+PTX"
ARCHITECTURE_VARIABLES = ("DEEPEP_MOE_ARCHITECTURES", "TORCH_CUDA_ARCH_LIST")  # the first that is set counts
ARCHITECTURE = re.compile(r"(?:sm_|compute_)?(\d{1,2})\.?(\d)([af]?)(\+ptx)?")  # 9.0, 9.0a, 9.0+PTX, 90a, sm_90a
LEAST_ARCHITECTURE = 80
NAMED_ARCHITECTURES = {  # as PyTorch names them in TORCH_CUDA_ARCH_LIST
    "volta": "7.0+PTX",
    "turing": "7.5+PTX",
    "ampere+tegra": "8.7",
    "ampere": "8.0;8.6+PTX",
    "ada": "8.9+PTX",
    "hopper": "9.0+PTX",
    "blackwell+tegra": "11.0",
    "blackwell": "10.0;10.3;12.0;12.1+PTX",
}
LEAST_GCC = 11
PYBIND11 = f"-isystem{pybind11.get_include()}"  # -MMD then leaves its headers out, which pip's isolation has in another folder each time
MODULES = os.environ.get("DEEPEP_MOE_MODULES", "_C,_torch,_nvshmem").split(",")
BUILD_FILES = ("setup.py", "pyproject.toml", "README.md", "LICENSE")  # what a build needs beside csrc
BUILD_JOBS = os.environ.get("DEEPEP_MOE_BUILD_JOBS") or str(len(os.sched_getaffinity(0)))
if not BUILD_JOBS.isdecimal() or int(BUILD_JOBS) < 1:
    raise SystemExit(f"DEEPEP_MOE_BUILD_JOBS is {BUILD_JOBS!r}; it must be a whole number of at least 1")
NUM_JOBS = int(BUILD_JOBS)
COMPILERS = threading.Semaphore(NUM_JOBS)  # the compilers that may still be started


def find_nvcc() -> str:
    """Path of nvcc, or "" (CUDA_HOME first, then PATH, then the usual place); none with DEEPEP_MOE_CUDA=0."""
    if os.environ.get("DEEPEP_MOE_CUDA") == "0":
        return ""
    candidates = [Path(os.environ["CUDA_HOME"]) / "bin" / "nvcc"] if os.environ.get("CUDA_HOME") else []
    if nvcc := shutil.which("nvcc"):
        candidates.append(Path(nvcc))
    candidates.append(Path("/usr/local/cuda/bin/nvcc"))
    return next((str(path) for path in candidates if path.is_file()), "")


def find_nvshmem() -> str:
    """Root of an NVSHMEM installation, or "" (NVSHMEM_HOME first, then the pip package); none with DEEPEP_MOE_NVSHMEM=0."""
    if os.environ.get("DEEPEP_MOE_NVSHMEM") == "0":
        return ""
    if home := os.environ.get("NVSHMEM_HOME"):
        if not is_nvshmem(Path(home)):
            raise SystemExit(
                f"NVSHMEM_HOME is {home}, which has no include/nvshmem_host.h; set it to the root of NVSHMEM 3.4 or newer, or unset it"
            )
        return home
    return next((str(path) for folder in package_folders() if is_nvshmem(path := folder / "nvidia" / "nvshmem")), "")


def is_nvshmem(root: Path) -> bool:
    return (root / "include" / "nvshmem_host.h").is_file()


def find_torch() -> Path | None:
    """The PyTorch of the Python that builds; none with DEEPEP_MOE_AUTOGRAD=0."""
    if os.environ.get("DEEPEP_MOE_AUTOGRAD") == "0":
        return None
    folders = package_folders()
    return next((folder / "torch" for folder in folders if (folder / "torch" / "include" / "torch" / "extension.h").is_file()), None)


def package_folders() -> list[Path]:
    """Return the package folders of the Python that builds, also those that pip's isolation hides."""
    torch = importlib.util.find_spec("torch")
    folders = [Path(torch.origin).parent.parent] if torch and torch.origin else []
    folders += [Path(sysconfig.get_path(name)) for name in ("purelib", "platlib")]
    folders += [
        Path(line) for folder in folders for file in folder.glob("*.pth") for line in file.read_text().splitlines() if line[:1] == "/"
    ]
    return folders


def version() -> str:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]


def host_sources(with_cuda: bool) -> list[str]:
    folders = (*HOST_FOLDERS, *(CUDA_FOLDERS if with_cuda else ()))
    return sorted(str(path.relative_to(ROOT)) for folder in folders for path in (ROOT / "csrc" / folder).glob("*.cpp"))


def require_compiler() -> None:
    """Stop with advice if there is no C++ compiler; the build itself would only report a missing file."""
    compiler = os.environ.get("CXX", "g++").split()[0]
    if shutil.which(compiler) is None:
        raise SystemExit(
            f"deepep_moe needs a C++20 compiler and found no {compiler!r}: install gcc {LEAST_GCC} or newer (apt install g++), or set CXX"
        )
    version = subprocess.run([compiler, "-dumpversion"], capture_output=True, text=True).stdout.strip()
    if "g++" in Path(compiler).name and "clang" not in compiler and (major := version.split(".")[0]).isdigit() and int(major) < LEAST_GCC:
        raise SystemExit(f"deepep_moe needs gcc {LEAST_GCC} or newer, and {compiler} is {version}: install g++-{LEAST_GCC}, or set CXX")
    include = Path(sysconfig.get_path("include"))
    if not (include / "Python.h").is_file():
        raise SystemExit(f"deepep_moe needs Python's headers and found no {include / 'Python.h'}: install them (apt install python3-dev)")


def extensions() -> list[Extension]:
    """Return the extensions of MODULES that can be built here."""
    require_compiler()
    makers = {"_C": lambda: [extension()], "_torch": torch_extensions, "_nvshmem": nvshmem_extensions}
    if unknown := set(MODULES) - set(makers):
        raise SystemExit(
            f"DEEPEP_MOE_MODULES names {', '.join(sorted(unknown))}; it takes some of {', '.join(makers)}, separated by commas"
        )
    return [built for name, make in makers.items() if name in MODULES for built in make()]


def extension() -> Pybind11Extension:
    headers = sorted(str(path.relative_to(ROOT)) for pattern in ("*.h", "*.cuh", "*.cu") for path in (ROOT / "csrc").rglob(pattern))
    nvcc, nvshmem = find_nvcc(), find_nvshmem()
    print(f"deepep_moe: nvcc: {nvcc or 'not found, building without GPU backends'}; NVSHMEM: {nvshmem or 'not found'}")
    built = Pybind11Extension(
        "deepep_moe._C",
        host_sources(bool(nvcc)),
        include_dirs=["csrc"],
        depends=headers,
        cxx_std=20,
        include_pybind11=False,
        define_macros=[
            ("DEEPEP_MOE_VERSION", f'"{version()}"'),
            ("DEEPEP_MOE_FOUND_NVSHMEM", "true" if nvshmem else "false"),
        ],
        extra_compile_args=["-O3", "-MMD", "-ffp-contract=off", "-fno-trapping-math", "-pthread", "-Wall", "-Wextra", PYBIND11],
        extra_link_args=["-pthread"],
    )
    if nvcc:
        cuda = cuda_root(nvcc)
        built.define_macros.append(("DEEPEP_MOE_CUDA", "1"))
        built.include_dirs.append(str(cuda / "include"))
        # The static runtime finds the driver when it is first used, so the module also loads on machines without one.
        built.extra_link_args += [f"-L{cuda / 'lib64'}", "-lcudart_static", "-ldl", "-lrt"]
    return built


def torch_extensions() -> list[Extension]:
    """`deepep_moe._torch`, for the PyTorch that is found, on machines that build CUDA. With a PyTorch that it does not compile with, no
    buffer serves GPUs."""
    torch = find_torch()
    if torch is None or ("_C" in MODULES and not find_nvcc()):  # it needs no nvcc itself, but a `_C` that was built with it
        print("deepep_moe: PyTorch or nvcc not found, building without deepep_moe._torch")
        return []
    version = runpy.run_path(str(torch / "version.py"))["__version__"]
    if tuple(map(int, version.split(".")[:2])) < (2, 7):  # most builds before have another ABI of strings
        print(f"deepep_moe: torch {version} is older than 2.7, building without deepep_moe._torch")
        return []
    print(f"deepep_moe: building deepep_moe._torch for torch {version} in {torch}")
    headers = (f"-isystem{torch / 'include' / folder}" for folder in (".", "torch/csrc/api/include"))
    return [
        Extension(
            "deepep_moe._torch",
            sorted(str(path.relative_to(ROOT)) for path in (ROOT / "csrc" / "torch").glob("*.cpp")),
            include_dirs=["csrc"],
            depends=sorted(str(path.relative_to(ROOT)) for path in (ROOT / "csrc").rglob("*.h")),
            language="c++",
            optional=True,
            define_macros=[("DEEPEP_MOE_TORCH", f'"{version}"')],
            extra_compile_args=["-std=c++20", "-O2", "-g0", "-MMD", "-fvisibility=hidden", "-Wall", "-Wextra", *headers],
            library_dirs=[str(torch / "lib")],
            libraries=["c10", "torch_cpu", "torch_python"],  # which PyTorch has loaded before
        )
    ]


def nvshmem_extensions() -> list[Extension]:
    """`deepep_moe._nvshmem`, for the NVSHMEM that is found, on machines that build CUDA. Where it does not compile, the rest is installed
    without it."""
    nvcc, nvshmem = find_nvcc(), find_nvshmem()
    if not nvcc or not nvshmem:
        print("deepep_moe: nvcc or NVSHMEM not found, building without deepep_moe._nvshmem")
        return []
    cuda, library = cuda_root(nvcc), Path(nvshmem) / "lib"
    return [
        Pybind11Extension(
            "deepep_moe._nvshmem",
            sorted(str(path.relative_to(ROOT)) for path in (ROOT / "csrc" / "nvshmem").glob("*.cpp")),
            include_dirs=["csrc", f"{nvshmem}/include", str(cuda / "include")],
            depends=sorted(str(path.relative_to(ROOT)) for pattern in ("*.h", "*.cuh", "*.cu") for path in (ROOT / "csrc").rglob(pattern)),
            cxx_std=20,
            optional=True,
            include_pybind11=False,
            extra_compile_args=["-O2", "-MMD", "-fvisibility=hidden", "-Wall", "-Wextra", PYBIND11],
            # The wheel has no unversioned name of the host library, which Python loads before this module. Symbols of the static library
            # must not take the place of those in other modules that link it, such as PyTorch's.
            extra_link_args=[
                *("-s", "-Wl,--exclude-libs,ALL", f"-L{library}", "-l:libnvshmem_host.so.3"),
                *(f"-L{cuda / 'lib64'}", "-lcudadevrt", "-lcudart_static", "-ldl", "-lrt", "-lpthread"),
            ],
        )
    ]


def cuda_root(nvcc: str) -> Path:
    """The toolkit of `nvcc`, which may be a link or a script elsewhere."""
    candidates = [Path(os.environ["CUDA_HOME"])] if os.environ.get("CUDA_HOME") else []
    candidates += [Path(nvcc).resolve().parent.parent, Path("/usr/local/cuda")]
    return next((path for path in candidates if (path / "include" / "cuda_runtime_api.h").is_file()), candidates[-1])


class BuildWithCuda(build_ext):
    """Compiles csrc/cuda with nvcc before the host sources are compiled and all are linked. Begins again where the last build had another
    compiler of CUDA, another PyTorch or other switches: times of files do not tell."""

    def finalize_options(self) -> None:
        super().finalize_options()
        self.build_temp = f"build/temp.{sysconfig.get_platform()}-{sys.implementation.cache_tag}"  # an editable install would drop its own

    def build_extensions(self) -> None:
        now, last = configuration(self.extensions), Path(self.build_temp) / "configuration.txt"
        if not last.is_file() or last.read_text() != now:
            shutil.rmtree(self.build_temp, ignore_errors=True)
            self.force = True
        self.compiler.spawn = in_turn(self.compiler.spawn)
        self.parallel = len(self.extensions)  # so no module waits for the longest file of another
        super().build_extensions()
        last.parent.mkdir(parents=True, exist_ok=True)
        last.write_text(now)

    def build_extension(self, ext: Extension) -> None:
        if find_nvcc() and ext.name == "deepep_moe._C":
            ext.extra_objects += self.compile_kernels("cuda")
        elif ext.name == "deepep_moe._nvshmem":
            try:
                ext.extra_objects += self.link_nvshmem(find_nvcc(), Path(find_nvshmem()))
            except subprocess.CalledProcessError as error:  # setuptools goes on without an optional module
                raise CompileError(
                    f"deepep_moe._nvshmem cannot be built with {find_nvcc()} and NVSHMEM in {find_nvshmem()}: {error}"
                ) from error
            ext.extra_link_args.append(f"-Wl,--version-script={self.exported('PyInit__nvshmem')}")
        super().build_extension(ext)

    def compile_kernels(self, folder: str, *flags: str, with_ptx: bool = True) -> list[str]:
        """The objects of csrc/<folder>/*.cu."""
        nvcc = find_nvcc()
        sources = sorted(path.relative_to(ROOT) for path in (ROOT / "csrc" / folder).glob("*.cu"))
        targets = [Path(self.build_temp) / source.with_suffix(".o") for source in sources]
        codes = architecture_flags(nvcc, with_ptx)
        with ThreadPoolExecutor(NUM_JOBS) as pool:
            list(pool.map(lambda pair: compile_cuda(nvcc, [*codes, *flags], *pair), zip(sources, targets, strict=True)))
        return list(map(str, targets))

    def link_nvshmem(self, nvcc: str, nvshmem: Path) -> list[str]:
        """The objects of csrc/nvshmem/*.cu and what they need of NVSHMEM's device library: a device link of their own, so that other
        kernels stay as they are. It leaves no PTX for GPUs that are newer than the compiler."""
        # 3012 and 3013: volatile in C++20, in NVSHMEM's headers.
        objects = self.compile_kernels("nvshmem", "-rdc=true", "-diag-suppress=3012,3013", f"-I{nvshmem}/include", with_ptx=False)
        linked = Path(self.build_temp) / "csrc" / "nvshmem" / "device_link.o"
        libraries = [f"-L{nvshmem}/lib", "-lnvshmem_device", "-lcudadevrt"]
        codes = architecture_flags(nvcc, with_ptx=False)
        if not linked.is_file() or any(Path(name).stat().st_mtime > linked.stat().st_mtime for name in objects):
            run_compiler([nvcc, "-dlink", "-Xcompiler=-fPIC", *codes, *objects, "-o", str(linked), *libraries])
        return [*objects, str(linked), f"{nvshmem}/lib/libnvshmem_device.a"]

    def exported(self, symbol: str) -> Path:
        """A script for the linker: `symbol` is all that the module exports."""
        script = Path(self.build_temp) / f"{symbol}.map"
        script.write_text(f"{{ global: {symbol}; local: *; }};\n")
        return script


class BuildWithSources(build_py):
    """Puts what `deepep-moe build` needs into a wheel, as deepep_moe/sources. An editable install has the clone."""

    def run(self) -> None:
        super().run()
        if self.editable_mode or "_C" not in MODULES:
            return
        files = [ROOT / name for name in BUILD_FILES]
        files += [path for path in sorted((ROOT / "csrc").rglob("*")) if path.suffix in (".h", ".cuh", ".cpp", ".cu")]
        for path in files:
            target = Path(self.build_lib, "deepep_moe", "sources", path.relative_to(ROOT))
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target)


def configuration(extensions: list[Extension]) -> str:
    """Return all that a build depends on besides the files of this repository."""
    nvcc = find_nvcc()
    lines = [subprocess.run([nvcc, "--version"], check=True, capture_output=True, text=True).stdout] if nvcc else []
    lines += [f"{name}={os.environ.get(name, '')}" for name in ("CC", "CXX", "CFLAGS", "CXXFLAGS", "CPPFLAGS", "LDFLAGS")]
    if nvcc and any(ext.name != "deepep_moe._torch" for ext in extensions):
        lines += architecture_flags(nvcc)
    for ext in extensions:
        lines += [repr((ext.name, ext.sources, ext.define_macros, ext.include_dirs, ext.extra_compile_args, ext.extra_link_args))]
    return "\n".join(lines).replace(PYBIND11, pybind11.__version__)


def architecture_flags(nvcc: str, with_ptx: bool = True) -> list[str]:
    """Return the options of nvcc that choose the GPUs."""
    flags = []
    for (number, suffix), wants_ptx in architectures(nvcc).items():
        ptx = f"compute_{number}" if wants_ptx and with_ptx else ""
        if suffix:  # PTX of such an architecture serves no newer GPU, so it is made without the suffix
            flags.append(f"-gencode=arch=compute_{number}{suffix},code=[sm_{number}{suffix}]")
            flags += [f"-gencode=arch={ptx},code=[{ptx}]"] if ptx else []
        else:
            flags.append(f"-gencode=arch=compute_{number},code=[sm_{number}{ptx and ','}{ptx}]")
    return flags


def architectures(nvcc: str) -> dict[tuple[int, str], bool]:
    """Return the architectures to compile for, (90, "a") for 9.0a, and whether PTX for newer GPUs is wanted with each. Stop with advice
    where nvcc does not know one that the environment names."""
    listed = subprocess.run([nvcc, "--list-gpu-arch"], check=True, capture_output=True, text=True).stdout
    known = sorted(map(int, re.findall(r"compute_(\d+)", listed)))
    if 90 not in known:
        raise SystemExit(
            f"deepep_moe needs CUDA 12 or newer, and {nvcc} knows {listed.split()}: set CUDA_HOME, or build with DEEPEP_MOE_CUDA=0"
        )
    variable = next((name for name in ARCHITECTURE_VARIABLES if os.environ.get(name)), "")
    chosen: dict[tuple[int, str], bool] = {}
    for name in architecture_names(os.environ[variable] if variable else DEFAULT_ARCHITECTURES, known):
        number, suffix, wants_ptx = parse_architecture(name)
        if variable == "TORCH_CUDA_ARCH_LIST" and 0 < number < LEAST_ARCHITECTURE:
            print(f"deepep_moe: {variable} names {name}, and deepep_moe has kernels for 8.0 and newer only")
        elif number in known and number >= LEAST_ARCHITECTURE:
            chosen[number, suffix] = chosen.get((number, suffix), False) or wants_ptx
        elif variable:
            numbers = ", ".join(f"{each // 10}.{each % 10}" for each in known if each >= LEAST_ARCHITECTURE)
            raise SystemExit(f"deepep_moe cannot be built for {name} of {variable}: {nvcc} knows {numbers}; name these, or native")
    if not chosen:
        raise SystemExit(f"deepep_moe cannot be built for {variable}={os.environ[variable]!r}: name a GPU of 8.0 or newer")
    return dict(sorted(chosen.items()))


def architecture_names(text: str, known: list[int]) -> list[str]:
    """Return the names in `text`, which semicolons, commas or spaces separate. `native` becomes the GPUs of this machine, and a name of
    PyTorch's those of its GPUs that nvcc knows."""
    names: list[str] = []
    for word in re.split(r"[;,\s]+", text.strip("; ,")):
        if word == "native":
            names += native_architectures()
        elif several := NAMED_ARCHITECTURES.get(word.lower()):
            names += [name for name in several.split(";") if parse_architecture(name)[0] in known]
        else:
            names.append(word)
    return names


def native_architectures() -> list[str]:
    """Return the compute capabilities of the GPUs of this machine."""
    command = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
    shown = subprocess.run(command, capture_output=True, text=True).stdout.split() if shutil.which("nvidia-smi") else []
    if not shown or not all(map(ARCHITECTURE.fullmatch, shown)):
        raise SystemExit("deepep_moe cannot be built for `native`: nvidia-smi shows no GPU on this machine; name the GPUs, such as 9.0")
    return shown


def parse_architecture(name: str) -> tuple[int, str, bool]:
    """Return number, suffix and whether PTX is wanted: (90, "a", True) for 9.0+PTX. The number is 0 where `name` is none. Kernels for 9.0
    use instructions that only 9.0a has, and what is compiled for 9.0a runs on every GPU of 9.0."""
    match = ARCHITECTURE.fullmatch(name.lower())
    if match is None:
        return 0, "", False
    number, suffix = int(match[1] + match[2]), "a" if (match[1], match[2]) == ("9", "0") else match[3]
    exists = number >= {"": 0, "a": 90, "f": 100}[suffix] and match[3] in ("", suffix)
    return number if exists else 0, suffix, bool(match[4])


def compile_cuda(nvcc: str, codes: list[str], source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    if not is_stale(str(target), str(source)):
        return
    flags = ["-std=c++20", "-O3", "--threads=3", "-fmad=false", "-Icsrc", "-Xcompiler=-fPIC,-fvisibility=hidden", *codes]
    outputs = ["-o", str(target), "-MMD", "-MF", str(target.with_suffix(".d"))]
    run_compiler([nvcc, *flags, "-c", str(source), *outputs])


def run_compiler(command: list[str]) -> None:
    in_turn(subprocess.run)(command, check=True)


def in_turn(start: Callable[..., Any]) -> Callable[..., Any]:
    """Return `start`, which runs a compiler, so that at most NUM_JOBS run at a time."""

    def wait_and_start(*arguments: Any, **options: Any) -> Any:
        with COMPILERS:
            return start(*arguments, **options)

    return wait_and_start


def is_stale(object_file: str, source: str) -> bool:
    """Must `source` be compiled again? Yes where this file, or one that the compiler read for the object, is newer than the object."""
    target = Path(object_file)
    dependencies = target.with_suffix(".d")  # written by the compiler
    if not target.is_file() or not dependencies.is_file():
        return True
    _, _, files = dependencies.read_text().replace("\\\n", " ").partition(":")
    inputs = [Path(file) for file in files.split()] + [ROOT / "setup.py", ROOT / "pyproject.toml"]
    return any(not path.is_file() or path.stat().st_mtime > target.stat().st_mtime for path in inputs)


with ParallelCompile(default=NUM_JOBS, needs_recompile=is_stale):
    setup(
        ext_modules=extensions(),
        cmdclass={"build_ext": BuildWithCuda, "build_py": BuildWithSources},
        packages=[
            *find_packages(str(ROOT), include=["deepep_moe", "deepep_moe.*"]),
            *(f"deepep_moe.{name}" for name in find_packages(str(ROOT), include=["integrations", "integrations.*"])),
        ],
        package_dir={"deepep_moe": "deepep_moe", "deepep_moe.integrations": "integrations"},
        package_data={"deepep_moe": ["py.typed", "_C.pyi", "_torch.pyi", "_nvshmem.pyi", "tuning/defaults/*.json"]},
    )
