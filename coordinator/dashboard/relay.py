"""What a coordinator elsewhere has told last, for browsers that ask this process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from coordinator.core.lifecycle import ENDED
from coordinator.dashboard.snapshots import PAGE, Audience
from coordinator.display.status_page import as_json
from psrpc.core.errors import CoordinatorUnreachable, PsError
from psrpc.v1.coordinator_pb2 import GetDashboardResponse


class Relay:
    """Shows the same as the coordinator's own board. Thread-safe: one lock guards everything."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """``clock``: monotonic seconds."""
        self._clock = clock
        self._lock = threading.Lock()
        self._told = GetDashboardResponse()
        self._when = 0.0
        self._away: PsError | None = CoordinatorUnreachable("it has not been asked yet")
        self.audience = Audience(clock)

    def took(self, told: GetDashboardResponse) -> None:
        """The coordinator has answered; nobody changes the answer any more."""
        with self._lock:
            self._told, self._when, self._away = told, self._clock(), None
        self.audience.changed()

    def lost(self, error: PsError) -> None:
        """The coordinator has not answered, and why."""
        with self._lock:
            self._away = error

    @property
    def ended(self) -> bool:
        """Whether the job was over when the coordinator answered last."""
        with self._lock:
            return self._told.status.phase in ENDED

    def status(self) -> dict[str, Any]:
        """As :meth:`Board.status`, by the coordinator's clock. Raises PsError: it does not answer;
        why."""
        told, since_s = self._newest()
        self.audience.asked(PAGE)
        return {
            "now": told.now_s + since_s,
            "looked": told.looked_s,
            "started": told.started_s,
            "job": told.status.job,
            "status": as_json(told.status) if told.HasField("status") else None,
        }

    def history(self) -> dict[str, Any]:
        """As :meth:`Board.history`. Raises PsError: the coordinator does not answer; why."""
        told, _ = self._newest()
        return {
            "run_id": told.status.run_id,
            "recent": as_json(told.recent),
            "whole": as_json(told.whole),
            "width": told.width,
            "events": [as_json(event) for event in told.events],
        }

    def _newest(self) -> tuple[GetDashboardResponse, float]:
        """The newest answer, and how many seconds ago it came."""
        with self._lock:
            if self._away is not None:
                # Each time anew: or it would collect the places where it was raised.
                raise self._away.with_traceback(None)
            return self._told, self._clock() - self._when
