"""Add what only the driver knows to GPUs: names, NVLinks and peer access, through the package nvidia-ml-py."""

import contextlib
import importlib
import re
from collections import Counter
from dataclasses import replace
from typing import Any

from deepep_moe.topology.machine import Gpu
from deepep_moe.topology.sysfs import Tree

_P2P_READ = 0  # NVML's NVML_P2P_CAPS_INDEX_READ; nvidia-ml-py's constant of that name is a tuple, which its own call does not take


def find() -> Any:
    """Return the module pynvml, None where nvidia-ml-py is not installed."""
    try:
        return importlib.import_module("pynvml")
    except ImportError:
        return None


def with_links(gpus: tuple[Gpu, ...], nvml: Any, tree: Tree) -> tuple[Gpu, ...]:
    """Return `gpus` with what `nvml` tells of them; as they are, with a note, where it does not work, as without a driver."""
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        if gpus:
            tree.note(f"NVLinks and peer access of the GPUs are unknown: NVML does not start ({error}); check that nvidia-smi works.")
        return gpus
    try:
        by_bus_id = _handles(nvml)
        given = [gpu for gpu in gpus if gpu.pci.bus_id in by_bus_id]
        if len(given) < len(gpus):  # a container sees all in sysfs
            tree.note(f"{len(gpus) - len(given)} of the machine's {len(gpus)} GPUs are not given to this process; they are left out.")
        gpus = tuple(replace(gpu, index=index) for index, gpu in enumerate(given))
        return tuple(_with_links(gpu, gpus, by_bus_id, nvml) for gpu in gpus)
    except nvml.NVMLError as error:
        tree.note(f"NVLinks and peer access of the GPUs are unknown: NVML failed ({error}); check that nvidia-smi works.")
        return gpus
    finally:
        nvml.nvmlShutdown()


def _handles(nvml: Any) -> dict[str, Any]:
    """Return the handles of GPUs by bus id. A GPU that this process may not use, or that fell off the bus, has none."""
    found = {}
    for index in range(nvml.nvmlDeviceGetCount()):
        try:
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            found[short_bus_id(nvml.nvmlDeviceGetPciInfo(handle).busId)] = handle
        except nvml.NVMLError:
            continue
    return found


def short_bus_id(bus_id: str | bytes) -> str:
    """Return NVML's bus id, such as b"00000000:1B:00.0", as sysfs writes it: "0000:1b:00.0". Returns others as they are."""
    text = _text(bus_id).lower()
    domain, _, rest = text.partition(":")
    return f"{int(domain, 16):04x}:{rest}" if re.fullmatch("[0-9a-f]{1,8}", domain) else text


def _text(value: str | bytes) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else value


def _with_links(gpu: Gpu, gpus: tuple[Gpu, ...], handles: dict[str, Any], nvml: Any) -> Gpu:
    handle = handles[gpu.pci.bus_id]
    peers: tuple[int, ...] | None = None  # the driver may not tell, as in some virtual machines; the rest still counts
    with contextlib.suppress(nvml.NVMLError):
        peers = tuple(other.index for other in gpus if other is not gpu and _reaches(handle, handles[other.pci.bus_id], nvml))
    name, uuid = _text(nvml.nvmlDeviceGetName(handle)), _text(nvml.nvmlDeviceGetUUID(handle))
    return replace(gpu, name=name, uuid=uuid, nvlinks=_nvlinks(handle, nvml), peers=peers)


def _reaches(handle: Any, other: Any, nvml: Any) -> bool:
    return bool(nvml.nvmlDeviceGetP2PStatus(handle, other, _P2P_READ) == nvml.NVML_P2P_STATUS_OK)


def _nvlinks(handle: Any, nvml: Any) -> tuple[tuple[str, int], ...]:
    remotes: Counter[str] = Counter()
    for link in range(nvml.NVML_NVLINK_MAX_LINKS):
        try:
            if nvml.nvmlDeviceGetNvLinkState(handle, link) != nvml.NVML_FEATURE_ENABLED:
                continue
            remotes[short_bus_id(nvml.nvmlDeviceGetNvLinkRemotePciInfo(handle, link).busId)] += 1
        except nvml.NVMLError:  # this GPU has no link of that number
            continue
    return tuple(sorted(remotes.items()))
