"""Checks whether this installation can work, with one sentence for each way in which it cannot. `import deepep_moe` calls it first."""

import importlib
import re
import sys
from pathlib import Path

TORCH = ((2, 6), (2, 16))
"""Versions of PyTorch: from, and the first that is too new. pyproject.toml has the same."""

BUILD_AGAIN = "in a clone: pip install --force-reinstall --no-deps --no-build-isolation ."

_PACKAGE = Path(__file__).parent


def without_nvcc(missing: str) -> str:
    """Return why a build without nvcc has nothing of what is `missing`, and what to do."""
    return f"deepep_moe was built without nvcc, so it has no {missing}; install the CUDA toolkit 12 or newer, then {BUILD_AGAIN}"


def wanted_torch() -> str:
    """Return what pip is to install."""
    return "torch>={}.{},<{}.{}".format(*TORCH[0], *TORCH[1])


def numbers(version: str) -> tuple[int, ...]:
    """Return the leading numbers of a version: (2, 13, 0) of "2.13.0+cu130"."""
    match = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(map(int, match[0].split("."))) if match else ()


def check_torch() -> str:
    """Return a warning, or "", of the PyTorch that is installed. Raises ImportError without one, and for one that is too old."""
    advice = f"{sys.executable} -m pip install '{wanted_torch()}'"
    try:
        version = importlib.import_module("torch").__version__
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise ModuleNotFoundError(f"deepep_moe needs PyTorch, which {sys.executable} does not have; {advice}", name="torch") from None
    found = numbers(str(version))[:2]
    reason = f"deepep_moe is made for PyTorch {'.'.join(map(str, TORCH[0]))} to {TORCH[1][0]}.{TORCH[1][1] - 1}, and {version} is installed"
    if found < TORCH[0]:
        raise ImportError(f"{reason}; {advice}")
    return "" if found < TORCH[1] else f"{reason}; where something fails, {advice}"


def why_not_built(package: Path = _PACKAGE) -> str:
    """Return why `package` has no `_C` for this Python."""
    this = f"{sys.version_info.major}.{sys.version_info.minor}"
    built_for = [match[1] for path in package.glob("_C.*.so") if (match := re.search(r"cpython-3(\d+)", path.name))]
    if built_for:
        others = ", ".join(f"3.{minor}" for minor in sorted(built_for, key=int))
        return f"deepep_moe in {package} was built for Python {others}, and this is Python {this}; install it with {sys.executable} -m pip"
    return (
        f"{package} holds the sources, where deepep_moe._C is not built: start Python in another folder than the clone's, or install "
        "with pip install -e ."
    )


def other_copies(package: Path = _PACKAGE) -> str:
    """Return a warning, or "", of other copies on the path: which is imported depends on the folder that Python starts in."""
    folders = dict.fromkeys(Path(entry or ".").resolve() / "deepep_moe" for entry in sys.path)
    others = [str(folder) for folder in folders if folder != package.resolve() and (folder / "_C.pyi").is_file()]
    if not others:
        return ""
    return f"{package} is imported, and sys.path has another deepep_moe in {', '.join(others)}; remove one (pip uninstall deepep-moe)"
