"""Writers of scalars, a file for TensorBoard and lines of JSON as Weights & Biases keeps them; and of routing traces."""

import json
import math
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from deepep_moe import config


class EventFile:
    """A file of events for TensorBoard, by `torch.utils.tensorboard`: `tensorboard --logdir folder` shows its scalars.

    Raises:
        ImportError: the package tensorboard is missing.
    """

    def __init__(self, folder: str | Path):
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ImportError(f"EventFile needs the package tensorboard ({error}); pip install tensorboard, or use JsonLines") from error
        self._writer: Any = SummaryWriter(str(folder))

    def add_scalar(self, name: str, value: float, step: int) -> None:
        """Write a scalar. TensorBoard groups names by what stands before their first slash."""
        self._writer.add_scalar(name, value, step)
        self._writer.flush()  # a job that is killed keeps what it has written

    def close(self) -> None:
        self._writer.close()


class JsonLines:
    """A file with a JSON object for each step, as the history of a run of Weights & Biases has them: `_step`, `_timestamp`, and the values.

    Takes the place of a run where only `log` is called.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text("")

    def log(self, values: dict[str, object], step: int) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps({"_step": step, "_timestamp": round(time.time(), 3), **values}) + "\n")


_HEADER_BYTES = 128
_num_files: Counter[Path] = Counter()  # that this process has begun, by the name of the first


class RoutingTrace:
    """A file of this rank for NumPy, which grows: [num_calls, num_layers, num_local_experts] int32, rows of each expert in each forward.

    Ranks of one group make a trace: `numpy.stack([numpy.load(name) for name in sorted(glob.glob(f"{folder}/*.npy"))], 2)`.
    """

    def __init__(self, folder: Path, rank: int):
        self._first = self.path = folder / f"rank{rank:05}.npy"
        self._shape: tuple[int, ...] = 0, 0, 0
        folder.mkdir(parents=True, exist_ok=True)

    def write(self, calls: Sequence[Tensor]) -> None:
        """Add the forwards of a report, [num_calls, num_local_experts] for each layer. Zeros stand where one has fewer calls or experts.

        Other numbers of layers or experts than before go to another file, with a number in its name, and so does a second trace. A job
        that is killed leaves files that can be read.
        """
        ran = [of_layer for of_layer in calls if len(of_layer)]
        if not ran:
            return
        block = torch.zeros(max(map(len, ran)), len(ran), max(of_layer.shape[1] for of_layer in ran), dtype=torch.int32)
        for i, of_layer in enumerate(ran):
            block[: len(of_layer), i, : of_layer.shape[1]] = of_layer
        num_calls, *sizes = block.shape
        if self._shape[1:] != (*sizes,):
            _num_files[self._first] += 1
            if (number := _num_files[self._first]) > 1:
                self.path = self._first.with_stem(f"{self._first.stem}-{number}")
            self._shape = 0, *sizes
            self.path.write_bytes(_header(self._shape))
        grown = self._shape[0] + num_calls, *sizes
        with self.path.open("r+b") as file:
            file.seek(_HEADER_BYTES + 4 * math.prod(self._shape))
            file.write(block.numpy().astype("<i4").tobytes())
            file.seek(0)
            file.write(_header(grown))
        self._shape = grown


def _header(shape: tuple[int, ...]) -> bytes:
    """Return NumPy's header of such int32, [_HEADER_BYTES]."""
    begin, text = b"\x93NUMPY\x01\x00\x76\x00", f"{{'descr': '<i4', 'fortran_order': False, 'shape': {shape}}}"
    return begin + text.ljust(_HEADER_BYTES - len(begin) - 1).encode() + b"\n"


def routing_trace() -> RoutingTrace | None:
    """Return the trace of this rank in the folder that `DEEPEP_MOE_TRACE` names, or None."""
    folder = config.trace_folder()
    return None if folder is None else RoutingTrace(folder, rank_in_job())


def rank_in_job() -> int:
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
