"""Options and signals of all tests."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Iterator
from itertools import groupby, zip_longest
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

WAITING = {"benchmarks", "chaos", "e2e", "faults"}
"""Folders of clusters, which wait for most of their time: for processes, leases and deadlines."""

# Until pytest_collection_finish. Imports make no garbage, and looking for it takes a fifth of their
# time.
gc.disable()

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


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Among several processes, lets files that wait and files that compute take turns; of the
    latter, those with the most slow tests are first."""
    if not hasattr(config, "workerinput"):
        return
    files = [list(tests) for _, tests in groupby(items, lambda item: item.path)]
    files.sort(key=_slow, reverse=True)
    waiting = [tests for tests in files if _slow(tests) and tests[0].path.parent.name in WAITING]
    if waiting:
        computing = [tests for tests in files if tests not in waiting]
        turns = zip_longest(waiting, computing, fillvalue=())
        items[:] = [item for turn in turns for tests in turn for item in tests]


def _slow(tests: list[pytest.Item]) -> int:
    """How many of the tests are slow."""
    return sum(item.get_closest_marker("slow") is not None for item in tests)


def pytest_collection_finish() -> None:
    """Keeps what all tests import out of searches for garbage: each took 0.3 s and more."""
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.fixture
def own_signals() -> Iterator[None]:
    """A command takes signals over for the rest of its process."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    handlers = {number: signal.getsignal(number) for number in numbers}
    before = signal.set_wakeup_fd(-1)
    yield
    # The command would still hear of a signal that a later test sends, and a worker leaves some
    # seconds after it, with this process.
    heard = signal.set_wakeup_fd(before)
    if heard != -1:
        os.close(heard)
    for number, handler in handlers.items():
        signal.signal(number, handler)
