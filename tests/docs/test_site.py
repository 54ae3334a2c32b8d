"""The documentation site builds without a warning, its links lead somewhere, and its API pages have every public name."""

import re
from html.parser import HTMLParser
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_a_page_that_the_navigation_lacks_is_an_error(build, tmp_path):
    config = (ROOT / "mkdocs.yml").read_text().replace("      - Chunks: design/chunks.md\n", "")
    for before, path in (("docs_dir: ", "docs"), ("- ", "docs/scripts/site.py"), ("paths: [", "build/documented")):
        assert before + path in config
        config = config.replace(before + path, f"{before}{ROOT / path}")
    (tmp_path / "mkdocs.yml").write_text(config)
    built = build(tmp_path / "site", "--config-file", str(tmp_path / "mkdocs.yml"))
    assert '"nav" configuration:\n  - design/chunks.md\n' in built.stderr, built.stderr
    assert built.returncode == 1 and "Aborted with 1 warning" in built.stdout


class Page(HTMLParser):
    """What a page refers to, and the names that can be referred to."""

    def __init__(self, text: str):
        super().__init__()
        self.targets: list[str] = []
        self.outside: list[str] = []
        self.images: list[dict[str, str | None]] = []
        self.names: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        given = dict(attributes)
        self.names |= {value for key, value in attributes if key in ("id", "name") and value}
        if tag == "img":
            self.images.append(given)
        loaded = given.get("src") if tag in ("img", "script") else given.get("href") if tag == "link" else None
        if loaded and "://" in loaded and given.get("rel") != "canonical":
            self.outside.append(loaded)
        target = given.get("href") if tag == "a" else loaded
        if target and "://" not in target and not target.startswith(("data:", "mailto:", "javascript:")):
            self.targets.append(target)


def test_built_pages_lead_somewhere_and_load_nothing_from_outside(site):
    pages = {path: Page(path.read_text()) for path in site.rglob("*.html") if path.name != "404.html"}
    assert len(pages) > 40
    for path, page in pages.items():
        assert not page.outside, f"{path}: it must work without a network"
        assert all(image.get("alt") for image in page.images), path
        for target in page.targets:
            link, _, anchor = target.partition("#")
            file = (path.parent / link).resolve() if link else path
            file = file / "index.html" if file.is_dir() else file
            assert file.exists(), f"{path}: {target}"
            if anchor and file in pages and not anchor.startswith("__"):
                assert anchor in pages[file].names, f"{path}: {target}"


def test_api_pages_have_every_public_name(site):
    import deepep_moe
    from deepep_moe import nn, ops
    from deepep_moe.integrations import deepspeed, huggingface, megatron

    for page, module in (("ops", ops), ("nn", nn), ("deepspeed", deepspeed), ("megatron", megatron), ("huggingface", huggingface)):
        names = Page((site / "api" / f"{page}.html").read_text()).names
        missing = [
            name for name in module.__all__ if not any(re.fullmatch(rf"{module.__name__}\.(\w+\.)?{name}", found) for found in names)
        ]
        assert not missing, f"{page}: {missing}"
    text = "".join((site / "api" / f"{page}.html").read_text() for page in ("buffer", "low_latency"))
    for name in set(deepep_moe.__all__) - {"__version__", "errors", "features"}:
        assert f'id="deepep_moe.{name}"' in text, name
    for method in ("dispatch", "combine", "layout", "check", "destroy"):
        assert f'id="deepep_moe.Buffer.{method}"' in text, method
