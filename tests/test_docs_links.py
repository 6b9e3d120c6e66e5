"""Links in Markdown lead somewhere, every page is in the index, and named files exist."""

from __future__ import annotations

import re
from functools import cache

import pytest

from tests.test_architecture import ROOT

FOLDERS = ("benchmarks", "docs", "examples")
PAGES = sorted(
    path.relative_to(ROOT).as_posix()
    for path in (
        *ROOT.glob("*.md"),
        *(page for each in FOLDERS for page in (ROOT / each).rglob("*.md")),
    )
)
SOURCES = ("benchmarks", "coordinator", "protos", "psrpc", "pserver", "tests", "worker")
FENCE = re.compile(r"^```.*?^```", flags=re.MULTILINE | re.DOTALL)
CODE = re.compile(r"`[^`\n]*`")
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)|<img src=\"([^\"]+)\"")
NAMED = re.compile(
    r"`((?:coordinator|worker|pserver|psrpc|tests|benchmarks|examples|protos|docker|scripts|docs)"
    r"/[\w./-]+\.(?:py|proto|md|yml|json|patch|js|css))`"
)


def text_of(page: str) -> str:
    """The page without blocks of code, where nothing is a link or a heading."""
    return FENCE.sub("", (ROOT / page).read_text())


def slug(heading: str) -> str:
    """The anchor that GitHub gives to a heading."""
    plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
    return re.sub(r"[^\w\- ]", "", plain.strip().lower()).replace(" ", "-")


@cache
def anchors(page: str) -> frozenset[str]:
    found: dict[str, int] = {}
    for heading in re.findall(r"^#{1,6} (.+)$", text_of(page), flags=re.MULTILINE):
        name = slug(heading)
        times = found[name] = found.get(name, -1) + 1
        if times:
            found[f"{name}-{times}"] = 0
    return frozenset(found)


def links(page: str) -> list[str]:
    text = CODE.sub("``", text_of(page))
    return [first or second for first, second in LINK.findall(text)]


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    for link in links(page):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (ROOT / page).parent / path if path else ROOT / page
        assert target.exists(), f"{page} links to {link}"
        assert target.resolve().is_relative_to(ROOT), f"{page} links out of the repository: {link}"
        if anchor and target.suffix == ".md":
            name = target.resolve().relative_to(ROOT).as_posix()
            assert anchor in anchors(name), f"{page} links to {link}: no such heading"


@pytest.mark.parametrize("page", [page for page in PAGES if not page.startswith("docs/design/")])
def test_files_that_a_page_names_exist(page: str) -> None:
    """Design notes and the changelog tell of what was."""
    if page == "CHANGELOG.md":
        return
    missing = [name for name in NAMED.findall(text_of(page)) if not (ROOT / name).exists()]
    assert not missing, f"{page} names {missing}"


def test_the_index_has_every_page() -> None:
    here = {page.removeprefix("docs/") for page in PAGES if page.startswith("docs/")}
    listed = {link.partition("#")[0] for link in links("docs/README.md")}
    assert here - {"README.md"} <= listed


def test_sources_cite_pages_that_exist() -> None:
    cited = {
        name
        for folder in SOURCES
        for path in (ROOT / folder).rglob("*.p*")
        if path.suffix in (".py", ".proto")
        for name in re.findall(r"\bdocs/[\w/-]+\.md\b", path.read_text())
    }
    assert not [name for name in sorted(cited) if not (ROOT / name).exists()]


def test_the_readme_is_short() -> None:
    lines = (ROOT / "README.md").read_text().splitlines()
    assert len(lines) <= 160
    assert max(map(len, lines)) <= 110
