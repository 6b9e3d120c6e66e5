"""``make mistakes`` fails where a message comes too late, and names the mistake."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.mistakes import conftest
from tests.mistakes.report import LATE_S, Mistake

SOON = Mistake("a wrong port", ["PS204"], LATE_S)
LATE = Mistake("a firewall", ["PS209"], LATE_S + 0.1)


@pytest.mark.parametrize(
    ("made", "status", "named"),
    [
        ([SOON], 0, []),
        ([SOON, LATE], 1, ["told too late: a firewall (5.1 s; at most 5 s)"]),
    ],
)
def test_a_message_that_comes_too_late_is_named(
    made: list[Mistake],
    status: int,
    named: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(conftest, "MADE", made)
    config = SimpleNamespace(getoption={"--report": tmp_path / "mistakes.md"}.get)
    session: Any = SimpleNamespace(config=config, exitstatus=0)
    conftest.pytest_sessionfinish(session)
    assert session.exitstatus == status
    assert (tmp_path / "mistakes.md").read_text().count("](errors.md#ps2") == len(made)
    said: list[str] = []
    reporter: Any = SimpleNamespace(config=config, write_line=lambda line, **_: said.append(line))
    conftest.pytest_terminal_summary(reporter)
    assert said == named
