"""The documentation site: it builds without a warning, and its search finds the page for a question."""

import json
import re
from functools import cache
from html.parser import HTMLParser
from pathlib import Path

import lunr
import pytest
from lunr.builder import Builder
from lunr.pipeline import Pipeline
from lunr.stop_word_filter import stop_word_filter
from questions import QUESTIONS

ROOT = Path(__file__).parents[2]


class Search:
    """The ranking of the site's own search (mkdocs-material's worker), by lunr for Python: fields and boosts of the index, stop words,
    beginnings of words, no length normalization, pages before their sections, and more for results with all words. Left out: suggestions,
    and what the site does with quotes, + and -."""

    def __init__(self, folder: Path):
        index = json.loads((folder / "search" / "search_index.json").read_text())
        self._separator = re.compile(index["config"]["separator"])
        self._documents = [
            (
                {"location": entry["location"], "title": self._plain(entry["title"]), "text": self._plain(entry["text"])},
                {"boost": entry.get("boost", 1)},
            )
            for entry in index["docs"]
        ]
        fields = [{"field_name": name, "boost": index["config"]["fields"][name]["boost"]} for name in ("title", "text")]
        builder = Builder()
        builder.b(0)
        builder.pipeline = Pipeline()
        builder.pipeline.add(stop_word_filter)
        builder.search_pipeline = Pipeline()
        self._index = lunr.lunr(ref="location", fields=fields, documents=self._documents, builder=builder)

    def _plain(self, text: str) -> str:
        words = self._separator.split(re.sub(r"<[^>]+>|&\w+;", " ", text).lower())
        return " ".join(word.strip(".,;'").replace("-", "_") for word in words)  # lunr for Python splits at what stands in a word

    def pages(self, query: str) -> list[str]:
        """Return the pages in the order in which the site lists them."""
        words = self._plain(query).split()
        best: dict[str, float] = {}
        for found in self._index.search(" ".join(f"{word}*" for word in words)):
            matched = sum(any(term.startswith(word) for term in found["match_data"].metadata) for word in words)
            page, _, section = found["ref"].partition("#")
            score = found["score"] * (1 + ((not section) + matched / len(words)) ** 2)
            best[page] = max(score, best.get(page, 0))
        return sorted(best, key=lambda page: -best[page])


@cache
def search_of(folder: Path) -> Search:
    return Search(folder)


@pytest.mark.parametrize(("question", "first", "second", "page"), QUESTIONS, ids=lambda value: value if value.endswith("?") else "")
def test_search_finds_the_page_in_two_tries(site, question, first, second, page):
    search = search_of(site)
    tries = {query: search.pages(query)[:3] for query in (first, second)}
    assert any(page in found for found in tries.values()), f"{question} {tries}"
    assert (ROOT / "docs" / page.replace(".html", ".md")).exists() or page == "changelog.html"


MESSAGES = re.findall(r"^#### `([^`]+)`", (ROOT / "docs" / "troubleshoot.md").read_text(), flags=re.MULTILINE)


@pytest.mark.parametrize(
    "message", [*MESSAGES, "EPTimeoutError", "EPPeerError", "EPMismatchError", "EPCapacityError", "BackendUnavailableError"]
)
def test_search_finds_messages(site, message):
    """By their first four words, and by all."""
    assert len(MESSAGES) > 30
    words = message.split(" ...")[0].split()
    for query in (" ".join(words[:4]), " ".join(words)):
        found = search_of(site).pages(query)[:3]
        assert "troubleshoot.html" in found, (query, found)


def test_search_says_nothing_of_nonsense(site):
    assert search_of(site).pages("xyzzy") == []


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
