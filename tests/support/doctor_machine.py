"""A machine made of files and told facts, for the doctor's checks: healthy, but for what a test changes."""

import json
from pathlib import Path

from deepep_moe.doctor.environment import Environment, Ran
from deepep_moe.tuning import Files, load

GIB = 1 << 30
FEATURES = {"version": "0.1.0", "compiler": "12.2.0", "shm": True, "nvlink": True, "nvshmem": True, "autograd": True}
NVSHMEM = {"error": "", "built": [3, 4, 5], "found": [3, 4, 5]}
TORCH = {"version": "2.13.0+cu130", "cuda": "13.0", "nccl": "2.28.9"}
PAIRS = [[0, 1], [1, 0]]
FILES = {
    "sys/class/infiniband/mlx5_0/ports/1/state": "4: ACTIVE",
    "sys/class/infiniband/mlx5_0/ports/1/rate": "400 Gb/sec (4X NDR)",
    "sys/class/infiniband/mlx5_1/ports/1/state": "4: ACTIVE",
    "sys/class/infiniband/mlx5_1/ports/1/rate": "400 Gb/sec (4X NDR)",
    "sys/module/nvidia_peermem/refcnt": "1",
    "proc/driver/nvidia/params": 'EnableStreamMemOPs: 1\nRegistryDwords: "PeerMappingOverride=1;"',
    "proc/self/limits": "Max locked memory  unlimited  unlimited  bytes\nMax open files  65536  65536  files",
    "proc/self/status": "Name:\tpython\nCapEff:\t000001ffffffffff",
    "dev/gdrdrv": "",
    "dev/infiniband/uverbs0": "",
    ".dockerenv": "",
}
SMI = "0, Enabled, Not Active, Not Active\n1, Enabled, Not Active, Not Active\n"


class Machine:
    """Facts to change, then `environment`. `ran` has how a command ends, by a word of it; the first that fits counts."""

    def __init__(self, root: Path):
        self.root, self.variables, self.space, self.programs = root, {}, (32 * GIB, 30 * GIB), {}
        self.versions = {"megatron-core": "0.16.1", "deepspeed": "0.19.8"}
        self.torch, self.features, self.nvshmem, self.smi = dict(TORCH), dict(FEATURES), dict(NVSHMEM), SMI
        self.gpus = [{"name": "NVIDIA H100 80GB HBM3", "capability": [9, 0], "num_sms": 132} for _ in range(2)]
        self.cuda = {"driver": [13, 0], "reach": PAIRS, "atomics": PAIRS}
        self.ran: dict[str, Ran] = {}
        self.profiles = Files(None, None)
        for path, text in FILES.items():
            self.write(path, text)

    def write(self, path: str, text: str) -> None:
        (self.root / path).parent.mkdir(parents=True, exist_ok=True)
        (self.root / path).write_text(text + "\n")

    def _run(self, command: list[str], timeout_s: float) -> Ran:
        words = [Path(word).name for word in command]
        for word, ran in self.ran.items():
            if word in words or word in command[-1]:
                return ran
        if "facts" in words:
            return Ran(0, json.dumps(self.cuda | {"gpus": self.gpus}))
        if "library.py" in words:
            return Ran(0, "".join(json.dumps({name: getattr(self, name)}) + "\n" for name in ("torch", "features", "nvshmem")))
        if words[0] == "nvidia-smi":
            return Ran(0, self.smi)
        return Ran(0, '""\n')

    @property
    def environment(self) -> Environment:
        of_machine = self.variables, self._run, self.versions.get, lambda path: self.space, self.programs.get
        return Environment(self.root, *of_machine, lambda: load(self.profiles))
