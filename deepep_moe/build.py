"""Build the modules that a wheel leaves out, for the PyTorch and the NVSHMEM of this Python.

_torch      for buffers on GPUs; needs g++ and PyTorch 2.7 or newer
_nvshmem    for GPUs of several hosts; needs nvcc and NVSHMEM

Sources are in the wheel; pip fetches pybind11 and setuptools, unless --no-build-isolation says that they
are installed.
"""

import argparse
import importlib.metadata
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from deepep_moe import _C, config
from deepep_moe.command import Parser
from deepep_moe.installed import without_nvcc

PACKAGE = Path(__file__).parent
MODULES = ("_torch", "_nvshmem")
_SHOW = (
    "import deepep_moe; found = deepep_moe.features(); print(*(f'{name}: {found[name]}' for name in ('autograd', 'nvshmem')), sep='\\n')"
)


def build(modules: list[str], *, isolated: bool) -> tuple[list[str], str]:
    """Build `modules` and put them beside the library. Return those that were built, and what the build has said."""
    with tempfile.TemporaryDirectory(prefix="deepep_moe_build_") as folder:
        sources = shutil.copytree(PACKAGE / "sources", Path(folder) / "sources")  # pip writes beside what it builds
        command = [sys.executable, "-m", "pip", "wheel", "-v", "--no-deps", "--no-cache-dir", "--wheel-dir", folder]
        command += [str(sources), *([] if isolated else ["--no-build-isolation"])]
        environment = config.with_variables({"DEEPEP_MOE_MODULES": ",".join(modules)})
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        wheels = list(Path(folder).glob("*.whl"))
        if done.returncode or not wheels:
            return [], done.stdout
        with zipfile.ZipFile(wheels[0]) as archive:
            files = {Path(name).name: name for name in archive.namelist() if name.endswith(".so")}
            for name, member in files.items():
                unfinished = PACKAGE / f"{name}.unfinished"  # a process that has the old file loaded keeps it
                unfinished.write_bytes(archive.read(member))
                unfinished.replace(PACKAGE / name)
        _record(list(files))
        return [name.split(".")[0] for name in files], done.stdout


def _record(files: list[str]) -> None:
    """Let pip know of the files, so that it removes them with the library."""
    record = next((path for path in importlib.metadata.files("deepep-moe") or () if path.name == "RECORD"), None)
    if record is not None:
        path = Path(str(record.locate()))
        known = path.read_text()
        path.write_text(known + "".join(f"deepep_moe/{name},,\n" for name in files if f"deepep_moe/{name}," not in known))


def main(arguments: list[str]) -> int:
    """Return the exit code: 0, or 1 where a module could not be built."""
    parser = Parser("deepep-moe build", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("modules", nargs="*", metavar="MODULE", help=f"{' or '.join(MODULES)} (default: both)")
    parser.add_argument("--no-build-isolation", action="store_true", help="use the pybind11 and setuptools that are installed")
    parser.add_argument("-v", "--verbose", action="store_true", help="print what the build says")
    options = parser.parse_args(arguments)
    wanted = options.modules or list(MODULES)
    if unknown := set(wanted) - set(MODULES):
        parser.error(f"no module {', '.join(sorted(unknown))}; choose from {', '.join(MODULES)}")
    if not (PACKAGE / "sources" / "setup.py").is_file():
        parser.error(f"{PACKAGE} is a clone, which builds all modules at once: pip install --no-build-isolation -e {PACKAGE.parent}")
    if not _C.build_info()["nvlink"]:
        parser.error(without_nvcc(f"kernels, which {' and '.join(wanted)} would call"))
    print(f"building {' and '.join(wanted)} for {sys.executable}, which takes some minutes")
    built, output = build(wanted, isolated=not options.no_build_isolation)
    missing = [name for name in wanted if name not in built]
    if options.verbose:
        print(output)
    elif missing:
        lines = [line.strip() for line in output.splitlines()]
        print("\n".join([line for line in lines if line.startswith("deepep_moe")] or lines[-20:]))
    for name in wanted:
        print(f"{name}: {'built' if name in built else 'not built, see above; -v shows all that the build says'}")
    print(subprocess.run([sys.executable, "-P", "-c", _SHOW], capture_output=True, text=True, cwd=PACKAGE.parent).stdout, end="")
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
