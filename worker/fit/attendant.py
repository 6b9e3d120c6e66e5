"""Attends a job from the process that called ``fit``: waits for its holds and ends them."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from coordinator.client.client import CoordinatorClient
from psrpc.core.errors import DeadlinePassed, JobFailed, NotReady, PsError
from psrpc.core.names import ADDRESS
from psrpc.files.run_paths import read_summary
from psrpc.ops.logs import get_logger
from psrpc.options.locate import security_of_run
from psrpc.v1 import coordinator_pb2 as pb
from worker.fit.processes import LEAVE_S, HostRun

log = get_logger()

RETRY_S = 0.02
"""First pause, in seconds, between two tries to reach the coordinator; later ones double."""

LONGEST_RETRY_S = 0.5

LOOK_S = 0.25
"""Seconds between two looks at the progress of the job."""

_BEYOND = 2**62
"""More batches than a job has."""

Answer = TypeVar("Answer")

ANSWER_S = 120.0
"""Seconds that a coordinator may be away, as it is while it restarts."""


@dataclass(frozen=True)
class HeldJob:
    """A job that holds, that is, waits for its attendant, after ``at`` batches of all epochs.

    Attributes:
        checkpoint: the checkpoint of this state.
        evaluation: results of the epoch that has just ended, by name; empty inside of an epoch.
        over: whether the job is done, so that it no longer waits.
    """

    at: int
    checkpoint: Path
    evaluation: Mapping[str, float]
    over: bool = False


class Attendant:
    """The attendant of one run. Logs the job's warnings, each once. Not thread-safe."""

    def __init__(self, run_dir: Path, up: HostRun) -> None:
        self._run_dir = run_dir
        self._up = up
        self._client: CoordinatorClient | None = None
        self._warnings: list[str] = []

    def close(self) -> None:
        """Closes the connection."""
        if self._client is not None:
            self._client.close()
            self._client = None

    def stop(self) -> None:
        """Stops a job that has not ended: work under way is finished and saved. Waits for that."""
        self._up.stop()
        with contextlib.suppress(JobFailed):
            # The coordinator stays until its attendant has heard of the end.
            self.await_hold(_BEYOND)

    def await_hold(self, after: int, look: Callable[[int], None] | None = None) -> HeldJob:
        """Waits until the job holds at more than ``after`` batches (-1: for the first time), or
        ends. While it trains, calls ``look`` with the number of batches done, several times a
        second, if the number has changed.

        Raises:
            JobFailed: the job ended without being done; the message says why.
        """
        seen = -1

        def ask(client: CoordinatorClient) -> pb.AwaitHoldResponse:
            nonlocal seen
            while look is not None and (done := client.get_job_status().batches) != seen:
                seen = done
                look(done)
                with contextlib.suppress(DeadlinePassed):
                    return client.await_hold(after, LOOK_S)
            return client.await_hold(after)

        while True:
            answer = self._call(ask)
            if answer is None:
                return self._end()
            self._warn(answer.warnings)
            if answer.held or answer.phase == "done":
                checkpoint = self._run_dir / "checkpoints" / Path(answer.checkpoint).name
                return HeldJob(answer.at, checkpoint, dict(answer.evaluation), not answer.held)
            if answer.phase == "failed":
                # If ``coordinator up`` has stopped the job itself, only it knows the reason.
                status = self._up.wait(LEAVE_S)
                raise JobFailed(answer.reason if status is None else self._up.why())

    def end_hold(self, at: int, until: int, rate: float | None = None, restore: str = "") -> None:
        """Lets the job go on from ``at`` batches until ``until`` are done; see
        :meth:`CoordinatorClient.end_hold`. Raises JobFailed."""
        self._call(lambda client: client.end_hold(at, until, rate=rate, restore=restore))

    def newest_checkpoint(self) -> Path | None:
        """Returns the newest checkpoint of a run that has ended; None if it has none."""
        name = read_summary(self._run_dir).get("checkpoint")
        return self._run_dir / str(name) if name else None

    def _warn(self, warnings: Iterable[str]) -> None:
        before, self._warnings = self._warnings, list(warnings)
        for warning in self._warnings:
            if warning not in before:
                log.warning(warning, run=self._run_dir.name)

    def _end(self) -> HeldJob:
        """Returns the final state of a job that is done, read from its run directory."""
        summary = read_summary(self._run_dir)
        results = dict(summary["eval"] or {})
        checkpoint = self._run_dir / str(summary["checkpoint"])
        return HeldJob(int(summary["batches"]), checkpoint, results, over=True)

    def _call(self, call: Callable[[CoordinatorClient], Answer]) -> Answer | None:
        """Calls the coordinator, and repeats that until it answers or the run ends. Returns None
        once the run is done. Raises JobFailed if the run has failed."""
        pause_s, silent_since = RETRY_S, time.monotonic()
        while True:
            if self._up.status is not None:
                if self._up.status:
                    raise JobFailed(self._up.why())
                return None
            try:
                if self._client is None:
                    address = (self._run_dir / ADDRESS).read_text().strip()
                    self._client = CoordinatorClient(address, security_of_run(self._run_dir))
                return call(self._client)
            except (NotReady, DeadlinePassed):
                silent_since = time.monotonic()
            except (FileNotFoundError, PsError) as error:
                if isinstance(error, PsError) and not error.retryable:
                    raise
                self.close()
                if time.monotonic() - silent_since > ANSWER_S:
                    raise JobFailed(
                        f"the coordinator of {self._run_dir} is away: {error}"
                    ) from None
            self._up.wait(pause_s)
            pause_s = min(2 * pause_s, LONGEST_RETRY_S)
