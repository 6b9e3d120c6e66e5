"""Options and signals of all tests."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    # Under nohup. Processes that tests start would inherit that, and not a handler.
    signal.signal(signal.SIGHUP, lambda *_: None)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--report",
        type=Path,
        metavar="FILE",
        help="write what tests of one folder have seen there, as a page of the docs",
    )
