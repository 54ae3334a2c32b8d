"""The rooms of the project, which way their arrows point, and how large they are; docs/design has the picture."""

import ast
import re
from pathlib import Path

import pytest
import rooms
from scripts import ROOT, run_python
from size import LIMITS, SOURCES, files, sizes

from deepep_moe import nvshmem_module

# A room may import itself and those after it, but not the one beside it.
PYTHON_ROOMS = [
    ("examples", "benchmarks"), ("deepep_moe.tune",), ("deepep_moe.build", "deepep_moe.doctor", "deepep_moe.launch"),
    ("deepep_moe.integrations", "deepep_moe.compat"), ("deepep_moe.nn",), ("deepep_moe.exchange", "deepep_moe.low_latency"),
    ("deepep_moe.ops",), ("deepep_moe.group", "deepep_moe.topology", "deepep_moe.tuning"),
]  # fmt: skip
# Every room may import these, and they import nothing but each other.
FOUNDATION = {
    "_C", "__main__", "arguments", "command", "config", "device", "errors", "event", "features", "host_pool", "installed", "library",
    "nvshmem_module", "torch_module", "worker",
}  # fmt: skip
APART = ("deepep_moe.reference", "deepep_moe.testing")
CPP_ROOMS = {  # what each may include
    "common": {"common"},
    "cpu": {"common", "cpu"},
    "cuda": {"common", "cuda"},
    "runtime": {"common", "cpu", "cuda", "runtime"},
    "bindings": {"common", "cpu", "cuda", "runtime", "bindings"},
    "torch": {"common", "cuda", "runtime", "torch"},
    "nvshmem": {"common", "cuda", "nvshmem"},
}


ROOM = 1.03  # over the limits of sizes


def test_page_lists_every_folder_and_file():
    listed = rooms.rows(rooms.PAGE.read_text())
    assert {folder: files for folder, (_, files) in listed.items()} == rooms.rooms(), "run python tests/structure/rooms.py"
    assert not [folder for folder, (holds, _) in listed.items() if not holds.strip()], "say what they hold"


@pytest.mark.parametrize("name", LIMITS)
def test_size_is_within_its_limit(name):
    size = sizes()[name]
    assert size <= ROOM * LIMITS[name], f"{name}: {size}; delete some, or raise the limit in tests/structure/size.py"


def test_an_argument_of_combine_touches_few_files():
    paths = [path for folder in ("deepep_moe", "csrc", "integrations") for path in files(folder, SOURCES)]
    touched = [path for path in paths if "sums_lanes" in path.read_text()]
    assert len(touched) <= 6, f"docs/design/autograd.md counts 6, and these are {len(touched)}: {touched}"


def is_in(module: str, room: str) -> bool:
    return module == room or module.startswith(room + ".")


def place_of(module: str) -> tuple[int, str] | None:
    """The floor and the room."""
    places = [(floor, room) for floor, rooms in enumerate(PYTHON_ROOMS) for room in rooms if is_in(module, room)]
    return places[0] if places else None


def python_modules():
    folders = {"deepep_moe": "deepep_moe", "integrations": "deepep_moe.integrations", "examples": "examples", "benchmarks": "benchmarks"}
    for folder, package in folders.items():
        for path in sorted((ROOT / folder).rglob("*.py")):
            if (folder == "deepep_moe" and "integrations" in path.parts) or path.parent.name == "plots":
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
    ours, is_foundation = place_of(module), module.removeprefix("deepep_moe.") in FOUNDATION
    known = ours is not None or is_foundation or module == "deepep_moe" or module.startswith(APART)
    assert known, f"{module} is in no room and not part of the foundation"
    for imported in imports_of(path):
        theirs = place_of(imported)
        if ours is not None and theirs is not None:
            points_down = ours[0] < theirs[0] or ours == theirs
            assert points_down, f"{module} imports {imported}: the arrow points the wrong way"
        if is_foundation and imported.startswith("deepep_moe."):
            assert imported.split(".")[1] in FOUNDATION, f"{module} is part of the foundation and imports {imported}"
        if module.startswith(("examples", "benchmarks")):
            continue
        if imported.startswith(APART):
            computes_by_reference = module in ("deepep_moe.ops.copies", "deepep_moe.ops.gate_operators")
            may_compare = module.startswith((*APART, "deepep_moe.doctor", "deepep_moe.tune"))
            assert computes_by_reference or may_compare, f"{module} imports {imported}"
        foreign = {"megatron", "deepspeed", "transformer_engine", "apex", "nvidia"}
        if imported.split(".")[0] in foreign:
            assert module.startswith("deepep_moe.integrations"), f"{module} imports {imported}; frameworks live in integrations"


def test_cpp_arrows():
    for path in (path for path in (ROOT / "csrc").rglob("*.*") if path.is_file()):
        room = path.relative_to(ROOT / "csrc").parts[0]
        included = {Path(name).parts for name in re.findall(r'#include "([^"]+)"', path.read_text())}
        for parts in included:
            assert len(parts) > 1 and parts[0] in CPP_ROOMS[room], f"{path} includes {'/'.join(parts)}"
        if room == "runtime" and path.parent.name != "runtime":  # the sides of the runtime do not know each other
            others = {parts for parts in included if parts[0] == "runtime" and len(parts) > 2 and parts[1] != path.parent.name}
            assert not others, f"{path} includes {others}"
        if room not in ("bindings", "torch") and path.relative_to(ROOT / "csrc") != Path("nvshmem/module.cpp"):
            assert "pybind11" not in path.read_text(), f"{path}: pybind11 belongs to bindings"
        if room != "nvshmem" or path.suffix not in (".cpp", ".cu"):
            assert not re.search(r"#include <nvshmem", path.read_text()), f"{path}: NVSHMEM belongs to sources of csrc/nvshmem"
        if room != "torch":
            assert not re.search(r"#include <(torch|ATen|c10)/", path.read_text()), f"{path}: PyTorch belongs to csrc/torch"


def test_only_config_reads_the_environment():
    for path, module in python_modules():
        # The launcher prepares the environment of the ranks it starts, and so do programs that start some. Another one reports it.
        starters = ("deepep_moe.testing.launch", "examples.megatron.train", "examples.deepspeed.train", "benchmarks.layers.trainer")
        if module not in ("deepep_moe.config", *starters, "examples.cluster.environment"):
            assert "os.environ" not in path.read_text() and "getenv" not in path.read_text(), f"{module} reads the environment"


def test_import_brings_no_framework():
    code = (
        "import sys, deepep_moe; deepep_moe.features(); rooms = ('megatron', 'deepspeed', 'nvshmem', 'transformers'); "
        "print([m for m in sys.modules if m.split('.')[0] in rooms or m in ('deepep_moe._nvshmem', 'deepep_moe.group.nvshmem_world')])"
    )
    assert run_python("-c", code).stdout.strip() == "[]"


@pytest.mark.skipif(not nvshmem_module.is_built(), reason="deepep_moe._nvshmem is not built")
def test_stub_of_nvshmem():
    module = nvshmem_module.load()
    assert not isinstance(module, str), module
    stub = ast.parse((ROOT / "deepep_moe" / "_nvshmem.pyi").read_text())
    typed = {node.name: [argument.arg for argument in node.args.args] for node in stub.body if isinstance(node, ast.FunctionDef)}
    constants = {node.target.id for node in stub.body if isinstance(node, ast.AnnAssign)}
    assert typed.keys() | constants == {name for name in dir(module) if not name.startswith("__")}
    for name, arguments in typed.items():  # pybind11 writes a signature into the first line of the docstring
        signature = getattr(module, name).__doc__.split("\n")[0]
        assert re.findall(r"(\w+): ", signature) == arguments, signature


def test_stub_names_what_the_module_has():
    from deepep_moe import _C

    stub = ast.parse((ROOT / "deepep_moe" / "_C.pyi").read_text())
    typed = {node.name for node in stub.body if isinstance(node, (ast.ClassDef, ast.FunctionDef)) and not node.name.startswith("_")}
    classes = {node.name: node for node in stub.body if isinstance(node, ast.ClassDef)}
    typed |= {node.target.id for node in stub.body if isinstance(node, ast.AnnAssign)}
    gpu_only = {name for name in typed if name.lower().startswith(("gpu", "max_gpu", "nvlink", "shim"))}
    if not _C.build_info()["nvlink"]:
        typed -= gpu_only
    present = {name for name in dir(_C) if not name.startswith("__")} | {"__version__"}
    assert typed == present
    for node in stub.body:
        if isinstance(node, ast.ClassDef) and node.name in present:
            bodies = [*node.body, *(m for base in node.bases for m in classes[base.id].body)]
            members = {m.target.id if isinstance(m, ast.AnnAssign) else m.name for m in bodies if not isinstance(m, ast.Expr)}
            members = {name for name in members if not name.startswith("_")}
            there = {name for name in vars(getattr(_C, node.name)) if not name.startswith("_")}
            assert members <= there, f"{node.name}: {members - there} are not in the module"
            unknown = {n for n in there - members if n not in ("name", "value", "mro")}
            assert not unknown, f"{node.name}: {unknown} are not in the stub"
