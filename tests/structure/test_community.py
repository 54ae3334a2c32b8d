"""The Makefile and the files for those who cite, report or release: they name what is there."""

import re
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]


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

    commands = dry_run(target)
    assert re.findall(r'-e "\.\[(.+)\]"', commands) == [extras]
    for stamp in re.findall(r"^touch (.+)$", commands, re.MULTILINE)[0].split():
        Path(stamp).touch()
    assert "pip install" not in dry_run("demo") and ("pip install" in dry_run("test")) == (target != "install")


def test_citation_has_the_version():
    assert re.search(rf"^version: \"?{VERSION}\"?$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)
    assert f"## {VERSION}" in (ROOT / "CHANGELOG.md").read_text()


@pytest.mark.parametrize("page", ("RELEASING.md", "CONTRIBUTING.md", "SECURITY.md"))
def test_files_that_a_page_names(page):
    for name in re.findall(r"`((?:\.ci|docs|benchmarks|tests|deepep_moe)/[\w./-]+)`", (ROOT / page).read_text()):
        assert (ROOT / name).exists(), name
