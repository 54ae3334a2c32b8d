"""Versions and builds of PyTorch, this library, and the packages that it works with."""

import functools
import importlib.metadata

from deepep_moe import config, installed, tuning
from deepep_moe.doctor.base import ABSENT, FAULT, OK, WARNING, Environment, check
from deepep_moe.installed import BUILD_AGAIN, numbers
from deepep_moe.nvshmem_module import dotted

_INTEGRATIONS = (  # package, from, first that is too new (as pyproject.toml has them), modules to import
    ("megatron-core", (0, 13), (0, 20), "megatron.core"),
    ("deepspeed", (0, 14, 5), (0, 20), "deepspeed"),
    ("transformer-engine", None, None, "transformer_engine.pytorch, transformer_engine.pytorch.optimizers.fused_adam"),
    ("apex", None, None, "torch, amp_C, apex.optimizers.fused_adam, fused_weight_gradient_mlp_cuda"),
)


def version_of(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


@check("PyTorch")
def torch(env: Environment) -> tuple[str, ...]:
    """PyTorch imports, and is of a version that the library was made for."""
    wanted = f"pip install '{installed.wanted_torch()}'"
    if "torch" not in env.facts:
        return FAULT, f"it does not import: {env.facts['error']}", wanted
    version, cuda = env.facts["torch"]["version"], env.facts["torch"]["cuda"]
    if not installed.TORCH[0] <= numbers(version)[:2] < installed.TORCH[1]:
        return FAULT, f"version {version} is installed", wanted
    return OK, f"{version}, {f'CUDA {cuda}' if cuda else 'without CUDA'}"


@check("deepep_moe", "cuda")
def library(env: Environment) -> tuple[str, ...]:
    """The library imports, and environment variables have values that buffers take."""
    try:
        for setting in (config.log_level, config.num_threads, config.timeout_s, tuning.load):
            setting()
    except ValueError as error:
        wrong, _, advice = str(error).partition("; ")
        return FAULT, wrong, advice
    features = env.facts.get("features")
    if features is None:
        return FAULT, f"it does not import: {env.facts['error']}", f"build it again: {BUILD_AGAIN}"
    return OK, f"{features['version']}, built with gcc {features['compiler']}"


@check("NVSHMEM", "features")
def nvshmem(env: Environment) -> tuple[str, ...]:
    """The module `_nvshmem` is built, loads, and finds the NVSHMEM that it was built for."""
    if not env.facts["features"]["nvshmem"]:
        return ABSENT, "the module deepep_moe._nvshmem is not built; only GPUs of several hosts need it (docs/install.md)"
    finding = env.facts.get("nvshmem") or f"loading it ended the process: {env.facts['error']}; install NVSHMEM and deepep_moe again"
    wrong, _, advice = finding.partition("; ")
    return (FAULT, wrong, advice) if advice else (OK, finding)


@check("GPU kernels", "features")
def gpu_kernels(env: Environment) -> tuple[str, ...]:
    """The backends for GPUs are compiled where there are GPUs, and the module that links PyTorch is of this PyTorch."""
    features = env.facts["features"]
    if not env.gpus:
        return (OK, "compiled") if features["nvlink"] else (ABSENT, "not compiled; there is no GPU either")
    if features["nvlink"]:
        why_not = features["autograd"]
        if why_not is True:
            return OK, "compiled"
        return FAULT, f"deepep_moe._torch, which buffers on GPUs need, is {why_not.partition('; ')[0]}", "deepep-moe build _torch"
    advice = f"install the CUDA toolkit 12 or newer, set CUDA_HOME, then {BUILD_AGAIN}"
    return FAULT, f"{len(env.gpus)} GPUs are here, and deepep_moe was built without nvcc, so it has no kernels for them", advice


def _integration(
    package: str, first: tuple[int, ...] | None, too_new: tuple[int, ...] | None, modules: str, env: Environment
) -> tuple[str, ...]:
    version = version_of(package)
    if version is None:
        return ABSENT, "not installed"
    if first and too_new and not first <= numbers(version) < too_new:
        wanted = f"pip install '{package}>={dotted(first)},<{dotted(too_new)}'"
        return FAULT, f"version {version} is installed, and deepep_moe has no adapter for it", wanted
    ran = env.python("-c", f"import {modules}")
    if ran.code != 0:  # packages without an adapter are optional: Megatron-Core uses those that import
        text = f"{version} does not import (import {modules}): {ran.why()}"
        return FAULT if first else WARNING, text, f"install what the message asks for, or {package} again"
    return OK, version


INTEGRATIONS = tuple(check(package[0])(functools.partial(_integration, *package)) for package in _INTEGRATIONS)
