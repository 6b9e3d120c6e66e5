"""The signals that drain or stop a coordinator, before and while it has a job."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Coroutine
from typing import Any, TypeVar

from coordinator.job.job_run import JobRun
from psrpc.ops.exit_status import DONE, after_signal
from psrpc.ops.process import EARLY_SIGNAL, StopSignals

Result = TypeVar("Result")


class JobSignals:
    """Handles signals: SIGTERM and SIGHUP drain the job, SIGINT stops it. Before there is a
    :class:`JobRun`, each cancels the work in progress. One that comes while there is neither is
    kept for the next work, which it cancels, or for the JobRun. SIGUSR1 ends a job that trains as
    done."""

    def __init__(self) -> None:
        self.status = DONE
        """Exit status of a process that a signal ended before it had a JobRun."""
        self._job_run: JobRun | None = None
        self._early: asyncio.Task[Any] | None = None
        self._came: int | None = None
        """The last signal that no JobRun has received yet."""
        self._signals = StopSignals()

    def install(self) -> None:
        """Handles signals from now on, in the running event loop."""
        loop = asyncio.get_running_loop()
        for number in self._signals.numbers:
            loop.add_signal_handler(number, self._heard, number)
        loop.add_signal_handler(EARLY_SIGNAL, self._end_early)

    async def unless_stopped(self, work: Coroutine[Any, Any, Result]) -> Result | None:
        """Returns the result of ``work``, or None if a signal came before this method returns."""
        if self._came is not None:
            work.close()
            return None
        self._early = early = asyncio.create_task(work)
        try:
            result = await early
        except asyncio.CancelledError:
            return None
        # The signal may have come after the task finished, when cancelling has no effect.
        return result if self._came is None else None

    def pass_on_to(self, job_run: JobRun) -> None:
        """Passes later signals, and one that came before, to ``job_run``."""
        self._job_run = job_run
        if self._came is not None:
            self._signalled(self._came)

    def _end_early(self) -> None:
        if self._job_run is not None:
            self._job_run.end_early()

    def _heard(self, number: int) -> None:
        if self._signals.says(number):
            self._signalled(number)

    def _signalled(self, number: int) -> None:
        self.status, self._came = after_signal(number), number
        if self._job_run is not None:
            self._came = None
            self._job_run.stop() if number == signal.SIGINT else self._job_run.drain()
        elif self._early is not None:
            self._early.cancel()
