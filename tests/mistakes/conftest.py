"""The table of what users do wrong, and of what they are told: ``make mistakes``."""

from __future__ import annotations

import re
from collections.abc import Generator
from pathlib import Path

import pytest

from tests.mistakes.commands import SAID

ERRORS = Path(__file__).resolve().parents[2] / "docs" / "errors.md"
TITLES = dict(
    re.findall(r"^### (PS\d{3})\n\n\*\*(.+?)\.?\*\*", ERRORS.read_text(), flags=re.MULTILINE)
)
HEAD = """# What users do wrong

Made by `make mistakes`: each line is a test that makes the mistake and reads the answer. Seconds
are those of the whole test, with the servers and processes that it starts (TensorFlow alone takes
three) and, in the first of a file, imports: nobody waits longer for the answer.

| mistake | answer | seconds |
| --- | --- | ---: |
"""

LINES: list[str] = []


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    codes, SAID[:] = list(dict.fromkeys(SAID)), []
    if report.when == "call" and report.passed:
        found = re.fullmatch(r".*\[(.*)\]", item.name)
        name = found[1] if found else item.name.removeprefix("test_").replace("_", " ")
        answers = [f"[{code}](errors.md#{code.lower()}): {TITLES[code]}" for code in codes]
        LINES.append(f"| {name} | {'; '.join(answers) or 'in words'} | {report.duration:.1f} |\n")
    return report


def pytest_sessionfinish(session: pytest.Session) -> None:
    report: Path | None = session.config.getoption("--report")
    if report is not None and LINES:
        report.write_text(HEAD + "".join(LINES))
