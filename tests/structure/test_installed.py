"""Installations that cannot work say so in one sentence, with what to do."""

import os
import runpy
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

import deepep_moe
from deepep_moe import build, installed

ROOT = Path(__file__).parents[2]
PACKAGE = Path(deepep_moe.__file__).parent


def setup_says(code: str = "pass", **variables: str) -> str:
    """Run setup.py, after `code`. Return the one line with which it refuses."""
    command = f"import runpy, sys; {code}; sys.argv = ['setup.py', '--version']; runpy.run_path('setup.py', run_name='__main__')"
    done = subprocess.run([sys.executable, "-c", command], capture_output=True, text=True, cwd=ROOT, env=os.environ | variables)
    assert done.returncode != 0, done.stdout
    return done.stderr.strip()


def tool(folder: Path, name: str, says: str) -> Path:
    path = folder / name
    path.write_text(f"#!/bin/sh\necho '{says}'\n")
    path.chmod(0o755)
    return path


def test_python_too_old():
    told = setup_says("sys.version_info = (3, 10, 4, 'final', 0)")
    assert told == f"deepep_moe needs Python 3.11 or newer, and {sys.executable} is 3.10.4; use another: python3.11 -m pip install ."


def test_no_compiler_and_an_old_one(tmp_path):
    told = setup_says(CXX="no-such-g++")
    assert told == "deepep_moe needs a C++20 compiler and found no 'no-such-g++': install gcc 11 or newer (apt install g++), or set CXX"
    compiler = tool(tmp_path, "g++-9", "9.4.0")
    assert setup_says(CXX=str(compiler)) == f"deepep_moe needs gcc 11 or newer, and {compiler} is 9.4.0: install g++-11, or set CXX"


def test_modules_that_are_none():
    told = setup_says(DEEPEP_MOE_MODULES="_C,_triton")
    assert told == "DEEPEP_MOE_MODULES names _triton; it takes some of _C, _torch, _nvshmem, separated by commas"


@pytest.fixture
def flags(monkeypatch, tmp_path):
    """Return the options with which setup.py gives the GPUs to nvcc, where the environment has these variables."""
    monkeypatch.setattr("setuptools.setup", lambda **arguments: None)
    monkeypatch.setenv("DEEPEP_MOE_CUDA", "0")
    setup = runpy.run_path(str(ROOT / "setup.py"))

    def flags(known: str = "75 80 86 89 90 100 120", with_ptx: bool = True, **variables: str) -> list[str]:
        nvcc = tool(tmp_path, "nvcc", "\n".join(f"compute_{number}" for number in known.split()))
        for name in setup["ARCHITECTURE_VARIABLES"]:
            monkeypatch.delenv(name, raising=False)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        return [flag.removeprefix("-gencode=arch=compute_") for flag in setup["architecture_flags"](str(nvcc), with_ptx)]

    return flags


def test_nvcc_too_old(flags, tmp_path):
    """It knows no GPU but those of 8.0, as that of CUDA 11 does."""
    with pytest.raises(SystemExit) as error:
        flags("80")
    nvcc = tmp_path / "nvcc"
    told = f"deepep_moe needs CUDA 12 or newer, and {nvcc} knows ['compute_80']: set CUDA_HOME, or build with DEEPEP_MOE_CUDA=0"
    assert str(error.value) == told


def test_gpus_of_a_build_that_names_none(flags):
    assert flags() == ["80,code=[sm_80]", "90a,code=[sm_90a]", "100,code=[sm_100,compute_100]"]
    assert flags("80 90", DEEPEP_MOE_ARCHITECTURES="") == ["80,code=[sm_80]", "90a,code=[sm_90a]"]
    assert flags(with_ptx=False)[-1] == "100,code=[sm_100]"


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        *((spelling, ["90a,code=[sm_90a]"]) for spelling in ("9.0", "9.0a", "90", "90a", "sm_90a", "compute_90a", "9.0, sm_90")),
        *((spelling, ["90a,code=[sm_90a]", "90,code=[compute_90]"]) for spelling in ("9.0+PTX", "9.0a+ptx", "9.0;9.0+PTX", "Hopper")),
        *((spelling, ["80,code=[sm_80]", "90a,code=[sm_90a]"]) for spelling in ("8.0;9.0", "9.0,8.0", "8.0 9.0", " sm_80; 90a ")),
        ("10.0+PTX", ["100,code=[sm_100,compute_100]"]),
        ("sm_100a;120f", ["100a,code=[sm_100a]", "120f,code=[sm_120f]"]),
        ("Ampere", ["80,code=[sm_80]", "86,code=[sm_86,compute_86]"]),
        ("Blackwell", ["100,code=[sm_100]", "120,code=[sm_120]"]),  # 10.3 and 12.1 are newer than this nvcc
    ],
)
def test_gpus_that_are_named(flags, given, expected):
    assert flags(DEEPEP_MOE_ARCHITECTURES=given) == flags(TORCH_CUDA_ARCH_LIST=given) == expected
    assert flags(DEEPEP_MOE_ARCHITECTURES=given, TORCH_CUDA_ARCH_LIST="8.9") == expected


def test_gpus_of_this_machine(flags, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    tool(tmp_path, "nvidia-smi", "8.9\n9.0\n9.0")
    assert flags(DEEPEP_MOE_ARCHITECTURES="native") == ["89,code=[sm_89]", "90a,code=[sm_90a]"]
    tool(tmp_path, "nvidia-smi", "No devices were found")
    with pytest.raises(SystemExit, match="native.*nvidia-smi shows no GPU"):
        flags(DEEPEP_MOE_ARCHITECTURES="native")


@pytest.mark.parametrize("given", ["9.9", "sm_", "hooper", "8.0a", "9.0f", "7.5", "8.0;9.0+SASS"])
def test_gpus_that_nvcc_does_not_know(flags, given, tmp_path):
    with pytest.raises(SystemExit) as error:
        flags(DEEPEP_MOE_ARCHITECTURES=given)
    assert f"{given.split(';')[-1]} of DEEPEP_MOE_ARCHITECTURES: {tmp_path / 'nvcc'} knows 8.0, 8.6, 8.9, 9.0, 10.0, 12.0" in str(
        error.value
    )


def test_older_gpus_of_pytorch_are_left_out(flags):
    assert flags(TORCH_CUDA_ARCH_LIST="5.2 7.5 8.0") == ["80,code=[sm_80]"]
    with pytest.raises(SystemExit, match=r"TORCH_CUDA_ARCH_LIST='Volta;7\.5'.*8\.0 or newer"):
        flags(TORCH_CUDA_ARCH_LIST="Volta;7.5")


def with_torch(monkeypatch, version: str) -> str:
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(__version__=version))
    return installed.check_torch()


def test_torch_outside_the_range(monkeypatch):
    assert with_torch(monkeypatch, "2.6.0") == with_torch(monkeypatch, "2.15.1+cu130") == ""
    advice = f"{sys.executable} -m pip install 'torch>=2.6,<2.16'"
    told = "deepep_moe is made for PyTorch 2.6 to 2.15, and"
    assert with_torch(monkeypatch, "2.16.0a0+git1") == f"{told} 2.16.0a0+git1 is installed; where something fails, {advice}"
    with pytest.raises(ImportError) as error:
        with_torch(monkeypatch, "2.5.1+cu121")
    assert str(error.value) == f"{told} 2.5.1+cu121 is installed; {advice}"


def test_no_torch(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(
        ModuleNotFoundError, match="^deepep_moe needs PyTorch, which .* does not have; .* -m pip install 'torch>=2.6,<2.16'$"
    ):
        installed.check_torch()


def test_range_is_that_of_the_package():
    assert f'"{installed.wanted_torch()}"' in (ROOT / "pyproject.toml").read_text()


def test_module_of_another_python(tmp_path):
    (tmp_path / "_C.cpython-39-x86_64-linux-gnu.so").touch()
    (tmp_path / "_C.cpython-310-x86_64-linux-gnu.so").touch()
    this = f"{sys.version_info.major}.{sys.version_info.minor}"
    told = f"deepep_moe in {tmp_path} was built for Python 3.9, 3.10, and this is Python {this}; install it with {sys.executable} -m pip"
    assert installed.why_not_built(tmp_path) == told
    assert installed.why_not_built(tmp_path / "elsewhere").startswith(f"{tmp_path / 'elsewhere'} holds the sources, where deepep_moe._C is")


def test_sources_that_hide_what_was_installed(tmp_path):
    """`import deepep_moe` in the folder of a clone that was not built there."""
    package = tmp_path / "deepep_moe"
    package.mkdir()
    for path in PACKAGE.glob("*.py"):
        (package / path.name).write_text(path.read_text())
    hidden = "sys.meta_path[:] = [finder for finder in sys.meta_path if 'editable' not in finder.__module__]"  # where it was installed
    done = subprocess.run([sys.executable, "-c", f"import sys; {hidden}; import deepep_moe"], capture_output=True, text=True, cwd=tmp_path)
    assert done.stderr.splitlines()[-1].startswith(f"ModuleNotFoundError: {package} holds the sources, where deepep_moe._C is not built: ")


def test_two_copies_on_the_path(monkeypatch, tmp_path):
    assert installed.other_copies() == "", sys.path
    other = tmp_path / "deepep_moe"
    other.mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    assert installed.other_copies() == "", "a folder of this name alone is none"
    (other / "_C.pyi").touch()
    told = f"{PACKAGE} is imported, and sys.path has another deepep_moe in {other}; remove one (pip uninstall deepep-moe)"
    assert installed.other_copies() == told
    code = f"import sys; sys.path.append({str(tmp_path)!r}); import deepep_moe"
    assert told in subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stderr


def test_a_module_that_torch_needs_is_not_called_torch(monkeypatch):
    """What PyTorch itself misses is told as PyTorch tells it."""

    def without_numpy(name: str) -> ModuleType:
        raise ModuleNotFoundError("No module named 'filelock'", name="filelock")

    monkeypatch.setattr(installed.importlib, "import_module", without_numpy)
    with pytest.raises(ModuleNotFoundError, match="^No module named 'filelock'$"):
        installed.check_torch()


# ---- messages ----


@pytest.mark.parametrize(("level", "shown"), [("info", True), ("ERROR", False)])
def test_one_switch_for_messages(level, shown):
    code = "import deepep_moe; deepep_moe.Buffer(None, 4, 16, 4, 2).destroy()"
    environment = os.environ | {"DEEPEP_MOE_LOG": level, "RANK": "0"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert ("INFO rank 0 deepep_moe: " in done.stderr and "backend shm" in done.stderr) is shown, done.stderr


def test_a_level_that_is_none(monkeypatch):
    monkeypatch.setenv("DEEPEP_MOE_LOG", "loud")
    with pytest.raises(ValueError, match="^environment variable DEEPEP_MOE_LOG='loud' is no level; unset it or give one of debug, info, "):
        deepep_moe.config.log_level()
    monkeypatch.delenv("DEEPEP_MOE_LOG")
    assert deepep_moe.config.log_level() is None


# ---- modules on demand ----


def built_with(monkeypatch, tmp_path, capsys, code: int, says: str, *arguments: str) -> tuple[int, str]:
    """What `python -m deepep_moe.build` does where pip says this and makes no wheel."""
    (tmp_path / "sources").mkdir(exist_ok=True)
    (tmp_path / "sources" / "setup.py").touch()
    monkeypatch.setattr(build, "PACKAGE", tmp_path)
    monkeypatch.setattr(
        build.subprocess, "run", lambda command, **how: SimpleNamespace(returncode=code, stdout="" if "-P" in command else says)
    )
    return build.main(list(arguments)), capsys.readouterr().out


def test_modules_that_cannot_be_built(monkeypatch, tmp_path, capsys):
    says = "Building\n  deepep_moe: PyTorch or nvcc not found, building without deepep_moe._torch\nmore\n"
    code, told = built_with(monkeypatch, tmp_path, capsys, 0, says, "_torch")
    assert code == 1 and "_torch: not built, see above" in told and "more" not in told
    assert "\ndeepep_moe: PyTorch or nvcc not found, building without deepep_moe._torch\n" in told
    code, told = built_with(monkeypatch, tmp_path, capsys, 1, "no network\n")
    assert code == 1 and "\nno network\n" in told and "_nvshmem: not built" in told


def test_clones_and_wrong_names_are_refused(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(build, "PACKAGE", tmp_path / "deepep_moe")
    for arguments, told in ((["_triton"], "no module _triton; choose from _torch, _nvshmem"), ([], "is a clone, which builds all modules")):
        with pytest.raises(SystemExit):
            build.main(arguments)
        assert told in capsys.readouterr().err
