"""Keeps the last answer of a remote coordinator for the browsers that this process serves."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from coordinator.core.lifecycle import OVER
from coordinator.dashboard.snapshots import PAGE, Subscribers
from coordinator.display.status_page import status_as_json
from psrpc.core.errors import CoordinatorUnreachable, PsError
from psrpc.v1.coordinator_pb2 import GetDashboardResponse


class Relay:
    """Mirrors the coordinator's ``DashboardSnapshots``. Thread-safe: one lock guards everything."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """``clock`` returns monotonic seconds."""
        self._clock = clock
        self._lock = threading.Lock()
        self._told = GetDashboardResponse()
        self._when = 0.0
        self._away: PsError | None = CoordinatorUnreachable("it has not been asked yet")
        self.subscribers = Subscribers(clock)

    def took(self, told: GetDashboardResponse) -> None:
        """Stores an answer of the coordinator, which the caller must not change any more."""
        with self._lock:
            self._told, self._when, self._away = told, self._clock(), None
        self.subscribers.changed()

    def lost(self, error: PsError) -> None:
        """Records the reason why the coordinator has not answered."""
        with self._lock:
            self._away = error

    @property
    def ended(self) -> bool:
        """Whether the job was over when the coordinator answered last."""
        with self._lock:
            return self._told.status.phase in OVER

    def status(self) -> dict[str, Any]:
        """Returns the same as ``DashboardSnapshots.status``, by the coordinator's clock. Raises
        PsError with the reason if the coordinator does not answer."""
        told, since_s = self._newest()
        self.subscribers.asked(PAGE)
        return {
            "now": told.now_s + since_s,
            "looked": told.looked_s,
            "started": told.started_s,
            "job": told.status.job,
            "status": status_as_json(told.status) if told.HasField("status") else None,
        }

    def history(self) -> dict[str, Any]:
        """Returns the same as ``DashboardSnapshots.history``. Raises PsError as :meth:`status`."""
        told, _ = self._newest()
        return {
            "run_id": told.status.run_id,
            "recent": status_as_json(told.recent),
            "whole": status_as_json(told.whole),
            "width": told.width,
            "events": [status_as_json(event) for event in told.events],
        }

    def _newest(self) -> tuple[GetDashboardResponse, float]:
        """Returns the newest answer and its age in seconds."""
        with self._lock:
            if self._away is not None:
                # Cleared each time, or the error would collect a traceback entry per raise.
                raise self._away.with_traceback(None)
            return self._told, self._clock() - self._when
