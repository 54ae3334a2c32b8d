"""The doctor as a program: on this machine, beside broken packages, and its processes of their own."""

import dataclasses
import json
import os
import subprocess
import sys
import time

import pytest
import torch
from doctor_machine import Machine

from deepep_moe.doctor import selftest
from deepep_moe.doctor.base import ABSENT, FAULT, OK, Environment, Ran, check, run
from deepep_moe.doctor.page import examine


def doctor(folder, *arguments, path=""):
    """Run it in `folder`, with what lies in `path` imported first; return its page, and its findings by name."""
    variables = {"PYTHONPATH": os.pathsep.join(filter(None, [str(path), os.environ.get("PYTHONPATH")]))}
    command = [sys.executable, "-m", "deepep_moe", "doctor", "--json", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, env=os.environ | variables, timeout=300)
    assert done.stdout.startswith("{"), done.stderr
    page = json.loads(done.stdout)
    assert done.returncode == (page["faults"] > 0)
    return page, {finding["check"]: finding for finding in page["findings"]}


def test_here(tmp_path):
    page, findings = doctor(tmp_path, "--test")
    assert findings["test of shm"]["text"] == "2 ranks, the reference's bits"
    assert page["backends"]["shm"] == page["backends"]["collective"] == ""
    assert findings["memory files"]["state"] == findings["PyTorch"]["state"] == OK and findings["deepep_moe"]["state"] != FAULT


def test_pytorch_that_does_not_import(tmp_path):
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch/__init__.py").write_text("raise ImportError('libtorch_cpu.so: file too short')\n")
    page, findings = doctor(tmp_path, path=tmp_path)
    assert findings["PyTorch"]["text"] == "it does not import: ImportError: libtorch_cpu.so: file too short"
    assert page["backends"]["shm"] == "PyTorch, deepep_moe" and findings["deepep_moe"]["state"] == ABSENT


def test_check_that_fails_is_a_finding(tmp_path):
    @check("broken")
    def broken(env):
        raise KeyError("rate")

    (finding,) = examine(Machine(tmp_path).environment, [broken])
    assert finding.state == FAULT and "broken" in finding.check and finding.text == "the check itself failed: KeyError: 'rate'"


def test_program_that_does_not_start_or_end():
    assert run(["/no/such/program"], 5) == Ran(None, errors="/no/such/program does not start: No such file or directory")
    said = run(["sh", "-c", "echo first; exec sleep 60"], 2)
    assert said.code is None and said.output == "first\n" and "no end within 2 s" in said.why()


@pytest.mark.gpu
def test_gpus_of_this_machine():
    cuda = Environment().facts["cuda"]
    assert cuda["error"] == "" and len(cuda["gpus"]) == torch.cuda.device_count()
    assert [gpu["name"] for gpu in cuda["gpus"]] == [torch.cuda.get_device_name(index) for index in range(len(cuda["gpus"]))]


def test_self_test_with_other_bits(monkeypatch):
    monkeypatch.setattr(selftest, "run_ranks", lambda *arguments, **options: [[], ["torch.float32 rank"]])
    with pytest.raises(SystemExit, match="results differ from deepep_moe.reference: torch.float32 rank on rank 1"):
        selftest.main("shm", 2)


def test_program_that_hangs_holds_up_no_other(tmp_path):
    """Checks run at once, so the page takes as long as the slowest."""
    machine = Machine(tmp_path)
    run = machine.environment.run

    def slow(command, timeout_s):
        time.sleep(1)
        return run(command, timeout_s)

    started = time.monotonic()
    findings = examine(dataclasses.replace(machine.environment, run=slow))
    assert time.monotonic() - started < 4 and all(finding.state in (OK, ABSENT) for finding in findings)
