"""The modules that one gradient passes, as the page says."""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any

import pytest

from psrpc.v1 import coordinator_pb2 as pb
from tests.pserver.shards import session_of
from tests.test_architecture import MODULES, ROOT
from tests.worker.loop.fixtures import at_work, task
from tests.worker.scripted_coordinator import ScriptedCoordinator

MOST_ON_THE_LINE = 14
MOST_ENTERED = 50
"""Logging, metrics and clock apart."""

APART = {f"psrpc/ops/{name}.py" for name in ("clock", "logs", "threads", "tracing")} | {
    "worker/loop/step_times.py"
}
"""Logs, traces, figures and clocks."""


class Trace:
    """Our modules that any thread enters while it is on."""

    def __init__(self) -> None:
        self.on = False
        self.entered: set[str] = set()
        self._names = {str(path): str(path.relative_to(ROOT)) for path in MODULES.values()}

    def __call__(self, frame: FrameType, event: str, _found: Any) -> None:
        if self.on and event == "call" and frame.f_code.co_filename in self._names:
            self.entered.add(self._names[frame.f_code.co_filename])


@pytest.fixture
def trace(monkeypatch: pytest.MonkeyPatch) -> Iterator[Trace]:
    def register(
        _coordinator: ScriptedCoordinator, _request: object, _context: object
    ) -> pb.RegisterWorkerResponse:
        # Its first heartbeat comes after the test.
        session = session_of("worker-0")
        return pb.RegisterWorkerResponse(worker="worker-0", heartbeat_s=60, session=session)

    monkeypatch.setattr(ScriptedCoordinator, "RegisterWorker", register)
    made = Trace()
    threading.setprofile(made)
    sys.setprofile(made)
    yield made
    sys.setprofile(None)
    threading.setprofile(None)


def listed(begins: str, ends: str) -> set[str]:
    """The modules that docs/architecture.md names in between."""
    page = (ROOT / "docs" / "architecture.md").read_text()
    part = page[page.index(begins) : page.index(ends, page.index(begins))]
    return set(re.findall(r"`([\w/]+\.py)`", part.replace("tests/worker/loop", "")))


def test_a_dense_gradient_passes_what_the_page_says(trace: Trace) -> None:
    """In async mode, over gRPC: all that a worker and its shards do from one gradient to the
    next."""

    def during(batch: int) -> None:
        # Two steps: a shard may begin to wait for a request before the worker begins the step.
        trace.on = batch in (2, 3)

    with at_work(lambda _c, _s: [task(*range(13))], shm=False, during=during) as running:
        running.check(*range(13))
    line = listed(
        "| a lease says which batch; the worker", "Other modules that the gradient passes"
    )
    asked = listed(
        "Other modules that the gradient passes", "The computation of the gradient, before"
    )
    assert trace.entered - APART == line | asked
    assert not line & asked
    assert len(line) <= MOST_ON_THE_LINE
    assert len(line | asked) <= MOST_ENTERED
