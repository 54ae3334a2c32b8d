"""What the library's native modules can do here."""

from deepep_moe.doctor.environment import Environment
from deepep_moe.doctor.findings import Finding, absent, fault, late, ok, warning

_AGAIN = "pip install --force-reinstall --no-deps --no-build-isolation deepep_moe"


def library(env: Environment) -> Finding:
    """The library imports."""
    features = env.library.get("features")
    if features is None:
        if "torch" not in env.library:
            return absent("deepep_moe", "not looked at, as PyTorch does not import")
        if env.library["late"]:
            return late("deepep_moe", "its import", env.library["error"])
        return fault("deepep_moe", f"it does not import: {env.library['error']}", f"build it again: {_AGAIN}")
    return ok("deepep_moe", f"{features['version']}, built with gcc {features['compiler']}")


def nvcc(env: Environment) -> str | None:
    """Return where nvcc is, looked for as the build does: CUDA_HOME, the path, the usual place. None where it is nowhere."""
    home = env.variables.get("CUDA_HOME")
    if home and env.exists(f"{home}/bin/nvcc".lstrip("/")):
        return f"{home}/bin/nvcc"
    return env.which("nvcc") or ("/usr/local/cuda/bin/nvcc" if env.exists("usr/local/cuda/bin/nvcc") else None)


def gpu_kernels(env: Environment) -> Finding:
    """The backends for GPUs are compiled, where there are GPUs."""
    features = env.library.get("features")
    if features is None:
        return absent("GPU kernels", "not looked at, as deepep_moe does not import")
    if features["nvlink"]:
        return ok("GPU kernels", "compiled")
    if not env.cuda.gpus:
        return absent("GPU kernels", "not compiled; there is no GPU either")
    text = f"{len(env.cuda.gpus)} GPUs are here, and deepep_moe was built without nvcc, so it has no kernels for them"
    if nvcc(env) is None:
        return fault("GPU kernels", text, f"install the CUDA toolkit 12 or newer, set CUDA_HOME, then {_AGAIN}")
    return fault("GPU kernels", text, f"nvcc is here now: {_AGAIN}")


def torch_module(env: Environment) -> Finding:
    """The module that links PyTorch is there, and of this PyTorch."""
    features = env.library.get("features")
    if features is None:
        return absent("calls in C++", "not looked at, as deepep_moe does not import")
    why = features["autograd"]
    if why is True:
        return ok("calls in C++", "built for this PyTorch")
    if why.startswith("not built") and not env.cuda.gpus:
        return absent("calls in C++", "not built; Python makes the calls, with the same bits")
    advice = "python -m deepep_moe.build _torch"
    reason = why.partition("; ")[0]
    if why.startswith("not built"):
        return warning("calls in C++", "deepep_moe._torch is not built, so the host needs longer for a call", advice)
    return fault("calls in C++", f"deepep_moe._torch is {reason}", advice)
