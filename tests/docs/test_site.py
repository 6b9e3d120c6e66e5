"""The built documentation site: ``make docs`` builds it, and runs this."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

import pserver
from tests.test_architecture import ROOT

SITE = ROOT / "build" / "docs"
INDEX = "docs/README.html"
FETCHED = {
    "audio": "src",
    "embed": "src",
    "iframe": "src",
    "img": "src",
    "link": "href",
    "object": "data",
    "script": "src",
    "source": "src",
    "video": "src",
}
"""Attributes whose address a browser fetches by itself."""

pytestmark = pytest.mark.docs


class Page(HTMLParser):
    """The addresses and anchors of a page.

    Attributes:
        fetched: addresses that a browser fetches to show the page.
        links: addresses that a reader can go to.
        anchors: names that a link can lead to.
        captions: headings of the navigation.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.fetched: list[str] = []
        self.links: list[str] = []
        self.anchors: set[str] = set()
        self.captions: list[str] = []
        self._in_caption = False
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.anchors |= {given[name] for name in ("id", "name") if name in given}
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        elif FETCHED.get(tag) in given:
            self.fetched.append(given[FETCHED[tag]])
        self._in_caption = tag == "span" and given.get("class") == "caption-text"

    def handle_data(self, data: str) -> None:
        if self._in_caption:
            self.captions.append(data)
            self._in_caption = False


@cache
def page(path: Path) -> Page:
    return Page(path)


@pytest.fixture(scope="module")
def pages() -> list[Path]:
    found = sorted(SITE.rglob("*.html"))
    assert found, f"{SITE} holds no site; run make docs"
    return found


def foreign(address: str) -> bool:
    parts = urlsplit(address)
    return bool(parts.netloc) or parts.scheme not in ("", "data")


def from_styles() -> Iterator[tuple[Path, str]]:
    """Addresses that the style sheets fetch: images, fonts, other sheets."""
    for sheet in SITE.rglob("*.css"):
        text = sheet.read_text()
        for address in re.findall(r"url\(\s*[\"']?([^\"')]+)|@import\s+[\"']([^\"']+)", text):
            yield sheet, "".join(address)


def test_no_page_asks_another_host(pages: list[Path]) -> None:
    asked = [(path, to) for path in pages for to in page(path).fetched]
    assert len(asked) > len(pages)
    assert [(path, to) for path, to in (*asked, *from_styles()) if foreign(to)] == []


def test_links_and_anchors_lead_somewhere(pages: list[Path]) -> None:
    dead = []
    for path in pages:
        for address in (*page(path).links, *page(path).fetched):
            parts = urlsplit(address)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            lives = target.is_file() and target.is_relative_to(SITE)
            if lives and parts.fragment and target.suffix == ".html":
                lives = unquote(parts.fragment) in page(target).anchors
            if not lives:
                dead.append((path.relative_to(SITE), address))
    assert dead == []


def test_the_navigation_is_that_of_the_index() -> None:
    index = (ROOT / "docs" / "README.md").read_text()
    assert page(SITE / INDEX).captions == re.findall(r"^##+ (.+)$", index, flags=re.MULTILINE)
    for kind in ("Tutorial", "How-to", "Reference", "Explanation"):
        assert kind in page(SITE / INDEX).captions
    assert page(SITE / "index.html").links == [INDEX]


def test_the_reference_has_every_public_name_and_field() -> None:
    anchors = page(SITE / "docs" / "api.html").anchors
    assert {f"pserver.{name}" for name in pserver.__all__} <= anchors
    fields = {f"pserver.Job.{field.name}" for field in dataclasses.fields(pserver.Job)}
    assert fields <= anchors


def test_there_is_search_and_a_dark_mode() -> None:
    assert (SITE / "searchindex.js").stat().st_size > 100_000
    assert "theme-toggle" in (SITE / INDEX).read_text()
    sheets = [sheet.read_text() for sheet in SITE.rglob("*.css")]
    assert any("prefers-color-scheme: dark" in re.sub(r":\s*", ": ", sheet) for sheet in sheets)
