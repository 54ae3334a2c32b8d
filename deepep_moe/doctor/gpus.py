"""GPUs: what they are, who reaches whom, MPS, clocks."""

import itertools

from deepep_moe.doctor.environment import Environment, Ran
from deepep_moe.doctor.findings import Finding, absent, fault, ok, warning

_LEAST_CAPABILITY = (8, 0)  # docs/install.md
_ENOUGH_SMS = 14  # that a call takes by default (docs/tuning.md)
_NVIDIA = "0x10de"
_NONE = "CUDA sees no GPU"
_NO_DEVICE = ("CUDA_ERROR_NO_DEVICE", "CUDA_ERROR_INVALID_DEVICE")  # what CUDA says where CUDA_VISIBLE_DEVICES leaves nothing
_SMI_REASONS = ("clocks_event_reasons", "clocks_throttle_reasons")  # the second in drivers before 535, which newer ones may drop


def gpus(env: Environment) -> Finding:
    """CUDA sees GPUs, and all are new enough."""
    found = env.cuda.gpus
    if not found:
        cards = [path for path in (env.root / "sys/bus/pci/devices").glob("*") if _is_gpu(env, path.name)]
        visible = env.variables.get("CUDA_VISIBLE_DEVICES")
        if visible is not None and cards and (not env.cuda.error or any(name in env.cuda.error for name in _NO_DEVICE)):
            return warning("GPUs", f"CUDA_VISIBLE_DEVICES={visible!r} hides {len(cards)} GPUs", "unset it, or list the GPUs to use")
        if cards:
            why = env.cuda.error or "the driver lists none"
            return fault(
                "GPUs",
                f"PCI has {len(cards)} NVIDIA GPUs, and CUDA sees none: {why}",
                "see whether nvidia-smi works; if not, install the NVIDIA driver; in containers, --gpus all",
            )
        return absent("GPUs", env.cuda.error or _NONE)
    old = [
        f"{index} ({gpu.name}, {gpu.capability[0]}.{gpu.capability[1]})"
        for index, gpu in enumerate(found)
        if gpu.capability < _LEAST_CAPABILITY
    ]
    if old:
        return fault("GPUs", f"GPU {', '.join(old)} is older than compute capability 8.0", "hide it by CUDA_VISIBLE_DEVICES")
    names = [gpu.name for gpu in found]
    return ok("GPUs", ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names)))


def _is_gpu(env: Environment, address: str) -> bool:
    folder = f"sys/bus/pci/devices/{address}"
    return env.read(f"{folder}/vendor") == _NVIDIA and env.read(f"{folder}/class").startswith("0x03")


def peer_access(env: Environment) -> Finding:
    """Every GPU can map the memory of every other one, over NVLink."""
    count = len(env.cuda.gpus)
    if count < 2:
        return absent("peer access", f"{count} GPU{'' if count == 1 else 's'}; it takes two")
    pairs = list(itertools.combinations(range(count), 2))
    if cut := [pair for pair in pairs if not {pair, pair[::-1]} <= env.cuda.reach]:
        return fault(
            "peer access",
            f"GPUs {_listed(cut)} cannot map each other's memory, so 'nvlink' cannot serve them",
            "choose GPUs that can by CUDA_VISIBLE_DEVICES; in virtual machines switch off ACS and the IOMMU; "
            "`nvidia-smi topo -p2p r` shows the pairs",
        )
    if slow := [pair for pair in pairs if not {pair, pair[::-1]} <= env.cuda.atomics]:
        return warning(
            "peer access",
            f"GPUs {_listed(slow)} reach each other without NVLink (their link has no atomics)",
            "LowLatencyBuffer refuses them and Buffer is slow; choose GPUs with NVLink between them",
        )
    return ok("peer access", f"all {len(pairs)} pairs, over NVLink")


def _listed(pairs: list[tuple[int, int]]) -> str:
    told = ", ".join(f"{first}-{second}" for first, second in pairs[:4])
    return told + (f" and {len(pairs) - 4} more pairs" if len(pairs) > 4 else "")


def ipc(env: Environment) -> Finding:
    """Two processes share memory of a GPU, as ranks do."""
    count = len(env.cuda.gpus)
    if not count:
        return absent("CUDA IPC", _NONE)
    peer = 1 if (1, 0) in env.cuda.reach else 0
    ran = env.child("cuda", "ipc", "0", str(peer), timeout_s=15)
    why = ran.output.strip().strip('"') if ran.code == 0 else ran.why()
    if why:
        return fault(
            "CUDA IPC",
            f"a second process, on GPU {peer}, cannot use memory of GPU 0: {why}",
            "let all ranks share the host's process and IPC namespaces (docker: --ipc=host --pid=host); WSL and vGPUs have no CUDA IPC",
        )
    return ok("CUDA IPC", f"a second process, on GPU {peer}, read and wrote memory of GPU 0")


def mps(env: Environment) -> Finding:
    """Where MPS shares GPUs among processes, each has SMs enough."""
    pipes = env.variables.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps")
    percentage = env.variables.get("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE")
    if not env.exists(f"{pipes.lstrip('/')}/control"):
        if percentage is not None and env.cuda.gpus:
            return warning("MPS", f"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE={percentage}, and no MPS control pipe in {pipes}",
                           "start it (nvidia-cuda-mps-control -d), or unset the variable")  # fmt: skip
        return absent("MPS", "not started; ranks with a GPU each need none")
    if small := [index for index, gpu in enumerate(env.cuda.gpus) if gpu.num_sms < _ENOUGH_SMS]:
        num_sms = env.cuda.gpus[small[0]].num_sms
        return warning(
            "MPS",
            f"MPS leaves a process {num_sms} SMs of GPU {small[0]}, and a call takes up to {_ENOUGH_SMS} by default: "
            "calls are slower and nothing runs beside them",
            f"set CUDA_MPS_ACTIVE_THREAD_PERCENTAGE higher (it is {percentage or 'unset here: look at the control daemon'}), "
            "or run fewer ranks a GPU",
        )
    return ok("MPS", f"runs, {'with ' + percentage + '% of the SMs' if percentage else 'without a limit of SMs'} for a process")


def clocks(env: Environment) -> Finding:
    """GPUs stay initialized between processes, and nothing slows them down now."""
    if not env.cuda.gpus:
        return absent("clocks", _NONE)
    ran = _ask_smi(env)
    rows = [[cell.strip() for cell in line.split(",")] for line in ran.output.splitlines() if line.count(",") == 3]
    if ran.code != 0 or not rows:
        return warning("clocks", f"nvidia-smi does not say: {ran.why()}", "put nvidia-smi on the path to have clocks looked at")
    if slowed := [row[0] for row in rows if "Active" in row[2:]]:
        return warning("clocks", f"GPU {', '.join(slowed)} is slowed down by heat or power", "see `nvidia-smi -q -d PERFORMANCE`")
    if lazy := [row[0] for row in rows if row[1] == "Disabled"]:
        return warning(
            "clocks",
            f"persistence mode is off for GPU {', '.join(lazy)}, so a first call waits for the driver",
            "nvidia-smi -pm 1 (as root)",
        )
    return ok("clocks", "persistence mode is on, and nothing slows a GPU down")


def _ask_smi(env: Environment) -> Ran:
    for reasons in _SMI_REASONS:
        fields = f"index,persistence_mode,{reasons}.hw_slowdown,{reasons}.sw_thermal_slowdown"
        ran = env.run(["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"], 10)
        if "is not a valid field" not in ran.output:
            break
    return ran


def variables(env: Environment) -> Finding:
    """No variable of the environment slows down what it should not."""
    values = env.variables
    harmful = [name for name in ("CUDA_LAUNCH_BLOCKING", "NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE") if values.get(name, "0") not in ("0", "")]
    if harmful:
        told = ", ".join(f"{name}={values[name]}" for name in harmful)
        return warning("variables", f"{told} is set and makes calls much slower", f"unset {' '.join(harmful)}, unless you look for a fault")
    return ok("variables", "none that slows calls down")
