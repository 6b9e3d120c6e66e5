"""The table of what trains and what does not: ``make keras``."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.keras_api.report import LAYERS, OPTIMIZERS, document


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    report: Path | None = session.config.getoption("--report")
    if report is not None and LAYERS and OPTIMIZERS:
        report.write_text(document(LAYERS, OPTIMIZERS))
