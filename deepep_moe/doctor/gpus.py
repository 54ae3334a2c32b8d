"""GPUs: what they are, who reaches whom."""

import itertools

from deepep_moe.doctor.base import ABSENT, FAULT, OK, WARNING, Environment, check

_LEAST_CAPABILITY = [8, 0]  # docs/install.md


@check("GPUs", "torch")
def gpus(env: Environment) -> tuple[str, ...]:
    """PyTorch sees GPUs, and all are new enough. Its message says it where the driver is missing or too old."""
    if "cuda" not in env.facts:
        return FAULT, f"looking at them ended or held up the process: {env.facts['error']}", "see whether nvidia-smi works"
    cards, visible, error = len(env.machine.gpus), env.variables.get("CUDA_VISIBLE_DEVICES"), env.facts["cuda"]["error"]
    if not env.gpus and not cards:
        return ABSENT, error or "there is none"
    if not env.facts["torch"]["cuda"]:
        return FAULT, f"PyTorch is built without CUDA, and the machine has {cards} GPUs", "install a PyTorch for CUDA (https://pytorch.org)"
    if not env.gpus and visible is not None and "No CUDA GPUs" in error:
        return WARNING, f"CUDA_VISIBLE_DEVICES={visible!r} hides {cards} GPUs", "unset it, or list the GPUs to use"
    if not env.gpus:
        advice = "see whether nvidia-smi works; if not, install or update the NVIDIA driver; in containers, --gpus all"
        return FAULT, f"the machine has {cards} NVIDIA GPUs, and PyTorch sees none: {error}", advice
    if old := [f"{index} ({gpu['name']})" for index, gpu in enumerate(env.gpus) if gpu["capability"] < _LEAST_CAPABILITY]:
        return FAULT, f"GPU {', '.join(old)} is older than compute capability 8.0", "hide it by CUDA_VISIBLE_DEVICES"
    names = [gpu["name"] for gpu in env.gpus]
    return OK, ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))


@check("peer access", "GPUs")
def peer_access(env: Environment) -> tuple[str, ...]:
    """Every GPU can map the memory of every other one, over NVLink."""
    pairs = list(itertools.permutations(range(len(env.gpus)), 2))
    if not pairs:
        return ABSENT, "one GPU; it takes two"
    if cut := [f"{first}-{second}" for first, second in pairs if [first, second] not in env.facts["cuda"]["reach"]]:
        advice = "choose GPUs that can by CUDA_VISIBLE_DEVICES; in virtual machines switch off ACS and the IOMMU"
        return FAULT, f"GPUs {', '.join(cut[:4])} of {len(cut)} pairs cannot map each other's memory, so 'nvlink' cannot serve them", advice
    if slow := [f"{first}-{second}" for first, second in pairs if [first, second] not in env.facts["cuda"]["atomics"]]:
        advice = "LowLatencyBuffer refuses them and Buffer is slow; choose GPUs with NVLink between them"
        return WARNING, f"GPUs {', '.join(slow[:4])} of {len(slow)} pairs reach each other without NVLink (no atomics)", advice
    return OK, f"all {len(pairs)} pairs, over NVLink"
