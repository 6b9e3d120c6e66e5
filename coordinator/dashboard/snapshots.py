"""Passes the newest status and history from the coordinator's event loop to viewers."""

from __future__ import annotations

import asyncio
import json
import math
import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from coordinator.dashboard.recorder import Recorder
from coordinator.dashboard.series import Point, columns
from coordinator.display.status_page import status_as_json
from psrpc.files.storage import read_json, replace_text
from psrpc.ops.logs import get_logger
from psrpc.v1.coordinator_pb2 import (
    Curves,
    DashboardEvent,
    GetDashboardResponse,
    GetJobStatusResponse,
)

LOOK_EVERY_S = 0.9
"""Minimum interval between two status readings: a bit less than two of the coordinator's ticks."""

LOOKED_SHARE = 0.02
"""Maximum of the job loop's time that status readings take: with a thousand members one takes tens
of milliseconds, in which no call is answered."""

LAST_LOOK_S = 4.0
"""Most seconds that the coordinator stays for viewers to see the end of the job."""

SAVE_EVERY_S = 10.0
"""Seconds of history that a killed coordinator loses at most."""

WATCHED_S = 5.0
"""A viewer counts as present for so long after its last request."""

PAGE = "page"
"""The viewer that stands for all browsers of this process."""
log = get_logger()

NAME = "dashboard.json"
"""Name of the file in the run directory."""

LARGEST = 16 << 20
"""Maximum size of a file to read, in bytes; actual files have a tenth of a megabyte."""


class DashboardSnapshots:
    """Holds the newest status and the history. Thread-safe: one lock guards everything but the
    file, and no slow work happens under it."""

    def __init__(self, job: str, wall_clock: Callable[[], float]) -> None:
        """
        Args:
            job: name of the job until its description is known.
            wall_clock: returns Unix time in seconds.
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
        self.subscribers = Subscribers(wall_clock)

    def open(self, run_id: str, run_dir: Path) -> None:
        """Begins to record a run, continuing the history in its run directory."""
        recorder, path = Recorder(run_id), run_dir / NAME
        recorder.resume(_read(path), self._wall_clock())
        with self._lock:
            self._recorder, self._path = recorder, path
        # Saved at once, so that a successor knows of this coordinator however soon it dies.
        self.save()

    def show(self, status: GetJobStatusResponse) -> None:
        """Records the newest status, which must not change any more. Call it about once a second
        at most: each status is a point of the curves."""
        with self._lock:
            self._status, self._looked = status, self._wall_clock()
            if self._recorder is not None:
                self._recorder.look(status, self._looked)
        self.subscribers.changed()

    def status(self) -> dict[str, Any]:
        """Returns ``now``, the time ``looked`` of the last status and the start time ``started`` of
        this coordinator (Unix time in seconds), and ``status`` as ``coordinator status --json``
        prints it, null before the job has been read."""
        with self._lock:
            status, looked = self._status, self._looked
        self.subscribers.asked(PAGE)
        return {
            "now": self._wall_clock(),
            "looked": looked,
            "started": self._started,
            "job": self._job,
            "status": None if status is None else status_as_json(status),
        }

    def history(self) -> dict[str, Any]:
        """Returns curves of the last minutes and of the whole run, and events; all empty before the
        job has been read."""
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
        """Returns status and history of one moment.

        Args:
            viewer: identifies the connection of the viewer.
        """
        with self._lock:
            recorder = self._recorder or Recorder("")
            message = GetDashboardResponse(
                now_s=self._wall_clock(),
                looked_s=self._looked,
                started_s=self._started,
                status=self._status,
                recent=_curves(recorder.points.recent),
                whole=_curves(recorder.points.whole),
                width=recorder.points.width,
                events=[DashboardEvent(**event) for event in recorder.events],
            )
        self.subscribers.asked(viewer)
        return message

    def save(self) -> None:
        """Writes the history to the run directory. If the disk refuses, the history is not kept,
        with one warning."""
        with self._lock:
            if self._recorder is None or self._path is None:
                return
            path, document = self._path, self._recorder.to_json()
        # A lock of its own: one save at a time, without making readers wait for the disk.
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
    """Returns the JSON document in a file; None if there is no readable one."""
    try:
        return read_json(path, LARGEST)
    except (OSError, ValueError):
        return None


class Subscribers:
    """Tracks which viewers have seen the newest state. Thread-safe."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """``clock`` returns seconds from any origin."""
        self._clock = clock
        self._changed = threading.Condition()
        self._asked: dict[str, float] = {}
        self._waits: set[str] = set()

    def asked(self, viewer: str) -> None:
        """Records that a viewer gets the newest state."""
        with self._changed:
            self._asked = self._watching()
            self._asked[viewer] = self._clock()
            self._waits.discard(viewer)
            self._changed.notify_all()

    def changed(self) -> None:
        """Records that there is a newer state, which no viewer has seen yet."""
        with self._changed:
            self._waits = set(self._watching())

    def wait_until_seen(self, timeout_s: float) -> bool:
        """Waits until all present viewers have seen the newest state; returns whether they have."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._waits, timeout_s)

    def _watching(self) -> dict[str, float]:
        now = self._clock()
        return {viewer: at for viewer, at in self._asked.items() if now - at < WATCHED_S}


class DashboardSampler:
    """Updates ``DashboardSnapshots`` from ``open`` to ``close``, and does nothing before. Used
    within one event loop."""

    def __init__(self, board: DashboardSnapshots) -> None:
        self._board = board
        self._status: Callable[[], GetJobStatusResponse] | None = None
        self._look_due = self._save_due = 0.0
        self._saving: asyncio.Future[None] | None = None

    def open(self, run_id: str, run_dir: Path, status: Callable[[], GetJobStatusResponse]) -> None:
        """Starts the updates; ``status`` returns the job's status."""
        self._board.open(run_id, run_dir)
        self._status = status
        self._save_due = time.monotonic() + SAVE_EVERY_S

    def tick(self) -> None:
        """Reads the status if due; saves the history on another thread if due."""
        if self._status is None:
            return
        now = time.monotonic()
        if now >= self._look_due:
            self._board.show(self._status())
            took_s = time.monotonic() - now
            self._look_due = now + max(LOOK_EVERY_S, took_s / LOOKED_SHARE)
        if now >= self._save_due and (self._saving is None or self._saving.done()):
            self._save_due = now + SAVE_EVERY_S
            self._saving = asyncio.get_running_loop().run_in_executor(None, self._board.save)

    async def close(self) -> None:
        """Reads the status for the last time, waits a moment until the viewers have seen it, and
        saves the history. May be called twice."""
        if self._status is None:
            return
        self._board.show(self._status())
        self._status = None
        await asyncio.to_thread(self._board.subscribers.wait_until_seen, LAST_LOOK_S)
        if self._saving is not None:
            await self._saving
        await asyncio.to_thread(self._board.save)
