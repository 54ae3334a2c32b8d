"""Versions, and pairs of them that do not work together."""

import re
import sys
from concurrent.futures import ThreadPoolExecutor

from deepep_moe import installed
from deepep_moe.doctor.environment import Environment
from deepep_moe.doctor.findings import Finding, absent, fault, late, ok, warning

_PYTHON = (3, 11)
_LEAST_DRIVER = {12: "525", 13: "580"}  # of CUDA's release notes, by major version
_INTEGRATIONS = (  # package, module, from, first that is too new: as pyproject.toml has them
    ("megatron-core", "megatron.core", (0, 13), (0, 20)),
    ("deepspeed", "deepspeed", (0, 14, 5), (0, 20)),
    ("transformer-engine", "transformer_engine.pytorch", None, None),
)
_FUSED = (  # package, what it has, modules to import: extensions need PyTorch's libraries first
    ("apex", "FusedAdam of apex", "torch, amp_C, apex.optimizers.fused_adam"),
    ("transformer-engine", "FusedAdam of transformer-engine", "transformer_engine.pytorch.optimizers.fused_adam"),
    ("apex", "fused_weight_gradient_mlp_cuda", "torch, fused_weight_gradient_mlp_cuda"),
)


def numbers(version: str) -> tuple[int, ...]:
    """Return the leading numbers of a version: (2, 13, 0) of "2.13.0+cu130"."""
    found = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(map(int, found[0].split("."))) if found else ()


def dotted(version: tuple[int, ...] | list[int]) -> str:
    return ".".join(map(str, version))


def python(env: Environment) -> Finding:
    version = sys.version_info[:3]
    if version < _PYTHON:
        return fault("Python", f"Python {dotted(version)} runs", f"use Python {dotted(_PYTHON)} or newer")
    return ok("Python", dotted(version))


def torch(env: Environment) -> Finding:
    """PyTorch imports, and is of a version that the library was made for."""
    wanted = f"pip install '{installed.wanted_torch()}'"
    if "torch" not in env.library:
        if env.library["late"]:
            return late("PyTorch", "its import", env.library["error"])
        return fault("PyTorch", f"it does not import: {env.library['error']}", wanted)
    version = env.library["torch"]["version"]
    if not installed.TORCH[0] <= numbers(version)[:2] < installed.TORCH[1]:
        return fault("PyTorch", f"version {version} is installed", wanted)
    return ok("PyTorch", f"{version}, {'CUDA ' + env.library['torch']['cuda'] if env.library['torch']['cuda'] else 'without CUDA'}")


def driver(env: Environment) -> Finding:
    """The driver serves PyTorch's CUDA. Within a major version of CUDA every driver of that major version does."""
    cuda, torch = env.cuda, env.library.get("torch")
    needs = numbers(torch["cuda"]) if torch and torch["cuda"] else None
    if cuda.driver == (0, 0):
        return absent("CUDA driver", cuda.error)
    has = dotted(cuda.driver)
    if torch and needs is None and cuda.gpus:
        return fault(
            "CUDA driver",
            f"the driver serves CUDA {has}, and PyTorch {torch['version']} is built without CUDA",
            f"install a PyTorch for CUDA {cuda.driver[0]} (https://pytorch.org/get-started/locally)",
        )
    if needs and torch and needs[0] > cuda.driver[0]:
        least = _LEAST_DRIVER.get(needs[0], "of that CUDA version")
        return fault(
            "CUDA driver",
            f"the driver serves CUDA {has}, and PyTorch {torch['version']} needs CUDA {torch['cuda']}",
            f"update the NVIDIA driver to {least} or newer, or install a PyTorch for CUDA {cuda.driver[0]}",
        )
    version = re.search(r"Kernel Module\s+(?:for \S+\s+)?([\d.]+)", env.read("proc/driver/nvidia/version"))
    return ok("CUDA driver", f"{version[1] if version else 'of unknown version'}, serves CUDA {has}")


def nvidia_packages(env: Environment) -> Finding:
    """NCCL and NVSHMEM are packages of PyTorch's major version of CUDA."""
    torch = env.library.get("torch")
    if not torch or not torch["cuda"]:
        return absent("NCCL", "PyTorch is built without CUDA" if torch else "PyTorch does not import")
    major = numbers(torch["cuda"])[0]
    for name in ("nccl", "nvshmem"):
        for other in {12, 13} - {major}:
            package = f"nvidia-{name}-cu{other}"
            if version := env.version(package):
                return warning(
                    "NCCL",
                    f"{package} {version} is installed, and PyTorch {torch['version']} is for CUDA {major}",
                    f"pip uninstall {package}, then pip install --force-reinstall nvidia-{name}-cu{major}",
                )
    return ok("NCCL", f"{torch['nccl'] or 'not in this PyTorch'}, of PyTorch")


def nvshmem(env: Environment) -> Finding:
    """The module `_nvshmem` is built, loads, and finds the major and minor version of NVSHMEM that it was built for."""
    features, told = env.library.get("features"), env.library.get("nvshmem")
    if features is None or not features["nvshmem"]:
        return absent("NVSHMEM", "the module deepep_moe._nvshmem is not built; only GPUs of several hosts need it (docs/install.md)")
    if told is None:
        return fault("NVSHMEM", f"loading it ended the process: {env.library['error']}", "install NVSHMEM and deepep_moe again")
    built, found = told["built"], told["found"]
    if built and built[:2] != found[:2]:
        return fault(
            "NVSHMEM",
            f"deepep_moe._nvshmem was built for NVSHMEM {dotted(built)}, and NVSHMEM {dotted(found)} is loaded",
            f"install NVSHMEM {dotted(built[:2])}, or build deepep_moe again for this one",
        )
    if told["error"]:
        return fault("NVSHMEM", *_parted(told["error"]))
    return ok("NVSHMEM", f"{dotted(found)}, built for {dotted(built)}")


def _parted(message: str) -> tuple[str, str]:
    """Part a message of the library, "what is wrong; what to do"."""
    wrong, _, advice = message.partition("; ")
    return wrong, advice or "install deepep_moe again"


def integrations(env: Environment) -> list[Finding]:
    """Each package that the library works with imports, and is of a version that it was made for."""
    with ThreadPoolExecutor(len(_INTEGRATIONS)) as pool:
        return list(pool.map(lambda of: _integration(env, *of), _INTEGRATIONS))


def _integration(env: Environment, package: str, module: str, first: tuple[int, ...] | None, too_new: tuple[int, ...] | None) -> Finding:
    version = env.version(package)
    if version is None:
        return absent(package, "not installed")
    if first and too_new and not first <= numbers(version) < too_new:
        wanted = f"pip install '{package}>={dotted(first)},<{dotted(too_new)}'"
        return fault(package, f"version {version} is installed, and deepep_moe has no adapter for it", wanted)
    ran = env.imports(module)
    if ran.code is None:
        return late(package, f"the import of {module} {version}", ran.why())
    if ran.code:
        return fault(package, f"{module} {version} does not import: {ran.why()}", f"install what the message asks for, or {package} again")
    return ok(package, version)


def fused_kernels(env: Environment) -> Finding:
    """Say which fused parts of apex and TransformerEngine import. Megatron-Core takes those that do, and none has to be there."""
    check, versions = "fused kernels", {package: env.version(package) for package in ("apex", "transformer-engine")}
    parts = [part for part in _FUSED if versions[part[0]] is not None]
    if not parts:
        return absent(check, "neither apex nor transformer-engine is installed; nothing needs them")
    with ThreadPoolExecutor(len(parts)) as pool:
        ran = list(pool.map(lambda part: env.imports(part[2]), parts))
    text = ", ".join(f"{package} {version or 'not installed'}" for package, version in versions.items())
    for (_, name, _), found in zip(parts, ran, strict=True):
        text += f"; {name} imports" if found.code == 0 else f"; {name} does not import: {found.why()}"
    return ok(check, text)
