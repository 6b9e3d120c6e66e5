"""What the coordinator's event loop tells those who look on: newest status and history."""

from __future__ import annotations

import json
import math
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from coordinator.dashboard.recorder import Recorder
from coordinator.dashboard.series import Point, columns
from coordinator.dashboard.subscribers import PAGE, Audience
from coordinator.display.status_page import as_json
from psrpc.files.storage import read_json, replace_text
from psrpc.ops.logs import get_logger
from psrpc.v1.coordinator_pb2 import (
    Curves,
    DashboardEvent,
    GetDashboardResponse,
    GetJobStatusResponse,
)

log = get_logger()

NAME = "dashboard.json"
"""Of the file in the run directory."""

LARGEST = 16 << 20
"""Bytes of a file that is read; our own are a tenth of a megabyte."""


class Board:
    """Thread-safe: one lock guards everything but the file, and nothing slow happens while it is
    held."""

    def __init__(self, job: str, wall_clock: Callable[[], float]) -> None:
        """
        Args:
            job: how the job is called until it has been read.
            wall_clock: Unix time, in seconds.
        """
        self._lock = threading.Lock()
        self._wall_clock = wall_clock
        self._job = job
        self._started = wall_clock()
        self._status: GetJobStatusResponse | None = None
        self._looked = self._started
        self._recorder: Recorder | None = None
        self._path: Path | None = None
        self._refused = False
        self._saving = threading.Lock()
        self.audience = Audience(wall_clock)

    def open(self, run_id: str, run_dir: Path) -> None:
        """The job was read and its run directory is known: goes on with the history there."""
        recorder, path = Recorder(run_id), run_dir / NAME
        recorder.resume(_read(path), self._wall_clock())
        with self._lock:
            self._recorder, self._path = recorder, path
        # Whoever takes over knows from it that there was one before, however soon this one dies.
        self.save()

    def show(self, status: GetJobStatusResponse) -> None:
        """The newest state of the job, which nobody changes any more. Not more than about once a
        second: each is a point of the curves."""
        with self._lock:
            self._status, self._looked = status, self._wall_clock()
            if self._recorder is not None:
                self._recorder.look(status, self._looked)
        self.audience.changed()

    def status(self) -> dict[str, Any]:
        """``now``, when it was ``looked`` last and when this coordinator ``started`` (Unix time,
        seconds), and ``status``, which is what ``coordinator status --json`` prints; null before
        the job has been read."""
        with self._lock:
            status, looked = self._status, self._looked
        self.audience.asked(PAGE)
        return {
            "now": self._wall_clock(),
            "looked": looked,
            "started": self._started,
            "job": self._job,
            "status": None if status is None else as_json(status),
        }

    def history(self) -> dict[str, Any]:
        """Curves, of the last minutes and of the whole run, and events; all empty before the job
        has been read."""
        with self._lock:
            recorder = self._recorder or Recorder("")
            recent, whole = recorder.points.recent, recorder.points.whole
            width, events = recorder.points.width, recorder.events
        return {
            "run_id": recorder.run_id,
            "recent": columns(recent),
            "whole": columns(whole),
            "width": width,
            "events": events,
        }

    def message(self, viewer: str) -> GetDashboardResponse:
        """Both, of one moment.

        Args:
            viewer: who asks; another one from each connection.
        """
        with self._lock:
            recorder = self._recorder or Recorder("")
            told = GetDashboardResponse(
                now_s=self._wall_clock(),
                looked_s=self._looked,
                started_s=self._started,
                status=self._status,
                recent=_curves(recorder.points.recent),
                whole=_curves(recorder.points.whole),
                width=recorder.points.width,
                events=[DashboardEvent(**event) for event in recorder.events],
            )
        self.audience.asked(viewer)
        return told

    def save(self) -> None:
        """Writes the history to the run directory. A disk that refuses costs the history, and is
        said once."""
        with self._lock:
            if self._recorder is None or self._path is None:
                return
            path, document = self._path, self._recorder.to_json()
        # One at a time, but nobody who looks waits for the disk.
        with self._saving:
            try:
                replace_text(path, json.dumps(document, separators=(",", ":")), private=True)
                self._refused = False
            except OSError as error:
                if not self._refused:
                    self._refused = True
                    log.warning(
                        "the dashboard's history is not kept", why=os.strerror(error.errno or 0)
                    )


def _curves(points: Sequence[Point]) -> Curves:
    made = Curves()
    for name, values in columns(points).items():
        getattr(made, name).extend(math.nan if value is None else value for value in values)
    return made


def _read(path: Path) -> Any:
    """None where there is nothing that can be read."""
    try:
        return read_json(path, LARGEST)
    except (OSError, ValueError):
        return None
