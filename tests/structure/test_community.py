"""Workflows, issue templates and the files for those who cite, report or release: they name what is there."""

import re
import subprocess
import tomllib
from pathlib import Path

import pytest
from browser import NAMES

yaml = pytest.importorskip("yaml")
ROOT = Path(__file__).parents[2]
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
TEMPLATES = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))


def test_workflow_runs_targets_of_the_makefile():
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "check.yml").read_text())
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    commands = {step["run"] for job in workflow["jobs"].values() for step in job["steps"] if "run" in step}
    made = {command.removeprefix("make ") for command in commands if command.startswith("make ")}
    assert made == {"lint", "test", "test-all", "wheel", "docs"} <= targets
    for command in commands - {f"make {target}" for target in made}:
        assert all((ROOT / name).exists() for name in re.findall(r"tests/\S+\.py", command)), command
    lowest = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["requires-python"].removeprefix(">=")
    assert workflow["jobs"]["test"]["strategy"]["matrix"]["python"][0] == lowest


def test_workflow_tests_the_wheel_beside_two_versions_of_pytorch():
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "check.yml").read_text())
    job = workflow["jobs"]["wheel"]
    pairs = [(each["python"], each["torch"]) for each in job["strategy"]["matrix"]["include"]]
    assert pairs == [("3.11", "2.8"), ("3.12", "2.13")]
    (row,) = re.findall(r"^\| wheel beside PyTorch (.+?) \|", (ROOT / "docs" / "status.md").read_text(), re.MULTILINE)
    said = [
        (python, torch) for torches, python in re.findall(r"([\d. and]+) on (?:Python )?([\d.]+)", row) for torch in torches.split(" and ")
    ]
    assert {(python, torch.strip()) for python, torch in said} >= set(pairs), "what the page says was run"
    commands = [step.get("run", "") for step in job["steps"]]
    made, tested = commands.index("make wheel"), commands.index(".venv/bin/python -m pytest tests/structure/test_wheel.py")
    assert made < tested and job["steps"][tested]["env"] == {"DEEPEP_MOE_DIST": "dist"}


def test_workflow_needs_a_browser():
    """Tests of pages are skipped where there is no Chrome; the workflow names it, so they run or fail."""
    steps = yaml.safe_load((ROOT / ".github" / "workflows" / "check.yml").read_text())["jobs"]["docs"]["steps"]
    (tested,) = [step for step in steps if "test_browser.py" in step.get("run", "")]
    assert tested["env"]["CHROME"] in NAMES
    (kept,) = [step for step in steps if step.get("with", {}).get("path") == tested["env"]["DEEPEP_MOE_SCREENSHOTS"]]
    assert kept["with"]["if-no-files-found"] == "error"


@pytest.mark.parametrize(
    ("target", "extras"), [("demo", "megatron"), ("demo-overlap", "megatron"), ("install", "megatron,deepspeed,dev,docs")]
)
def test_targets_install_what_they_need(target, extras, tmp_path):
    """A demo waits for no more; `make install` serves the demos too."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").touch()

    def dry_run(name: str) -> str:
        command = ["make", "-n", name, f"VENV={tmp_path}", "DEVICE=cpu"]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout

    told = dry_run(target)
    assert re.findall(r'-e "\.\[(.+)\]"', told) == [extras]
    for stamp in re.findall(r"^touch (.+)$", told, re.MULTILINE)[0].split():
        Path(stamp).touch()
    assert "pip install" not in dry_run("demo") and ("pip install" in dry_run("test")) == (target != "install")


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.stem)
def test_issue_templates(path):
    template = yaml.safe_load(path.read_text())
    if path.stem == "config":
        assert template == {"blank_issues_enabled": False}
        return
    assert template["name"] and template["description"]
    ids = [field["id"] for field in template["body"]]
    assert len(set(ids)) == len(ids) and (path.stem != "defect" or "doctor" in ids)


def test_citation_has_the_version():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert (citation["version"], citation["license"], citation["cff-version"]) == (VERSION, "MIT", "1.2.0")
    assert f"## {VERSION}" in (ROOT / "CHANGELOG.md").read_text()


@pytest.mark.parametrize("page", ("RELEASING.md", "CONTRIBUTING.md", "SECURITY.md"))
def test_files_that_a_page_names(page):
    for name in re.findall(r"`((?:\.ci|docs|benchmarks|tests|deepep_moe)/[\w./-]+)`", (ROOT / page).read_text()):
        assert (ROOT / name).exists(), name
