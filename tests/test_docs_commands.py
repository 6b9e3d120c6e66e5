"""Commands and code in Markdown can be run: options, targets of make and Python are real."""

from __future__ import annotations

import ast
import re
import shlex
import textwrap
from collections.abc import Iterator

import pytest

import coordinator.cli.__main__
import pserver.cli.__main__
import worker.cli.__main__
from tests.test_architecture import ROOT
from tests.test_docs_links import PAGES

PARSERS = {
    "coordinator": coordinator.cli.__main__.make_parser(),
    "pserver": pserver.cli.__main__.make_parser(),
    "worker": worker.cli.__main__.make_parser(),
}
BLOCK = re.compile(r"^( *)```(\w*)\n(.*?)^ *```", flags=re.MULTILINE | re.DOTALL)
INDENTED = re.compile(r"^    (?=\S).*(?:\n    .*)*", flags=re.MULTILINE)
PATTERN = re.compile(r"\.\.\.|\b[a-z]+\|[a-z]+|\[-")
"""A form of a command, and no command: ``ls|verify``, ``[--watch]``."""


def lines(page: str) -> Iterator[str]:
    """Lines of code of a page, continued ones joined."""
    text = (ROOT / page).read_text()
    blocks = [match[3] for match in BLOCK.finditer(text) if match[2] in ("", "sh", "bash")]
    blocks += [match[0] for match in INDENTED.finditer(BLOCK.sub("", text))]
    for block in blocks:
        joined = textwrap.dedent(block).replace("\\\n", " ")
        yield from (line.strip() for line in joined.splitlines())


COMMANDS = sorted(
    {
        line
        for page in PAGES
        if not page.startswith("docs/design/")
        for line in lines(page)
        if re.match(r"(coordinator|pserver|worker) [a-z]", line) and not PATTERN.search(line)
    }
)


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_can_be_read(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    program, *arguments = shlex.split(command.partition(" > ")[0], comments=True)
    try:
        PARSERS[program].parse_args(arguments)
    except SystemExit:
        pytest.fail(f"{command}: {capsys.readouterr().err}")


@pytest.mark.parametrize("page", PAGES)
def test_targets_of_make_exist(page: str) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    text = (ROOT / page).read_text()
    named = re.findall(r"(?:`|^ *)make ([a-z-]+(?: [a-z-]+)*)", text, flags=re.MULTILINE)
    assert {target for words in named if words for target in words.split()[:1]} <= targets


@pytest.mark.parametrize("page", PAGES)
def test_python_can_be_read(page: str) -> None:
    for match in BLOCK.finditer((ROOT / page).read_text()):
        if match[2] == "python":
            ast.parse(textwrap.dedent(match[1] + match[3]))


def test_the_readme_has_the_job_of_the_tutorial() -> None:
    codes = [
        next(m[3] for m in BLOCK.finditer((ROOT / page).read_text()) if "job = Job(" in m[3])
        for page in ("README.md", "docs/tutorial.md")
    ]
    assert ast.dump(ast.parse(codes[0])) == ast.dump(ast.parse(codes[1]))
