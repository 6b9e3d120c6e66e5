"""Every code that an error may have is explained, and nothing is explained that there is not."""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path

import pytest

from psrpc.core import errors
from psrpc.core.errors import PsError

ROOT = Path(__file__).resolve().parents[3]
ROLES = ("psrpc", "coordinator", "pserver", "worker")
CODE = re.compile(r"(PS\d{3})(: |$)")

TREE = [cls for _, cls in inspect.getmembers(errors, inspect.isclass) if issubclass(cls, PsError)]


def codes_in_source() -> set[str]:
    """All strings that are a code, or begin with one."""
    found = set()
    for role in ROLES:
        for path in (ROOT / role).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    match = CODE.match(node.value)
                    if match:
                        found.add(match[1])
    # An example in a docstring would count as well; none begins with a code.
    return found


SECTIONS = re.split(r"^### (PS\d{3})$", (ROOT / "docs/errors.md").read_text(), flags=re.MULTILINE)
PAGES = dict(zip(SECTIONS[1::2], SECTIONS[2::2], strict=True))


def test_every_code_has_a_section_and_every_section_a_code() -> None:
    used = codes_in_source()
    assert used - set(PAGES) == set(), "not in docs/errors.md"
    assert set(PAGES) - used == set(), "explained, and never used"
    assert len(PAGES) == len(SECTIONS) // 2, "explained twice"


@pytest.mark.parametrize("code", sorted(PAGES))
def test_a_section_says_what_to_do(code: str) -> None:
    assert re.match(r"\n\n\*\*[^*]+\.\*\*", PAGES[code])
    assert "*What to do:* " in PAGES[code]


def test_classes_have_codes_of_their_own() -> None:
    codes = [cls.code for cls in TREE]
    assert len(set(codes)) == len(codes)
    assert set(codes) <= set(PAGES)
