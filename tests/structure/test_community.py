"""The Makefile and the files for those who cite, report or release: they name what is there."""

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]


def test_citation_has_the_version():
    assert re.search(rf"^version: \"?{VERSION}\"?$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)
    assert f"## {VERSION}" in (ROOT / "CHANGELOG.md").read_text()


@pytest.mark.parametrize("page", ("RELEASING.md", "CONTRIBUTING.md", "SECURITY.md"))
def test_files_that_a_page_names(page):
    for name in re.findall(r"`((?:\.ci|docs|benchmarks|tests|deepep_moe)/[\w./-]+)`", (ROOT / page).read_text()):
        assert (ROOT / name).exists(), name
