"""The rooms of the project and which way their arrows point; docs/design.md has the picture."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# A room may import itself and what stands after it; every room may use errors, config, handle, event and the native module.
PYTHON_ROOMS = [
    "examples", "deepep_moe.bench", "deepep_moe.integrations", "deepep_moe.nn", "deepep_moe.ops", "deepep_moe.by_expert",
    "deepep_moe.telling", "deepep_moe.buffer", "deepep_moe.low_latency", "deepep_moe.torch_ops", "deepep_moe.backends",
]  # fmt: skip
FOUNDATION = {"_C", "config", "errors", "event", "handle"}
CPP_ROOMS = ["bindings", "autograd", "runtime", "cpu", "common"]
SAME_ROOM = {"cuda": "cpu", "device": "cpu"}  # beside each other: neither includes the other


def room_of(module: str) -> int | None:
    matches = [index for index, room in enumerate(PYTHON_ROOMS) if module == room or module.startswith(room + ".")]
    return matches[0] if matches else None


def python_modules():
    folders = (("deepep_moe", "deepep_moe"), ("integrations", "deepep_moe.integrations"), ("examples", "examples"))
    for folder, package in folders:
        for path in sorted((ROOT / folder).rglob("*.py")):
            if folder == "deepep_moe" and "integrations" in path.parts:
                continue
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            yield path, ".".join([package, *parts]).removesuffix(".__init__")


def imports_of(path: Path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports relative to itself; name the module in full"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize(("path", "module"), list(python_modules()), ids=lambda value: value if isinstance(value, str) else "")
def test_python_arrows(path, module):
    own = room_of(module)
    for imported in imports_of(path):
        theirs = room_of(imported)
        if own is not None and theirs is not None and module != "deepep_moe.torch_ops":
            assert own <= theirs, f"{module} imports {imported}: the arrow points the wrong way"
        name = imported.removeprefix("deepep_moe.").split(".")[0]
        if module.removeprefix("deepep_moe.") in FOUNDATION and imported.startswith("deepep_moe."):
            assert name in FOUNDATION, f"{module} is part of the foundation and imports {imported}"
        if module.startswith("examples"):
            continue
        if imported.startswith(("deepep_moe.reference", "deepep_moe.testing")):
            assert module.startswith(("deepep_moe.reference", "deepep_moe.testing", "deepep_moe.bench")), f"{module} imports {imported}"
        foreign = {"megatron", "deepspeed", "transformer_engine", "apex", "nvidia"}
        if imported.split(".")[0] in foreign:
            assert module.startswith("deepep_moe.integrations"), f"{module} imports {imported}; frameworks live in integrations"


def test_cpp_arrows():
    for path in (path for path in (ROOT / "csrc").rglob("*.*") if path.is_file()):
        own = CPP_ROOMS.index(SAME_ROOM.get(path.parent.name, path.parent.name))
        for included in re.findall(r'#include "(\w+)/', path.read_text()):
            room = path.relative_to(ROOT / "csrc").parts[0]
            assert included == room or {included, room} != {"cpu", "cuda"}, f"{path} includes {included}"
            assert own <= CPP_ROOMS.index(SAME_ROOM.get(included, included)), f"{path.name} in {path.parent.name} includes {included}"
        if path.parent.name == "autograd":  # a module of its own, which links nothing of the other
            assert set(re.findall(r'#include "(\w+)/', path.read_text())) <= {"autograd", "common"}, path
        elif path.parent.name != "bindings":
            assert "pybind11" not in path.read_text(), f"{path}: pybind11 belongs to bindings"
        if path.parent.name != "autograd":
            assert not re.search(r"#include <(torch|ATen|c10)/", path.read_text()), f"{path}: PyTorch belongs to autograd"


def test_only_config_reads_the_environment():
    for path, module in python_modules():
        # The launcher prepares the environment of the ranks it starts, and so does the example that starts some.
        if module not in ("deepep_moe.config", "deepep_moe.testing.launch", "examples.megatron.train", "examples.deepspeed.train"):
            assert "os.environ" not in path.read_text() and "getenv" not in path.read_text(), f"{module} reads the environment"


def test_import_brings_no_framework():
    code = (
        "import sys, deepep_moe; print([m for m in sys.modules if m.split('.')[0] in ('megatron', 'deepspeed', 'nvshmem', 'transformers')])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert result.stdout.strip() == "[]"


def test_stub_names_what_the_module_has():
    from deepep_moe import _C

    stub = ast.parse((ROOT / "deepep_moe" / "_C.pyi").read_text())
    typed = {node.name for node in stub.body if isinstance(node, (ast.ClassDef, ast.FunctionDef))}
    typed |= {node.target.id for node in stub.body if isinstance(node, ast.AnnAssign)}
    gpu_only = {name for name in typed if name.lower().startswith("gpu") or name.startswith("MAX_GPU")}
    if not _C.build_info()["nvlink"]:
        typed -= gpu_only
    present = {name for name in dir(_C) if not name.startswith("__")} | {"__version__"}
    assert typed == present
    for node in stub.body:
        if isinstance(node, ast.ClassDef) and node.name in present:
            members = {m.target.id if isinstance(m, ast.AnnAssign) else m.name for m in node.body if not isinstance(m, ast.Expr)}
            members = {name for name in members if not name.startswith("_")}
            there = {name for name in vars(getattr(_C, node.name)) if not name.startswith("_")}
            assert members <= there, f"{node.name}: {members - there} are not in the module"
            unknown = {n for n in there - members if n not in ("name", "value", "mro")}
            assert not unknown, f"{node.name}: {unknown} are not in the stub"
