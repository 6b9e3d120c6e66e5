"""The table of what users do wrong, and of what they are told: ``make mistakes``."""

from __future__ import annotations

import re
from collections.abc import Generator
from pathlib import Path

import pytest

from tests.mistakes.commands import SAID
from tests.mistakes.report import Mistake, document, late

MADE: list[Mistake] = []


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    codes, SAID[:] = list(dict.fromkeys(SAID)), []
    if report.when == "call" and report.passed:
        found = re.fullmatch(r".*\[(.*)\]", item.name)
        name = found[1] if found else item.name.removeprefix("test_").replace("_", " ")
        MADE.append(Mistake(name, codes, report.duration))
    return report


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    report: Path | None = session.config.getoption("--report")
    if report is not None and MADE:
        report.write_text(document(MADE))
        if late(MADE):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if terminalreporter.config.getoption("--report"):
        for line in late(MADE):
            terminalreporter.write_line(line, red=True)
