"""Ask libcuda, without PyTorch, and print JSON.

`facts` prints the driver, the GPUs and who reaches whom. `ipc OWNER PEER` lets another process, on GPU `PEER`, read and write memory of GPU
`OWNER` by its CUDA IPC handle, as the ranks of the backend `nvlink` do, and prints what went wrong, or "".
"""

import ctypes
import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any

_HANDLE_BYTES = 64  # CU_IPC_HANDLE_SIZE
_LAZY_PEER_ACCESS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
_NUM_SMS, _MAJOR, _MINOR = 16, 75, 76  # of CUdevice_attribute
_P2P_ATOMICS = 3  # CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED
_SENT, _ANSWERED = b"deepep_moe asks ", b"deepep_moe heard"
_PEER_S = 12


class CudaError(RuntimeError):
    """A call of libcuda failed. The message names the call and the error."""


class IpcHandle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_char * _HANDLE_BYTES),)


class Driver:
    """Calls of libcuda that raise CudaError."""

    def __init__(self) -> None:
        try:
            self._library = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise CudaError(f"libcuda.so.1 does not load: {error}") from None
        self.call("cuInit", 0)

    def call(self, name: str, *arguments: Any) -> None:
        try:
            function = getattr(self._library, name)
        except AttributeError:
            raise CudaError(f"{name}: libcuda.so.1 does not have it, so the driver is too old") from None
        code = function(*arguments)
        if code:
            told = ctypes.c_char_p()
            self._library.cuGetErrorName(code, ctypes.byref(told))
            raise CudaError(f"{name}: {(told.value or b'unknown error').decode()} ({code})")

    def number(self, name: str, *arguments: Any) -> int:
        """Return what the call `name` writes to its first argument, an int."""
        value = ctypes.c_int()
        self.call(name, ctypes.byref(value), *arguments)
        return value.value

    def use(self, index: int) -> None:
        context = ctypes.c_void_p()
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), self.number("cuDeviceGet", index))
        self.call("cuCtxSetCurrent", context)

    def read(self, address: ctypes.c_uint64) -> bytes:
        found = ctypes.create_string_buffer(len(_SENT))
        self.call("cuMemcpyDtoH_v2", found, address, ctypes.c_size_t(len(_SENT)))
        return found.raw

    def write(self, address: ctypes.c_uint64, data: bytes) -> None:
        self.call("cuMemcpyHtoD_v2", address, data, ctypes.c_size_t(len(data)))
        self.call("cuCtxSynchronize")


def facts() -> dict[str, Any]:
    driver = Driver()
    version = driver.number("cuDriverGetVersion")
    count = driver.number("cuDeviceGetCount")
    gpus = []
    for index in range(count):
        device, name = driver.number("cuDeviceGet", index), ctypes.create_string_buffer(256)
        driver.call("cuDeviceGetName", name, len(name), device)
        num_sms, major, minor = (driver.number("cuDeviceGetAttribute", what, device) for what in (_NUM_SMS, _MAJOR, _MINOR))
        gpus.append({"name": name.value.decode(), "capability": [major, minor], "num_sms": num_sms})
    pairs = [(first, second) for first in range(count) for second in range(count) if first != second]
    reach = [pair for pair in pairs if driver.number("cuDeviceCanAccessPeer", *pair)]
    atomics = [pair for pair in reach if driver.number("cuDeviceGetP2PAttribute", _P2P_ATOMICS, *pair)]
    return {"driver": [version // 1000, version % 1000 // 10], "gpus": gpus, "reach": reach, "atomics": atomics}


def share(owner: int, peer: int) -> str:
    """Allocate on GPU `owner`, start a process that answers through its handle from GPU `peer`, and return what went wrong."""
    driver = Driver()
    driver.use(owner)
    address, handle = ctypes.c_uint64(), IpcHandle()
    driver.call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(1 << 21))
    driver.write(address, _SENT)
    driver.call("cuIpcGetMemHandle", ctypes.byref(handle), address)
    command = [sys.executable, "-P", __file__, "answer", str(peer), bytes(handle).hex()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_PEER_S)
    if done.returncode:
        return (done.stderr.strip().splitlines() or [f"the other process ended with code {done.returncode}"])[-1]
    found = driver.read(address)
    return "" if found == _ANSWERED else f"the other process wrote {_ANSWERED!r}, and the memory holds {found!r}"


def answer(peer: int, told: str) -> None:
    """Map the memory of the handle `told` (hexadecimal digits) on GPU `peer`, read what the owner wrote, and write the answer."""
    driver = Driver()
    driver.use(peer)
    address, handle = ctypes.c_uint64(), IpcHandle.from_buffer_copy(bytes.fromhex(told))
    driver.call("cuIpcOpenMemHandle_v2", ctypes.byref(address), handle, _LAZY_PEER_ACCESS)
    found = driver.read(address)
    if found != _SENT:
        raise CudaError(f"the mapped memory holds {found!r}, and {_SENT!r} was written")
    driver.write(address, _ANSWERED)
    driver.call("cuIpcCloseMemHandle", address)


def main(arguments: list[str]) -> int:
    commands: dict[str, Callable[..., Any]] = {"facts": facts, "ipc": lambda *pair: share(*map(int, pair))}
    try:
        if arguments[0] == "answer":
            answer(int(arguments[1]), arguments[2])
        else:
            print(json.dumps(commands[arguments[0]](*arguments[1:])))
    except (CudaError, subprocess.TimeoutExpired) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
