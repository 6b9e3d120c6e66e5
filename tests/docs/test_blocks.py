"""Each block of code in README, tutorial and how-to pages is run, or says why not."""

from __future__ import annotations

import re

import pytest

from tests.docs.blocks import (
    AGAIN,
    ENGINE_PAGES,
    GOES_ON,
    INDENTED,
    INTERRUPTED,
    LOOSE,
    MEANWHILE,
    SAVED,
    SERVED,
    SHELL,
    TERMINALS,
    Block,
    followed_pages,
    read_blocks,
)
from tests.test_architecture import ROOT

PAGES = followed_pages()


def fault(block: Block) -> str:
    """The reason why the mark of a block is none, empty if it is one."""
    shell, python = block.language in SHELL, block.language == "python"
    if not block.verb:
        return "is neither marked `<!-- run -->` nor `<!-- not run: REASON -->`"
    if block.verb == "not run":
        return "" if len(block.how.split()) > 2 else "is not run and does not say why"
    if SAVED.fullmatch(block.how) or ((shell or python) and not block.how):
        return ""
    if python and block.how == GOES_ON:
        return ""
    if shell and block.how in (TERMINALS, SERVED, MEANWHILE):
        return ""
    if shell and any(form.fullmatch(block.how) for form in (INTERRUPTED, AGAIN)):
        return ""
    return f"is in {block.language or 'shell'} and cannot be run {block.how!r}"


@pytest.mark.parametrize("page", PAGES)
def test_every_block_is_marked(page: str) -> None:
    text = (ROOT / page).read_text()
    blocks = read_blocks(page, text)
    faults = [f"{block.where} {said}" for block in blocks if (said := fault(block))]
    assert faults == []
    loose = LOOSE.findall(re.sub(r"`<!--.*?-->`", "", text))
    assert len(loose) == sum(bool(block.verb) for block in blocks)


@pytest.mark.parametrize("page", PAGES)
def test_code_is_fenced(page: str) -> None:
    """An indented block has no place for a mark that readers of the source would see."""
    assert INDENTED.findall((ROOT / page).read_text()) == []


def test_the_pages_are_those_of_the_index() -> None:
    assert {"README.md", "docs/tutorial.md", "docs/fit.md", "CONTRIBUTING.md"} <= set(PAGES)
    assert "docs/architecture.md" not in PAGES
    assert set(ENGINE_PAGES) <= set(PAGES)


def marked(comment: str, language: str = "") -> Block:
    [block] = read_blocks("page.md", f"Do this:{comment}\n\n```{language}\ncommand\n```\n")
    return block


@pytest.mark.parametrize(
    ("comment", "language", "said"),
    [
        ("", "", "neither marked"),
        ("\n\n<!-- not run -->", "", "does not say why"),
        ("\n\n<!-- not run: needs a GPU -->", "", ""),
        (" <!-- run -->", "python", ""),
        ("\n\n<!-- run -->", "yaml", "cannot be run"),
        ("\n\n<!-- run: saved as job.yaml -->", "yaml", ""),
        ("\n\n<!-- run: somehow -->", "", "cannot be run"),
        (f"\n\n<!-- run: {TERMINALS} -->", "", ""),
        (f"\n\n<!-- run: {MEANWHILE} -->", "", ""),
        ('\n\n<!-- run: again until it prints "done" -->', "", ""),
        ('\n\n<!-- run: again until it prints "done" -->', "python", "cannot be run"),
        (f"\n\n<!-- run: {TERMINALS} -->", "python", "cannot be run"),
    ],
)
def test_marks_are_read(comment: str, language: str, said: str) -> None:
    found = fault(marked(comment, language))
    assert said in found if said else found == ""
