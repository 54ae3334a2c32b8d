"""Installations that cannot work say so in one sentence, with what to do."""

import os
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pybind11
import pytest
from scripts import ROOT

import deepep_moe
from deepep_moe import build, installed

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


COMPILER = """#!/bin/bash
[ "$1" = -dumpversion ] && echo 12 && exit
echo "$*" >>"$CALLS"
while [ $# -gt 0 ]; do [ "$1" = -o ] && out=$2; [ "$1" = -c ] && source=$2; shift; done
touch "$out"; [ -z "$source" ] || echo "$out: $source" >"${out%.o}.d"
"""


def test_objects_stay(tmp_path):
    """The second build compiles nothing, although pip's isolation has pybind11 in another folder; nor does a second editable install."""
    clone, calls, compiler = tmp_path / "clone", tmp_path / "calls", tmp_path / "g++"
    ignored = shutil.ignore_patterns("build", "*.so", ".*", "runs", "*.egg-info", "__pycache__", "tests", "docs", "benchmarks", "examples")
    shutil.copytree(ROOT, clone, ignore=ignored)
    compiler.write_text(COMPILER)
    compiler.chmod(0o755)
    variables = {"CC": compiler, "CXX": compiler, "CALLS": calls, "DEEPEP_MOE_CUDA": "0", "DEEPEP_MOE_MODULES": "_C"}
    numbers = []
    for number, command in enumerate(("build_ext", "build_ext", "editable_wheel", "editable_wheel")):
        isolated = tmp_path / f"isolated-{number}"
        shutil.copytree(Path(pybind11.__file__).parent, isolated / "pybind11")
        environment = os.environ | {name: str(value) for name, value in variables.items()} | {"PYTHONPATH": str(isolated)}
        arguments = ["setup.py", "-q", command, *(["--dist-dir", str(tmp_path / "dist")] if command == "editable_wheel" else [])]
        done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, cwd=clone, env=environment)
        assert done.returncode == 0, done.stderr
        numbers.append(sum(" -c " in call for call in calls.read_text().splitlines()))
    assert numbers == [numbers[0]] * 4 and numbers[0] > 10


def test_what_setup_refuses(tmp_path):
    message = setup_says("sys.version_info = (3, 10, 4, 'final', 0)")
    assert message.startswith(f"deepep_moe needs Python 3.11 or newer, and {sys.executable} is 3.10.4; ")
    assert "found no 'no-such-g++': install gcc 11" in setup_says(CXX="no-such-g++")
    compiler = tool(tmp_path, "g++-9", "9.4.0")
    assert f"needs gcc 11 or newer, and {compiler} is 9.4.0" in setup_says(CXX=str(compiler))
    assert "DEEPEP_MOE_MODULES names _triton; it takes some of _C, _torch" in setup_says(DEEPEP_MOE_MODULES="_C,_triton")


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
    with pytest.raises(SystemExit, match=f"needs CUDA 12 or newer, and {tmp_path / 'nvcc'} knows"):
        flags("80")


def test_gpus_of_a_build_that_names_none(flags):
    assert flags() == ["80,code=[sm_80]", "90a,code=[sm_90a]", "100,code=[sm_100,compute_100]"]
    assert flags("80 90", DEEPEP_MOE_ARCHITECTURES="") == ["80,code=[sm_80]", "90a,code=[sm_90a]"]
    assert flags(with_ptx=False)[-1] == "100,code=[sm_100]"


@pytest.mark.parametrize(
    ("names", "expected"),
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
def test_gpus_that_are_named(flags, names, expected):
    assert flags(DEEPEP_MOE_ARCHITECTURES=names) == flags(TORCH_CUDA_ARCH_LIST=names) == expected
    assert flags(DEEPEP_MOE_ARCHITECTURES=names, TORCH_CUDA_ARCH_LIST="8.9") == expected


def test_gpus_of_this_machine(flags, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    tool(tmp_path, "nvidia-smi", "8.9\n9.0\n9.0")
    assert flags(DEEPEP_MOE_ARCHITECTURES="native") == ["89,code=[sm_89]", "90a,code=[sm_90a]"]
    tool(tmp_path, "nvidia-smi", "No devices were found")
    with pytest.raises(SystemExit, match="native.*nvidia-smi shows no GPU"):
        flags(DEEPEP_MOE_ARCHITECTURES="native")


@pytest.mark.parametrize("names", ["9.9", "sm_", "hooper", "8.0a", "9.0f", "7.5", "8.0;9.0+SASS"])
def test_gpus_that_nvcc_does_not_know(flags, names):
    with pytest.raises(SystemExit) as error:
        flags(DEEPEP_MOE_ARCHITECTURES=names)
    assert f"{names.split(';')[-1]} of DEEPEP_MOE_ARCHITECTURES: " in str(error.value) and "knows 8.0, 8.6, 8.9, 9.0" in str(error.value)


def test_older_gpus_of_pytorch_are_left_out(flags):
    assert flags(TORCH_CUDA_ARCH_LIST="5.2 7.5 8.0") == ["80,code=[sm_80]"]
    with pytest.raises(SystemExit, match=r"TORCH_CUDA_ARCH_LIST='Volta;7\.5'.*8\.0 or newer"):
        flags(TORCH_CUDA_ARCH_LIST="Volta;7.5")


def test_torch_outside_the_range(monkeypatch):
    def check(version: str) -> str:
        monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(__version__=version))
        return installed.check_torch()

    assert check("2.6.0") == check("2.15.1+cu130") == ""
    assert "PyTorch 2.6 to 2.15, and 2.16.0a0+git1 is installed" in check("2.16.0a0+git1")
    with pytest.raises(ImportError, match=r"and 2\.5\.1\+cu121 is installed; .*pip install 'torch>=2\.6,<2\.16'"):
        check("2.5.1+cu121")
    assert f'"{installed.wanted_torch()}"' in (ROOT / "pyproject.toml").read_text()


def test_no_torch(monkeypatch):
    """Errors of PyTorch's own import keep PyTorch's message."""
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(ModuleNotFoundError, match="^deepep_moe needs PyTorch, .* -m pip install 'torch>=2.6,<2.16'$"):
        installed.check_torch()

    def without_filelock(name: str) -> ModuleType:
        raise ModuleNotFoundError("No module named 'filelock'", name="filelock")

    monkeypatch.setattr(installed.importlib, "import_module", without_filelock)
    with pytest.raises(ModuleNotFoundError, match="^No module named 'filelock'$"):
        installed.check_torch()


def test_module_of_another_python(tmp_path):
    for python in ("39", "310"):
        (tmp_path / f"_C.cpython-{python}-x86_64-linux-gnu.so").touch()
    assert f"deepep_moe in {tmp_path} was built for Python 3.9, 3.10, and this is Python 3.1" in installed.why_not_built(tmp_path)
    assert installed.why_not_built(tmp_path / "elsewhere").startswith(f"{tmp_path / 'elsewhere'} holds the sources")


def test_sources_that_hide_what_was_installed(tmp_path):
    """`import deepep_moe` in the folder of a clone that was not built there."""
    package = tmp_path / "deepep_moe"
    package.mkdir()
    for path in PACKAGE.glob("*.py"):
        (package / path.name).write_text(path.read_text())
    hidden = "sys.meta_path[:] = [finder for finder in sys.meta_path if 'editable' not in finder.__module__]"  # where it was installed
    done = subprocess.run([sys.executable, "-c", f"import sys; {hidden}; import deepep_moe"], capture_output=True, text=True, cwd=tmp_path)
    assert done.stderr.splitlines()[-1].startswith(f"ModuleNotFoundError: {package} holds the sources")


def test_two_copies_on_the_path(monkeypatch, tmp_path):
    assert installed.other_copies() == "", sys.path
    other = tmp_path / "deepep_moe"
    other.mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    assert installed.other_copies() == "", "a folder of this name alone is none"
    (other / "_C.pyi").touch()
    message = f"{PACKAGE} is imported, and sys.path has another deepep_moe in {other}"
    assert message in installed.other_copies()
    code = f"import sys; sys.path.append({str(tmp_path)!r}); import deepep_moe"
    assert message in subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stderr


# ---- messages ----


@pytest.mark.parametrize(("level", "shown"), [("info", True), ("ERROR", False)])
def test_one_switch_for_messages(level, shown):
    code = "import deepep_moe; deepep_moe.Buffer(None, 4, 16, 4, 2).destroy()"
    environment = os.environ | {"DEEPEP_MOE_LOG": level, "RANK": "0"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert ("INFO rank 0 deepep_moe: " in done.stderr and "backend shm" in done.stderr) is shown, done.stderr


def test_a_level_that_is_none(monkeypatch):
    monkeypatch.setenv("DEEPEP_MOE_LOG", "loud")
    with pytest.raises(ValueError, match="^environment variable DEEPEP_MOE_LOG='loud' is no level"):
        deepep_moe.config.log_level()
    monkeypatch.delenv("DEEPEP_MOE_LOG")
    assert deepep_moe.config.log_level() is None


# ---- modules on demand ----


@pytest.mark.parametrize(("code", "named", "failed"), [(0, ["_torch"], "_torch"), (1, [], "_nvshmem")])
def test_modules_that_cannot_be_built(monkeypatch, tmp_path, capsys, code, named, failed):
    """pip says why and makes no wheel, or fails."""
    says = "deepep_moe: PyTorch or nvcc not found, building without deepep_moe._torch" if code == 0 else "no network"
    output = f"Building\n  {says}\nmore\n" if code == 0 else f"{says}\n"
    (tmp_path / "sources").mkdir()
    (tmp_path / "sources" / "setup.py").touch()
    monkeypatch.setattr(build, "PACKAGE", tmp_path)
    monkeypatch.setattr(build._C, "build_info", lambda: {"nvlink": True})
    monkeypatch.setattr(
        build.subprocess, "run", lambda command, **how: SimpleNamespace(returncode=code, stdout="" if "-P" in command else output)
    )
    assert build.main(named) == 1
    printed = capsys.readouterr().out
    assert f"{failed}: not built, see above" in printed and f"\n{says}\n" in printed and "more" not in printed


def test_clones_are_refused(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(build, "PACKAGE", tmp_path / "deepep_moe")
    with pytest.raises(SystemExit):
        build.main([])
    assert "is a clone, which builds all modules" in capsys.readouterr().err
