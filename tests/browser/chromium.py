"""The browser that tests and pictures use. ``scripts/setup-browser`` installs it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

from playwright.sync_api import Browser, Page, sync_playwright

Scheme = Literal["light", "dark"]

HEIGHT = 900


@contextmanager
def chromium() -> Iterator[Browser]:
    """A headless one, while it is needed."""
    path = shutil.which("chromium") or shutil.which("chromium-browser")
    assert path is not None, "there is no Chromium; run scripts/setup-browser first"
    # As root, in a container, it cannot make its sandbox.
    arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=path, args=arguments)
        try:
            yield browser
        finally:
            browser.close()


def new_page(browser: Browser, width: int, scheme: Scheme) -> Page:
    """An empty page, ``width`` pixels wide, by day (``light``) or by night (``dark``)."""
    return browser.new_page(viewport={"width": width, "height": HEIGHT}, color_scheme=scheme)
