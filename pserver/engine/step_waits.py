"""Waits in ssp mode: a worker that is too far ahead gets parameters when others have caught up."""

from __future__ import annotations

import threading
from dataclasses import replace

from pserver.core.requests import PullRequest, PushRequest, PushResult
from pserver.core.step_clocks import StepClocks
from pserver.engine.gate import Gate
from psrpc.core.commands import WorkerClock
from psrpc.core.errors import NotReady
from psrpc.ops.clock import Clock


class StepWaits:
    """Delays workers that are too far ahead of others. ``changed`` is notified of each step;
    callers hold its lock, which is the shard's.

    Attributes:
        clocks: the step clocks of the present generation.
    """

    def __init__(self, changed: threading.Condition, gate: Gate, clock: Clock) -> None:
        """``clock`` measures waits."""
        self.clocks = StepClocks(gate.identity.settings.staleness)
        self._changed = changed
        self._gate = gate
        self._clock = clock
        self._closed = False

    def count(self, push: PushRequest, clock: WorkerClock | None) -> bool:
        """Counts an admitted push. Returns whether its worker is too far ahead now; False without a
        ``clock``."""
        if self._gate.identity.settings.staleness is None:
            return False
        if clock is not None:
            self.clocks.enter(push.worker, clock.entry, clock.steps)
        if self.clocks.step(push.worker, push.attempt.number):
            self._changed.notify_all()
        return clock is not None and self.clocks.waits(push.worker)

    def after(self, push: PushRequest, result: PushResult, timeout_s: float) -> PushResult:
        """Waits until the worker of a push is not too far ahead. Returns ``result`` with the time
        waited, and with ``behind`` set if ``timeout_s`` passed first."""
        began = self._clock.now()
        behind = not self._caught_up(push, timeout_s)
        waited_us = int((self._clock.now() - began) * 1e6)
        return replace(result, behind=behind, waited_us=waited_us)

    def before(self, pull: PullRequest, timeout_s: float) -> None:
        """Waits until the worker of an admitted pull is not too far ahead; a pull without a clock
        does not wait.

        Raises:
            NotReady: ``timeout_s`` passed first.
        """
        if pull.clock is None:
            return
        self.clocks.enter(pull.worker, pull.clock.entry, pull.clock.steps)
        if not self._caught_up(pull, timeout_s):
            awaited = self.clocks.reason(pull.worker)
            raise NotReady(f"shard {self._gate.identity.shard} waits for {awaited}")

    def close(self) -> None:
        """Ends all waits, present and future."""
        self._closed = True
        self._changed.notify_all()

    def _caught_up(self, request: PushRequest | PullRequest, timeout_s: float) -> bool:
        def over() -> bool:
            self._gate.admit_worker(request)
            return not self.clocks.waits(request.worker) or self._closed

        return self._changed.wait_for(over, timeout_s) and not self._closed
