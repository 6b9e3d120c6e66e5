"""Polls the job's status for ``coordinator up``."""

from __future__ import annotations

import contextlib
import threading
import time
from dataclasses import dataclass

from coordinator.client.client import CoordinatorClient
from psrpc.core.errors import PsError
from psrpc.security.credentials import PLAINTEXT, Security
from psrpc.v1.coordinator_pb2 import GetJobStatusResponse, WorkerStatus

STATUS_S = 0.5
"""Pause between two looks at the job's status."""


@dataclass(frozen=True, slots=True)
class Look:
    """A status, and the monotonic time of the request: the status itself is newer."""

    status: GetJobStatusResponse
    began: float


class Lookout:
    """Polls the job's status on a thread of its own, since a hung coordinator blocks its callers.
    Thread-safe; use it once."""

    def __init__(
        self, address: str, security: Security = PLAINTEXT, every_s: float = STATUS_S
    ) -> None:
        """``security`` holds the credentials of an operator."""
        self._client = CoordinatorClient(address, security)
        self._every_s = every_s
        self._newest: Look | None = None
        self._wake = threading.Event()
        self._ending = False
        self._lock = threading.Lock()
        # Worker, incarnation, reason; guarded by _lock, as is _told.
        self._gone: list[tuple[str, int, str]] = []
        self._told: set[str] = set()
        self._thread = threading.Thread(target=self._run, name="lookout", daemon=True)

    def start(self) -> None:
        """Starts the polling thread."""
        self._thread.start()

    def stop(self) -> None:
        """Ends the call in progress and the thread."""
        self._ending = True
        self._wake.set()
        self._client.close()
        self._thread.join()

    @property
    def newest(self) -> Look | None:
        """The last answer; None before the first."""
        return self._newest

    def look(self) -> None:
        """Polls at once, or as soon as the present call has ended."""
        self._wake.set()

    def worker_is_gone(self, worker: WorkerStatus, reason: str) -> None:
        """Reports a dead worker to the coordinator, so that the job does not wait for its lease to
        lapse. Repeat it as long as the status shows the worker."""
        with self._lock:
            self._gone.append((worker.worker, worker.incarnation, reason))
            first = worker.worker not in self._told
            self._told.add(worker.worker)
        if first:
            self._wake.set()

    def _run(self) -> None:
        while not self._ending:
            self._wake.clear()
            for name, incarnation, reason in self._take_gone():
                with contextlib.suppress(PsError):
                    self._client.revoke_worker(name, incarnation, reason, bar=False)
            began = time.monotonic()
            # The coordinator's exit status or the supervisor's time limit shows a failure.
            with contextlib.suppress(PsError):
                self._newest = Look(self._client.get_job_status(), began)
            self._wake.wait(self._every_s)

    def _take_gone(self) -> list[tuple[str, int, str]]:
        with self._lock:
            gone, self._gone = self._gone, []
        return gone
