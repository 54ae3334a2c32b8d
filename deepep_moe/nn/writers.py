"""Writers of scalars: a file for TensorBoard, and lines of JSON as Weights & Biases keeps them."""

import json
import time
from pathlib import Path
from typing import Any


class EventFile:
    """A file of events for TensorBoard, by `torch.utils.tensorboard`: `tensorboard --logdir folder` shows its scalars.

    Raises ImportError where the package tensorboard is missing.
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

    def log(self, values: dict[str, Any], step: int) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps({"_step": step, "_timestamp": round(time.time(), 3), **values}) + "\n")
