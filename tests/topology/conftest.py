"""Shared fixtures of the tests of binding and of NCCL's settings."""

import pytest

from deepep_moe.topology import binding, nccl

VARIABLES = (
    "CUDA_VISIBLE_DEVICES", "DEEPEP_MOE_BOUND", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NCCL_CONF_FILE", "NCCL_IB_HCA", "NCCL_TOPO_FILE",
    "SLURM_LOCALID", "SLURM_NTASKS", *binding._NVSHMEM, *nccl.SETTINGS,
)  # fmt: skip


@pytest.fixture(autouse=True)
def no_variables(monkeypatch):
    for name in VARIABLES:
        monkeypatch.setenv(name, "")  # so that its value of now is there again after the test
        monkeypatch.delenv(name)


@pytest.fixture
def bound_to(monkeypatch):
    """The CPUs that this process would be bound to, in a kernel that refuses nothing."""
    bound = []
    monkeypatch.setattr(binding, "set_affinity", lambda cpus: bound.append(cpus) or "")
    monkeypatch.setattr(binding, "prefer_memory", lambda node: "")
    return bound
