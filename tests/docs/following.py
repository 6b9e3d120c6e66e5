"""Follows a page: does what its blocks say, one after the other, as written."""

from __future__ import annotations

from tests.docs.blocks import (
    AGAIN,
    GOES_ON,
    INTERRUPTED,
    MEANWHILE,
    SAVED,
    SERVED,
    SHELL,
    TERMINALS,
    Block,
    read_blocks,
)
from tests.docs.host import Ended, Shell
from tests.test_architecture import ROOT


def blocks_to_run(page: str) -> list[Block]:
    """The blocks of a page that are marked as run."""
    blocks = read_blocks(page, (ROOT / page).read_text())
    return [block for block in blocks if block.verb == "run"]


def follow_page(page: str, host: Shell) -> list[Ended]:
    """Does what the blocks of a page say. Asserts that every command works; returns them all."""
    done: list[Ended] = []
    for block in _programs(blocks_to_run(page)):
        for ended in _follow(block, host):
            _check(block.where, ended)
            done.append(ended)
    for ended in host.wait_for_all():
        _check(page, ended)
        done.append(ended)
    return done


def _check(where: str, ended: Ended) -> None:
    assert ended.status == 0, f"{where}: exit {ended.status}\n{ended.command}\n{ended.output}"


def _programs(blocks: list[Block]) -> list[Block]:
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


def _follow(block: Block, host: Shell) -> list[Ended]:
    """Does what a block says; returns the commands that it took."""
    if saved := SAVED.fullmatch(block.how):
        (host.folder / saved[1]).write_text(block.code)
        return []
    if block.language not in SHELL:
        (host.folder / "program.py").write_text(block.code)
        return [host.run("python program.py")]
    if interrupted := INTERRUPTED.fullmatch(block.how):
        return [host.run_until(interrupted[1], block.code)]
    if again := AGAIN.fullmatch(block.how):
        return [host.run_again_until(again[1], block.code)]
    if block.how == MEANWHILE:
        host.run_meanwhile(block.code)
        return []
    if block.how == SERVED:
        lines = block.code.splitlines()
        servers = [line for line in lines if " serve " in line]
        return host.run_served(servers, "\n".join(line for line in lines if line not in servers))
    if block.how == TERMINALS:
        return host.run_together(block.code.splitlines())
    return [host.run(block.code)]
