"""Hooks of mkdocs: what the site has beside docs/, and where links lead that leave it.

Pages link to sources, records and examples of this repository, as the clone has them. The site is read without the clone, so it holds the
files that a page links to: Markdown as pages, sources as pages of code, the rest as it is.
"""

import contextlib
import os
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files, InclusionLevel

ROOT = Path(__file__).parents[2]
PAGES = {
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "README.md": "index.md",  # the first page of the site says what the README says
    "examples/cluster/README.md": "examples/cluster.md",
    "examples/deepspeed/README.md": "examples/deepspeed.md",
    "examples/megatron/README.md": "examples/megatron.md",
}
CODE = {".py": "python", ".cu": "cpp", ".cuh": "cpp", ".h": "cpp", ".cpp": "cpp", ".sh": "bash", ".pyi": "python"}
_BOOST = {"hardware.md": 3, "troubleshoot.md": 3}  # words of messages, and "GPU", stand on many pages
_LINK = re.compile(r"(\]\()([^)#\s]*)(#[^)\s]*)?(\))")
_RECORD = re.compile(r"(\|) *<!-- .* -->$", flags=re.MULTILINE)  # a row's key, which readers need not see
_NO_SEARCH = "---\nsearch:\n  exclude: true\n---\n\n"


def on_startup(**_: Any) -> None:
    """Link the package as it is installed: a name of the adapters leads to another folder than in the sources."""
    package = ROOT / "build" / "documented" / "deepep_moe"
    package.mkdir(parents=True, exist_ok=True)
    for link in package.iterdir():
        if not link.exists():  # its file has gone
            link.unlink(missing_ok=True)
    for path in [*(ROOT / "deepep_moe").iterdir(), ROOT / "integrations"]:
        with contextlib.suppress(FileExistsError):  # of an earlier build, or of one that runs now
            (package / path.name).symlink_to(path)


def on_files(files: Files, config: Any) -> Files:
    """Add the pages of the repository outside docs/, and every file or folder that a page links to."""
    for source, page in PAGES.items():
        if page != "index.md":
            files.append(File.generated(config, page, content=(ROOT / source).read_text()))
    linked = sorted({target for file in files.documentation_pages() for target in _links_out(file)})
    for target in linked:
        files.append(_copy(ROOT / target, target, config))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Lead the links that leave docs/ to the pages and files that stand for them. A page's weight in the search is set, too."""
    if page.file.src_uri in _BOOST:
        page.meta["search"] = {"boost": _BOOST[page.file.src_uri]}
    here, folder = page.file.src_uri, posixpath.dirname(_origin(page.file.src_uri))

    def lead(match: re.Match[str]) -> str:
        before, link, anchor, after = match.groups()
        target = _place(_resolve(folder, link)) if link and not _is_url(link) else None
        if target is None:
            return match[0]
        return before + posixpath.relpath(target, posixpath.dirname(here) or ".") + (anchor or "") + after

    return _RECORD.sub(r"\1", _outside_code(_LINK, lead, markdown))


def _outside_code(pattern: re.Pattern[str], replace: Any, markdown: str) -> str:
    parts = re.split(r"(^```.*?^```)", markdown, flags=re.DOTALL | re.MULTILINE)
    return "".join(part if part.startswith("```") else pattern.sub(replace, part) for part in parts)


def _is_url(link: str) -> bool:
    return "://" in link or link.startswith("mailto:")


def _origin(page: str) -> str:
    """Return where a page of the site lies in the repository."""
    return next((source for source, name in PAGES.items() if name == page and name != "index.md"), f"docs/{page}")


def _resolve(folder: str, link: str) -> str:
    return posixpath.normpath(posixpath.join(folder, link))


def _place(path: str) -> str | None:
    """Return where the site has a path of the repository; None for one that it does not need to move."""
    if path in PAGES:
        return PAGES[path]
    if path.startswith("docs/"):
        page = path.removeprefix("docs/")
        return f"{page}/README.md" if (ROOT / path).is_dir() else page
    if not (ROOT / path).exists():
        return None
    is_page = (ROOT / path).is_dir() or Path(path).suffix in CODE or Path(path).suffix == ".md"
    return f"source/{path}.md".replace(".md.md", ".md") if is_page else f"source/{path}"


def _links_out(file: File) -> set[str]:
    """Return the paths outside docs/ that a page links to, but for the pages among them."""
    folder = posixpath.dirname(_origin(file.src_uri))
    links = set()
    _outside_code(_LINK, lambda match: links.add(match[2]) or match[0], file.content_string)
    paths = {_resolve(folder, link) for link in links if link and not _is_url(link)}
    return {path for path in paths if not path.startswith("docs") and path not in PAGES and (ROOT / path).exists()}


def _copy(path: Path, name: str, config: Any) -> File:
    """Return a page that shows a file or lists a folder, or the file itself."""
    place = _place(name)
    assert place is not None, name
    if path.is_dir():
        entries = sorted(
            entry.name + "/" * entry.is_dir() for entry in path.iterdir() if entry.name != "__pycache__" and entry.suffix != ".so"
        )
        text = f"# {name}/\n\nA folder of the repository:\n\n" + "".join(f"- `{entry}`\n" for entry in entries)
    elif path.suffix == ".md":
        text = path.read_text()
    elif path.suffix in CODE:
        text = f"# {name}\n\n````{CODE[path.suffix]}\n{path.read_text()}\n````\n"
    else:
        return File.generated(config, place, abs_src_path=os.fspath(path))
    return File.generated(config, place, content=_NO_SEARCH + text, inclusion=InclusionLevel.NOT_IN_NAV)
