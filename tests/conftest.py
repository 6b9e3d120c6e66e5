"""Options and signals of all tests."""

from __future__ import annotations

import gc
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# The same examples on every machine, however slow it is.
settings.register_profile(
    "reproducible",
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("reproducible")

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


def pytest_collection_finish() -> None:
    """Keeps what all tests import out of searches for garbage: each took 0.3 s and more."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def own_signals() -> Iterator[None]:
    """A command takes signals over for the rest of its process."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    handlers = {number: signal.getsignal(number) for number in numbers}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)
