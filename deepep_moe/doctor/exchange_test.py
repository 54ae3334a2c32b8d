"""The checks of `--test`, which start ranks (`selftest`) on what is there."""

import json
import sys

from deepep_moe.doctor.environment import Environment
from deepep_moe.doctor.findings import Finding, absent, fault, ok

_MOST_GPUS = 8
_DEADLINE_S = 100.0


def shm(env: Environment) -> Finding:
    """Two ranks on CPUs exchange rows over shared memory."""
    return _exchange(env, "shm", 2)


def nvlink(env: Environment) -> Finding:
    """A rank on each GPU of this host exchanges rows over NVLink."""
    features = env.library.get("features")
    if not env.cuda.gpus or features is None or not features["nvlink"]:
        return absent("test of nvlink", "no GPU, or no kernels for it")
    return _exchange(env, "nvlink", min(len(env.cuda.gpus), _MOST_GPUS))


def _exchange(env: Environment, backend: str, num_ranks: int) -> Finding:
    name = f"test of {backend}"
    if "features" not in env.library:
        return absent(name, "not run, as deepep_moe does not import")
    ran = env.run([sys.executable, "-m", "deepep_moe.doctor.selftest", backend, str(num_ranks)], _DEADLINE_S)
    if ran.code != 0:
        return fault(name, f"{num_ranks} ranks failed: {ran.why()}", "mend what the lines above report; else file an issue with this page")
    told = json.loads(ran.output.splitlines()[-1])
    if told["wrong"]:
        return fault(name, f"results differ from deepep_moe.reference: {', '.join(told['wrong'][:4])}", "file an issue with this page")
    return ok(name, f"{num_ranks} ranks, the reference's bits; dispatch {told['dispatch']:.1f} GB/s, combine {told['combine']:.1f} GB/s")
