"""The documentation site builds without a warning, its links lead somewhere, and its API pages have every public name."""

import html
import re
import subprocess
import sys

import pytest
from scripts import ROOT

pytestmark = pytest.mark.xdist_group("site")


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """Build the site like `make docs`. Without --quiet, which hides warnings from --strict too."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert built.returncode == 0, built.stdout + built.stderr
    return folder


def names_of(text: str) -> set[str]:
    """Return the anchors that links to a page may name."""
    return set(re.findall(r'\b(?:id|name)="?([^"\s>]+)', text))


def test_built_pages_lead_somewhere_and_load_nothing_from_outside(site):
    pages = {path: path.read_text() for path in site.rglob("*.html") if path.name != "404.html"}
    names = {path: names_of(text) for path, text in pages.items()}
    assert len(pages) > 40
    for path, text in pages.items():
        assert all(re.search(r'\balt="?[^"\s]', image) for image in re.findall(r"<img\b[^>]*>", text)), path
        elements = [element for element in re.findall(r"<(?:a|img|script|link)\b[^>]*>", text) if "canonical" not in element]
        targets = [(element, re.search(r'\b(?:src|href)="?([^"\s>]*)', element)) for element in elements]
        for element, target in ((element, html.unescape(match[1])) for element, match in targets if match):
            assert "://" not in target or element.startswith("<a"), f"{path}: {target}; it must work without a network"
            if "://" in target or target.startswith(("data:", "mailto:", "javascript:")):
                continue
            link, _, anchor = target.partition("#")
            file = (path.parent / link).resolve() if link else path
            file = file / "index.html" if file.is_dir() else file
            assert file.exists(), f"{path}: {target}"
            assert not anchor or file not in pages or anchor.startswith("__") or anchor in names[file], f"{path}: {target}"


def test_api_pages_have_every_public_name(site):
    import deepep_moe
    from deepep_moe import nn, ops
    from deepep_moe.integrations import deepspeed, huggingface, megatron

    for page, module in (("ops", ops), ("nn", nn), ("deepspeed", deepspeed), ("megatron", megatron), ("huggingface", huggingface)):
        listed = "\n".join(names_of((site / "api" / f"{page}.html").read_text()))
        missing = [name for name in module.__all__ if not re.search(rf"^{module.__name__}\.(\w+\.)?{name}$", listed, re.MULTILINE)]
        assert not missing, f"{page}: {missing}"
    names = set().union(*(names_of((site / "api" / f"{page}.html").read_text()) for page in ("buffer", "low_latency", "rest")))
    wanted = set(deepep_moe.__all__) - {"__version__", "errors", "features"}
    methods = [f"Buffer.{method}" for method in ("layout", "dispatch", "settle", "combine", "check", "recover", "destroy")]
    assert names >= {f"deepep_moe.{name}" for name in wanted | set(methods)}
    page = (site / "api" / "buffer.html").read_text()
    places = [page.index(f'id="deepep_moe.{method}"') for method in methods]
    assert places == sorted(places), "in the order of use"
    assert "num_max_tokens_per_rank" in page[page.index('id="deepep_moe.Buffer"') : places[0]], "the signature of the constructor"
    inner = {"calls", "counts", "describe", "native", "num_calls", "refuse", "seal", "sealed", "then", "to_save"}
    assert not inner & {name.rpartition(".")[2] for name in names if name.startswith("deepep_moe.")}, "inner names"
    for page, first in (("nn", "MoELayer"), ("megatron", "enable"), ("deepspeed", "initialize"), ("huggingface", "spread_experts")):
        assert re.search(r'id="?deepep_moe[.\w]*\.(\w+)"', (site / "api" / f"{page}.html").read_text())[1] == first, "what is used first"
    assert not any(re.search(r"Raises (?:<[^>]+>)*\w+Error", path.read_text()) for path in (site / "api").glob("*.html")), "in prose"
    sources = [path.read_text() for folder in ("deepep_moe", "integrations") for path in (ROOT / folder).rglob("*.py")]
    assert not re.findall(r"^ +\w+Error: .*[.;] \w+Error: .*", "\n".join(sources), re.MULTILINE), "one line an error"
