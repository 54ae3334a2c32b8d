"""`import deep_ep` finds deepep_moe after install(), under the runner and with the distribution, and never otherwise."""

import shutil
import zipfile

from scripts import ROOT, run_python

DISTRIBUTION = ROOT / "distributions" / "deepep-moe-compat"
USE = """
import importlib.util, sys
assert importlib.util.find_spec("deep_ep") is not None
import deep_ep, deep_ep.utils
from deep_ep import Buffer, Config, EventOverlap, topk_idx_t
from deep_ep.utils import EventHandle, EventOverlap as SameEventOverlap
import deepep_moe.compat.deep_ep as ours
assert deep_ep is ours and Buffer is ours.Buffer and EventOverlap is SameEventOverlap
assert sys.modules["deep_ep.buffer"].Buffer is Buffer and EventOverlap(EventHandle()).event is not None
print("ran", *sys.argv[1:])
"""


def test_not_by_itself():
    assert run_python("-c", "import deepep_moe.compat.deep_ep, sys; print('deep_ep' in sys.modules)").stdout == "False\n"


# Every name of DeepEP 2.1's package and of its modules for users, of its branch hybrid-ep, and of 2.5.
NAMES = {
    "deep_ep": "Buffer Config EPBuffer EPHandle ElasticBuffer EventHandle EventOverlap HybridEPBuffer __version__ get_logical_domain_size "
    "get_physical_domain_size topk_idx_t",
    "deep_ep.buffer": "Buffer",
    "deep_ep.buffers": "",
    "deep_ep.buffers.elastic": "EPHandle ElasticBuffer EventHandle EventOverlap",
    "deep_ep.buffers.legacy": "Buffer Config EventHandle EventOverlap",
    "deep_ep.comm": "get_logical_domain_size get_physical_domain_size",
    "deep_ep.hybrid_ep_buffer": "HybridEPBuffer indices_to_map",
    "deep_ep.utils": "EventHandle EventOverlap",
    "deep_ep.utils.envs": "check_nvlink_connections check_torch_deterministic get_logical_domain_size get_physical_domain_size",
    "deep_ep.utils.event": "EventHandle EventOverlap",
}
FIND = """
from deepep_moe.compat.deep_ep import install; install(); install()
import importlib, sys
for module, names in NAMES.items():
    there = importlib.import_module(module)
    assert sys.modules[module] is there
    for name in names.split():
        assert getattr(there, name) is not None, (module, name)
import deep_ep, deep_ep.buffers.legacy
assert deep_ep.buffers.legacy.Buffer is deep_ep.Buffer and tuple(map(int, deep_ep.__version__.split("."))) == (2, 1, 0)
deep_ep.utils.envs.check_torch_deterministic(), deep_ep.utils.envs.check_nvlink_connections(None)
"""


def test_install():
    assert run_python("-c", f"NAMES = {NAMES!r}" + FIND + USE, "now").stdout == "ran now\n"


def test_install_after_another(tmp_path):
    (tmp_path / "deep_ep.py").write_text("")
    code = "import deep_ep\nfrom deepep_moe.compat.deep_ep import install\ninstall()"
    error = run_python("-c", code, code=1, PYTHONPATH=f"{tmp_path}:{ROOT}").stderr
    assert f"ImportError: deep_ep was already imported, from {tmp_path / 'deep_ep.py'}; call deepep_moe.compat.deep_ep.install()" in error


def test_runner(tmp_path):
    (tmp_path / "beside.py").write_text("")
    script = tmp_path / "use.py"
    script.write_text(USE + "import beside\nassert __name__ == '__main__'")
    assert run_python("-m", "deepep_moe.compat.run", script, "--an", "argument").stdout == "ran --an argument\n"
    assert run_python("-m", "deepep_moe.compat.run", "-m", "use", "word", PYTHONPATH=f"{tmp_path}:{ROOT}").stdout == "ran word\n"
    assert "deepep_moe.compat.run: no such script: 'nowhere.py'" in run_python("-m", "deepep_moe.compat.run", "nowhere.py", code=1).stderr


def test_distribution(tmp_path):
    source = tmp_path / "source"  # a build leaves folders beside the sources
    shutil.copytree(DISTRIBUTION, source, ignore=shutil.ignore_patterns("build", "*.egg-info", "__pycache__"))
    command = ["-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "--disable-pip-version-check", "-w", tmp_path, source]
    error = run_python(*command).stderr
    (wheel,) = tmp_path.glob("deepep_moe_compat-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
        assert "deep_ep/__init__.py" in archive.namelist(), error
        (metadata,) = [archive.read(name).decode() for name in archive.namelist() if name.endswith("METADATA")]
    version = (ROOT / "pyproject.toml").read_text().split('\nversion = "')[1].split('"')[0]
    assert f"Version: {version}\n" in metadata and f"Requires-Dist: deepep-moe=={version}\n" in metadata
    without_the_check = USE.replace("importlib.util.find_spec", "bool")  # as the import is the first to find it
    assert run_python("-c", without_the_check, "installed", PYTHONPATH=f"{tmp_path / 'site'}:{ROOT}").stdout == "ran installed\n"
