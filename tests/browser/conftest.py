"""Headless Chromium. ``scripts/setup-browser`` installs what is needed; without it these fail."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest
from playwright.sync_api import Browser, Page

from tests.browser.chromium import Scheme, chromium, new_page

WAIT_MS = 60_000
"""A hang guard for what the page will show."""


@dataclass
class Watched:
    """A page, and all that went wrong in it."""

    page: Page
    complaints: list[str] = field(default_factory=list)
    elsewhere: list[str] = field(default_factory=list)
    """Requests to other places than ours."""


Open = Callable[..., Watched]


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    with chromium() as browser:
        yield browser


@pytest.fixture
def open_page(browser: Browser) -> Iterator[Open]:
    """``open_page(url, width=1280, scheme="light")``."""
    opened: list[Page] = []

    def open_at(url: str, width: int = 1280, scheme: Scheme = "light") -> Watched:
        page = new_page(browser, width, scheme)
        page.set_default_timeout(WAIT_MS)
        opened.append(page)
        watched = Watched(page)
        # A policy that was violated is an error of the console, too.
        page.on("pageerror", lambda error: watched.complaints.append(str(error)))
        page.on(
            "console",
            lambda message: (
                watched.complaints.append(message.text)
                if message.type in ("error", "warning")
                else None
            ),
        )
        page.on(
            "request",
            lambda request: (
                None if request.url.startswith(url) else watched.elsewhere.append(request.url)
            ),
        )
        page.goto(url)
        return watched

    yield open_at
    for page in opened:
        page.close()
