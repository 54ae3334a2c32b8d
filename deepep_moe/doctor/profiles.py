"""Which tuned settings buffers use here."""

from deepep_moe.doctor.environment import Environment
from deepep_moe.doctor.findings import Finding, absent, fault, ok, warning
from deepep_moe.tuning import Found

_CHECK = "profiles"


def profiles(env: Environment) -> Finding:
    """The files of profiles can be read; say which profiles are of this machine's GPU."""
    try:
        loaded = env.profiles()
    except ValueError as error:
        text, _, advice = str(error).partition("; ")
        return fault(_CHECK, text, advice)
    if loaded.damaged:
        return warning(_CHECK, "; ".join(loaded.damaged), "repair or delete it; python -m deepep_moe.tune makes a new one")
    gpus = {(gpu.name, gpu.num_sms) for gpu in env.cuda.gpus}
    if not gpus:
        return absent(_CHECK, "no GPU is here, and CPUs have no such settings")
    in_use = {found.profile.key: found for found in loaded.found if (found.profile.machine.gpu, found.profile.machine.num_sms) in gpus}
    if not in_use:
        here = " and ".join(f"{name} with {num_sms} SMs" for name, num_sms in sorted(gpus))
        return ok(_CHECK, f"none of {here}, so settings are fitted to it; python -m deepep_moe.tune looks for faster ones")
    return ok(_CHECK, "; ".join(map(_told, in_use.values())))


def _told(found: Found) -> str:
    profile = found.profile
    return f"{profile.machine.num_ranks} ranks, {profile.shape}: {profile.values}, gain {profile.gain:.1%}, of {found.file}"
