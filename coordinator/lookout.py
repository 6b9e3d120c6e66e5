"""How the job stands, as ``coordinator up`` sees it."""

from __future__ import annotations

import contextlib
import threading
import time
from dataclasses import dataclass

from coordinator.client import CoordinatorClient
from psrpc.errors import PsError
from psrpc.identity import Role
from psrpc.security import PLAINTEXT, Security
from psrpc.v1.coordinator_pb2 import GetJobStatusResponse, LeaveWorkerRequest, WorkerStatus

STATUS_S = 0.5
"""Pause between two looks at the job's status."""


@dataclass(frozen=True, slots=True)
class Look:
    """A status, and when it was asked for, on the monotonic clock: what it says is newer."""

    status: GetJobStatusResponse
    began: float


class Lookout:
    """Asks for the job's status again and again, in a thread of its own, since a coordinator that
    hangs holds up whoever calls it. Thread-safe; use it once."""

    def __init__(
        self, address: str, security: Security = PLAINTEXT, every_s: float = STATUS_S
    ) -> None:
        """``security`` is an operator's."""
        self._client = CoordinatorClient(address, security)
        # Only a worker may say that it leaves, so its last words are said with its certificate.
        self._as_worker = security.of(Role.WORKER)
        self._for_workers: CoordinatorClient | None = None  # guarded by _lock, as is _ending
        self._every_s = every_s
        self._newest: Look | None = None
        self._wake = threading.Event()
        self._ending = False
        self._lock = threading.Lock()
        self._farewells: list[LeaveWorkerRequest] = []  # guarded by _lock, as is _told
        self._told: set[str] = set()
        self._thread = threading.Thread(target=self._run, name="lookout", daemon=True)

    def start(self) -> None:
        """Begins to ask."""
        self._thread.start()

    def stop(self) -> None:
        """Ends the call under way, and the thread."""
        with self._lock:
            self._ending = True
        self._wake.set()
        self._client.close()
        if self._for_workers is not None:
            self._for_workers.close()
        self._thread.join()

    @property
    def newest(self) -> Look | None:
        """The last answer; None before the first."""
        return self._newest

    def look(self) -> None:
        """Asks at once, or again as soon as the present call is answered."""
        self._wake.set()

    def worker_is_gone(self, worker: WorkerStatus, reason: str) -> None:
        """Has the coordinator told, so that nobody waits for the worker's lease to lapse. Say it
        again as long as the status shows the worker."""
        farewell = LeaveWorkerRequest(
            worker=worker.worker, incarnation=worker.incarnation, reason=reason
        )
        with self._lock:
            self._farewells.append(farewell)
            first = worker.worker not in self._told
            self._told.add(worker.worker)
        if first:
            self._wake.set()

    def _run(self) -> None:
        while not self._ending:
            self._wake.clear()
            for farewell in self._take_farewells():
                with contextlib.suppress(PsError):
                    self._tell(farewell)
            began = time.monotonic()
            # If the coordinator is gone its exit status will tell; if it hangs, the time will.
            with contextlib.suppress(PsError):
                self._newest = Look(self._client.get_job_status(), began)
            self._wake.wait(self._every_s)

    def _tell(self, farewell: LeaveWorkerRequest) -> None:
        with self._lock:
            if self._ending:
                return
            if self._for_workers is None:
                self._for_workers = CoordinatorClient(self._client.address, self._as_worker)
        self._for_workers.leave_worker(farewell)

    def _take_farewells(self) -> list[LeaveWorkerRequest]:
        with self._lock:
            farewells, self._farewells = self._farewells, []
        return farewells
