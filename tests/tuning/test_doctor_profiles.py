"""What the doctor says of profiles."""

from dataclasses import replace

import pytest
from doctor_machine import Machine as MadeUp

from deepep_moe.doctor.findings import ABSENT, FAULT, OK, WARNING, Finding
from deepep_moe.doctor.page import as_text, examine
from deepep_moe.doctor.profiles import profiles
from deepep_moe.tuning import Files, Machine, Profile, Shape, Values
from deepep_moe.tuning.profiles import as_text as text_of

H100 = Machine("NVIDIA H100 80GB HBM3", 132, 4, 1)
PROFILE = Profile(H100, Shape(4096, 7168, 8), Values(16, 18, 6, 4, 96, 0), 0.04, "a test")


@pytest.fixture
def machine(tmp_path):
    return MadeUp(tmp_path)


def test_in_use(machine, tmp_path):
    """Of two files with the same key the later one; those of other GPUs are not named."""
    user, given = tmp_path / "user.json", tmp_path / "given.json"
    user.write_text(text_of([PROFILE, replace(PROFILE, machine=replace(H100, num_ranks=2))]))
    given.write_text(text_of([replace(PROFILE, gain=0.05), replace(PROFILE, machine=replace(H100, num_sms=66))]))
    machine.profiles = Files(user, given)
    found = profiles(machine.environment)
    values = "num_sms 16, num_sms_of_sums 18, ring_warps 6, ring_stages 4, num_receive_blocks 96, num_work_blocks 0"
    assert found == Finding(
        "profiles",
        OK,
        f"4 ranks, 4096 tokens, hidden 7168, top-8: {values}, gain 5.0%, of {given}; "
        f"2 ranks, 4096 tokens, hidden 7168, top-8: {values}, gain 4.0%, of {user}",
    )
    assert f"of {user}" in " ".join(as_text(examine(machine.environment)).split())


def test_none(machine, tmp_path):
    found = profiles(machine.environment)
    assert found.state == OK and found.text.startswith("none of NVIDIA H100 80GB HBM3 with 132 SMs, so settings are fitted to it")
    machine.gpus = []
    assert profiles(machine.environment).state == ABSENT


def test_damaged(machine, tmp_path):
    file = tmp_path / "user.json"
    file.write_text("{")
    machine.profiles = Files(file, None)
    found = profiles(machine.environment)
    assert found.state == WARNING and found.text.startswith(f"{file} is no file of profiles: ") and "deepep_moe.tune" in found.advice


def test_given_file_is_not_there(machine, tmp_path):
    machine.profiles = Files(None, tmp_path / "missing.json")
    found = profiles(machine.environment)
    assert found.state == FAULT and found.advice == "give the path of a file of profiles, or unset it"
    assert found.text.endswith("missing.json' names a file that cannot be read (No such file or directory)")
