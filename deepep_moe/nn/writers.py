"""Files of scalars that TensorBoard and Weights & Biases read, written without either."""

import json
import os
import struct
import time
from pathlib import Path
from typing import Any

_POLYNOMIAL = 0x82F63B78  # of CRC-32C, with which TensorBoard checks records (RFC 3720)


def _table_of_crc() -> list[int]:
    table = []
    for value in range(256):
        for _ in range(8):
            value = (value >> 1) ^ (_POLYNOMIAL if value & 1 else 0)
        table.append(value)
    return table


_CRC = _table_of_crc()


def masked_crc(data: bytes) -> int:
    """Return the checksum of a record, in the form that TensorFlow writes."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _CRC[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    crc ^= 0xFFFFFFFF
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF


def _varint(value: int) -> bytes:
    parts = []
    while value > 0x7F:
        parts.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*parts, value])


def _bytes(field: int, value: bytes) -> bytes:
    """A field of a protocol buffer."""
    return _varint(field << 3 | 2) + _varint(len(value)) + value


class EventFile:
    """A file of events for TensorBoard: `tensorboard --logdir folder` shows its scalars.

    Takes the place of `torch.utils.tensorboard.SummaryWriter` where only `add_scalar` is called.
    """

    def __init__(self, folder: str | Path):
        Path(folder).mkdir(parents=True, exist_ok=True)
        self.path = Path(folder) / f"events.out.tfevents.{int(time.time())}.{os.getpid()}"
        self._file = self.path.open("wb")
        self._write(_bytes(3, b"brain.Event:2"))

    def add_scalar(self, name: str, value: float, step: int) -> None:
        """Write a scalar. TensorBoard groups names by what stands before their first slash."""
        scalar = _bytes(1, name.encode()) + b"\x15" + struct.pack("<f", value)
        self._write(b"\x10" + _varint(step) + _bytes(5, _bytes(1, scalar)))

    def close(self) -> None:
        self._file.close()

    def _write(self, event: bytes) -> None:
        event = b"\x09" + struct.pack("<d", time.time()) + event
        length = struct.pack("<Q", len(event))
        self._file.write(length + struct.pack("<I", masked_crc(length)) + event + struct.pack("<I", masked_crc(event)))
        self._file.flush()  # a job that is killed keeps what it has written


class JsonLines:
    """A file with a JSON object for each step, as the history of a run of Weights & Biases has them: `_step`, `_timestamp`, and the values.

    Takes the place of a run where only `log` is called.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text("")

    def log(self, values: dict[str, Any], step: int) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps({"_step": step, "_timestamp": round(time.time(), 3), **values}) + "\n")
