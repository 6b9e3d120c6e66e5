"""Options of all tests."""

from __future__ import annotations

from pathlib import Path

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--report",
        type=Path,
        metavar="FILE",
        help="write what tests/security or tests/mistakes have seen there, as a table for the docs",
    )
