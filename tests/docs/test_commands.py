"""The commands of README, tutorial and how-to pages do what the pages say: ``make test-docs``.

Each page is followed from its beginning to its end, as written, on a host of its own; pages that
need an engine are followed by tests/launchers.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.blocks import ENGINE_PAGES, followed_pages
from tests.docs.following import blocks_to_run, follow_page
from tests.docs.host import Host, unsupported

pytestmark = pytest.mark.docs

PAGES = [page for page in followed_pages() if page not in ENGINE_PAGES and blocks_to_run(page)]


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("page", PAGES)
def test_a_page_can_be_followed(page: str, tmp_path: Path) -> None:
    if why := unsupported():
        pytest.skip(f"needs a network namespace: {why}")
    with Host(tmp_path) as host:
        follow_page(page, host)
