"""Blocks of code in the pages that users follow, and what their marks say.

A comment before a block, on a line of its own or at the end of the text before it, says whether
``make test-docs`` runs the block::

    <!-- run -->                                  a shell script, or a Python program
    <!-- run: with the block before -->           Python that goes on where that block ends
    <!-- run: saved as NAME -->                   written to a file of this name
    <!-- run: until "TEXT", then Ctrl-C -->       interrupted once it has printed TEXT
    <!-- run: each line in a terminal of its own -->
    <!-- run: each serve in a terminal of its own, then the others until they work -->
                                                  then Ctrl-C in the first ones
    <!-- run: again until it prints "TEXT" -->
    <!-- run: in a terminal of its own, meanwhile -->
                                                  while the next blocks run; ends with the page
    <!-- not run: REASON -->

All blocks of a page run one after the other in one copy of the repository, on a host called
``host``. Those of :data:`ENGINE_PAGES` run on the engine of their page by ``make test-launchers``,
with what only a site knows in the environment. A block in the language ``text`` is not for running,
and has no mark.
"""

from __future__ import annotations

import re
import textwrap
from dataclasses import dataclass

from tests.test_architecture import ROOT

BLOCK = re.compile(r"^( *)```([^\n]*)\n(.*?)^ *```$", flags=re.MULTILINE | re.DOTALL)
MARK = re.compile(r"<!-- (run|not run)(?:: ((?:(?!-->).)+?))? -->\s*\Z", flags=re.DOTALL)
LOOSE = re.compile(r"<!-- *(?:not )?run\b.*?-->", flags=re.DOTALL)
INDENTED = re.compile(r"\n\n( {4}(?=\S)(?!- |\d\. ).*)")

SAVED = re.compile(r"saved as (\S+)")
INTERRUPTED = re.compile(r'until "(.+)", then Ctrl-C')
TERMINALS = "each line in a terminal of its own"
SERVED = "each serve in a terminal of its own, then the others until they work"
AGAIN = re.compile(r'again until it prints "(.+)"')
MEANWHILE = "in a terminal of its own, meanwhile"
GOES_ON = "with the block before"

ENGINE_PAGES = ("docs/kubernetes.md", "docs/ray.md", "docs/slurm.md", "docs/spark.md")
"""Pages whose blocks need an engine: tests/launchers follows them."""

SHELL = ("", "sh", "bash")


@dataclass(frozen=True)
class Block:
    """A block of code.

    Attributes:
        page: path of the page in the repository.
        line: number of its first line, of the fence.
        language: as the fence says; empty for a shell.
        code: without indentation.
        verb: ``run`` or ``not run``; empty without a mark.
        how: how it is run, or why not; may be empty.
    """

    page: str
    line: int
    language: str
    code: str
    verb: str
    how: str

    @property
    def where(self) -> str:
        """Page and line."""
        return f"{self.page}:{self.line}"


def followed_pages() -> list[str]:
    """The README and all tutorials and how-to pages of the index."""
    index = (ROOT / "docs" / "README.md").read_text()
    parts = dict(re.findall(r"^## (.+)\n((?:(?!## ).*\n)+)", index, flags=re.MULTILINE))
    linked = re.findall(r"^\| \[[^\]]*\]\(([^)]+\.md)\)", parts["Tutorial"] + parts["How-to"], re.M)
    paths = [(ROOT / "docs" / path).resolve() for path in linked]
    return ["README.md", *(path.relative_to(ROOT).as_posix() for path in paths)]


def read_blocks(page: str, text: str) -> list[Block]:
    """All blocks of a page but those in the language ``text``."""
    blocks = []
    for match in BLOCK.finditer(text):
        if match[2] == "text":
            continue
        before = text[: match.start()]
        mark = MARK.search(before)
        verb, how = (mark[1], mark[2] or "") if mark else ("", "")
        line = before.count("\n") + 1
        code = textwrap.dedent(match[3])
        blocks.append(Block(page, line, match[2], code, verb, re.sub(r"\s*\n\s*", " ", how)))
    return blocks
