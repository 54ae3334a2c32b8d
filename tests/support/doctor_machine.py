"""A machine made of files and invented facts, for the doctor's checks. It is healthy except for a test's changes."""

import json
from pathlib import Path

import machine_trees

from deepep_moe.doctor.base import Environment, Ran

FEATURES = {"version": "0.1.0", "compiler": "12.2.0", "shm": True, "nvlink": True, "nvshmem": True, "autograd": True}
FILES = {
    "sys/module/nvidia_peermem/refcnt": "1",
    "proc/self/limits": "Max locked memory  unlimited  unlimited  bytes",
    "proc/self/status": "Name:\tpython\nCapEff:\t000001ffffffffff",
    "dev/infiniband/uverbs0": "",
}


class Machine:
    """Facts to change, then `environment`. `ran` has how a command ends, by a word of it; the first that fits counts."""

    def __init__(self, root: Path):
        self.root, self.variables, self.ran = root, {}, {}
        pairs = [[0, 1], [1, 0]]
        gpus = [{"name": "NVIDIA H100 80GB HBM3", "capability": [9, 0]} for _ in range(2)]
        self.torch, self.features, self.nvshmem = {"version": "2.13.0+cu130", "cuda": "13.0"}, dict(FEATURES), "3.4.5"
        self.cuda = {"error": "", "gpus": gpus, "reach": pairs, "atomics": pairs}
        machine_trees.one_node_hgx(root)
        for path, text in FILES.items():
            self.write(path, text)

    def write(self, path: str, text: str) -> None:
        (self.root / path).parent.mkdir(parents=True, exist_ok=True)
        (self.root / path).write_text(text + "\n")

    def _run(self, command: list[str], timeout_s: float) -> Ran:
        for word, ran in self.ran.items():
            if any(word in part for part in command):
                return ran
        if any(part.endswith("facts.py") for part in command):
            return Ran(0, "".join(json.dumps({name: getattr(self, name)}) + "\n" for name in ("torch", "cuda", "features", "nvshmem")))
        if "memfd" in command[-1] or "/fd/" in command[-1]:
            Path(command[-1]).write_bytes(b"olleh")
        return Ran(0)

    @property
    def environment(self) -> Environment:
        return Environment(self.root, self.variables, self._run)
