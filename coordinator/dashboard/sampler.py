"""The coordinator looks at its job once a second, and keeps what it has seen of the run."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

from coordinator.dashboard.snapshots import Board
from psrpc.v1.coordinator_pb2 import GetJobStatusResponse

LOOK_EVERY_S = 0.9
"""Between two looks at the job, at least: a bit less than two of the coordinator's ticks."""

LAST_LOOK_S = 4.0
"""How long the coordinator stays for those who look on to see how the job has ended."""

SAVE_EVERY_S = 10.0
"""Seconds of history that a coordinator that is killed loses at most."""


class Chronicle:
    """Writes a board from ``open`` to ``close``, and does nothing before. Used within one event
    loop."""

    def __init__(self, board: Board) -> None:
        self._board = board
        self._status: Callable[[], GetJobStatusResponse] | None = None
        self._look_due = self._save_due = 0.0
        self._saving: asyncio.Future[None] | None = None

    def open(self, run_id: str, run_dir: Path, status: Callable[[], GetJobStatusResponse]) -> None:
        """The job has been read; ``status`` says how it stands."""
        self._board.open(run_id, run_dir)
        self._status = status
        self._save_due = time.monotonic() + SAVE_EVERY_S

    def tick(self) -> None:
        """Looks at the job if it is time to; the disk is written to on another thread."""
        if self._status is None:
            return
        now = time.monotonic()
        if now >= self._look_due:
            self._look_due = now + LOOK_EVERY_S
            self._board.show(self._status())
        if now >= self._save_due and (self._saving is None or self._saving.done()):
            self._save_due = now + SAVE_EVERY_S
            self._saving = asyncio.get_running_loop().run_in_executor(None, self._board.save)

    async def close(self) -> None:
        """Looks at the job for the last time, waits for a moment until those who look on have seen
        it, and keeps the history. May be called twice."""
        if self._status is None:
            return
        self._board.show(self._status())
        self._status = None
        await asyncio.to_thread(self._board.audience.wait_until_seen, LAST_LOOK_S)
        if self._saving is not None:
            await self._saving
        await asyncio.to_thread(self._board.save)
