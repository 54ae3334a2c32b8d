"""The documentation site and the pages of runs in a real browser, of a desktop and of a phone."""

import os
from pathlib import Path

import pytest
from browser import Browser, find_chrome
from example_page import Page, Table
from questions import QUESTIONS

ROOT = Path(__file__).parents[2]
WIDTHS = {"desktop": 1280, "phone": 390}

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not find_chrome(), reason="no Chromium or Chrome on this machine")]


@pytest.fixture(scope="module")
def browser():
    with Browser(find_chrome()) as opened:
        yield opened


def found_by(browser: Browser, site: Path, query: str) -> list[str]:
    """Return the pages that the site's search lists for it, in their order."""
    links = "[...document.querySelectorAll('.md-search-result__item > a')]"
    for typed, is_done in (("", f"{links}.length === 0"), (query, f"{links}.length > 0")):
        browser.value(f"""(() => {{
            const input = document.querySelector(".md-search__input");
            input.focus();
            input.value = {typed!r};
            input.dispatchEvent(new KeyboardEvent("keyup", {{bubbles: true}}));
        }})()""")
        browser.wait(is_done)
    paths = browser.value(f"{links}.map(link => new URL(link.href).pathname)")
    return list(dict.fromkeys(path.removeprefix(f"{site}/") for path in paths))


@pytest.fixture(scope="session")
def pictures_of_pages(tmp_path_factory):
    """The folder for screenshots, which DEEPEP_MOE_SCREENSHOTS names."""
    folder = Path(os.environ.get("DEEPEP_MOE_SCREENSHOTS") or tmp_path_factory.mktemp("screenshots"))
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def take(browser: Browser, path: Path) -> None:
    """Take a screenshot of the page that is open, which is a picture of some content."""
    browser.screenshot(path)
    assert path.read_bytes().startswith(b"\x89PNG\r\n\x1a\n") and path.stat().st_size > 3000, path


@pytest.mark.parametrize(("name", "width"), WIDTHS.items(), ids=WIDTHS)
def test_pages_fit_and_complain_of_nothing(site, browser, pictures_of_pages, name, width):
    pages = [page for page in sorted(site.rglob("*.html")) if page.name != "404.html"]  # which is served from the root of a host
    assert len(pages) > 50
    found = {}
    for page in pages:
        browser.open(page, width)
        take(browser, pictures_of_pages / f"{name}-{'-'.join(page.relative_to(site).with_suffix('.png').parts)}")
        widest, pictures = browser.value(
            "[document.documentElement.scrollWidth, [...document.images].filter(i => i.complete && !i.naturalWidth).map(i => i.src)]"
        )
        if browser.complaints or widest > width or pictures:
            found[str(page.relative_to(site))] = (widest, pictures, list(browser.complaints))
    assert not found


def test_search(site, browser):
    browser.open(site / "index.html", WIDTHS["desktop"])
    lost = {}
    for question, first, second, page in QUESTIONS:
        tries = {query: found_by(browser, site, query)[:3] for query in (first, second)}
        if not any(page in found for found in tries.values()):
            lost[question] = tries
    assert not lost and not browser.complaints


def test_page_of_a_run(browser, pictures_of_pages, tmp_path):
    """The page of a run as an example writes it, with a long table and a long command."""
    rows = [[f"dispatch bf16, 2 ranks, {num_tokens} tokens, layout expert", 100.0 + num_tokens, None] for num_tokens in range(40)]
    about = {"hardware": "2 x H100", "command": "python examples/megatron/train.py " + "--option value " * 20}
    page = tmp_path / "report.html"
    Page("A run", "It ran. It was fast.", about, [Table("Calls", ["call", "us", "baseline"], rows, bars="us")]).write(page)
    for name, width in WIDTHS.items():
        browser.open(page, width)
        take(browser, pictures_of_pages / f"{name}-run.png")
        assert browser.value("document.documentElement.scrollWidth") <= width and not browser.complaints
        assert len(browser.value("document.body.innerText")) > 500


def test_complaints_are_heard(browser, tmp_path):
    page = tmp_path / "page.html"
    page.write_text("<script>console.error('an error'); null.x</script><img src='nowhere.png'>")
    browser.open(page, 390)
    told = " ".join(browser.complaints)
    assert "an error" in told and "TypeError" in told and "ERR_FILE_NOT_FOUND" in told
