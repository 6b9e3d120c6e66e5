"""The commands of README, tutorial and how-to pages do what the pages say: ``make test-docs``.

Each page is followed from its beginning to its end, as written, on a host of its own.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.blocks import (
    GOES_ON,
    INTERRUPTED,
    SAVED,
    SERVED,
    SHELL,
    TERMINALS,
    Block,
    followed_pages,
    read_blocks,
)
from tests.docs.host import Ended, Host, unsupported
from tests.test_architecture import ROOT

pytestmark = pytest.mark.docs

PAGES = [
    page
    for page in followed_pages()
    if any(block.verb == "run" for block in read_blocks(page, (ROOT / page).read_text()))
]


def programs(blocks: list[Block]) -> list[Block]:
    """The blocks to run, Python that goes on joined with what it goes on with."""
    joined: list[Block] = []
    for block in blocks:
        if block.how == GOES_ON:
            before = joined.pop()
            assert before.language == "python", f"{block.where} goes on with no Python"
            code = f"{before.code}\n{block.code}"
            block = Block(block.page, before.line, "python", code, "run", before.how)
        joined.append(block)
    return joined


def follow(block: Block, host: Host) -> list[Ended]:
    """Does what a block says; returns the commands that it took."""
    if saved := SAVED.fullmatch(block.how):
        (host.folder / saved[1]).write_text(block.code)
        return []
    if block.language not in SHELL:
        (host.folder / "program.py").write_text(block.code)
        return [host.run("python program.py")]
    if interrupted := INTERRUPTED.fullmatch(block.how):
        return [host.run_until(interrupted[1], block.code)]
    if block.how == SERVED:
        lines = block.code.splitlines()
        servers = [line for line in lines if " serve " in line]
        return host.run_served(servers, "\n".join(line for line in lines if line not in servers))
    if block.how == TERMINALS:
        return host.run_together(block.code.splitlines())
    return [host.run(block.code)]


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("page", PAGES)
def test_a_page_can_be_followed(page: str, tmp_path: Path) -> None:
    if why := unsupported():
        pytest.skip(f"needs a network namespace: {why}")
    blocks = [b for b in read_blocks(page, (ROOT / page).read_text()) if b.verb == "run"]
    with Host(tmp_path) as host:
        for block in programs(blocks):
            for ended in follow(block, host):
                said = f"{block.where}: exit {ended.status}\n{ended.command}\n{ended.output}"
                assert ended.status == 0, said
