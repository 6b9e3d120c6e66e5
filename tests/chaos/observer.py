"""Somebody who looks at the job's status all the time."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, replace

from coordinator.client.client import CoordinatorClient
from psrpc.core.errors import PsError
from psrpc.v1.coordinator_pb2 import GetJobStatusResponse

PAUSE_S = 0.02


@dataclass(frozen=True)
class Sight:
    """What one answer said; ``at`` is when it came, in monotonic seconds."""

    at: float
    generation: int
    step: int
    phase: str
    policy: int


class Observer:
    """Asks in a thread of its own. Use it with ``with``."""

    def __init__(self, address: str) -> None:
        self._client = CoordinatorClient(address)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="observer", daemon=True)
        self.sights: list[Sight] = []
        """Only those that differ from the one before."""
        self.status = GetJobStatusResponse()

    def __enter__(self) -> Observer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        self._client.close()
        self._thread.join()

    @property
    def step(self) -> int:
        """The greatest global step that was seen."""
        return max((sight.step for sight in self.sights), default=0)

    @property
    def training(self) -> bool:
        """Whether training has been seen to have begun."""
        return self.step > 0

    @property
    def moved(self) -> float:
        """When the status last said something else, in monotonic seconds; 0 before the first."""
        return self.sights[-1].at if self.sights else 0.0

    def _run(self) -> None:
        while not self._stopping.wait(PAUSE_S):
            try:
                status = self._client.get_job_status()
            except PsError:
                continue
            self.status = status
            sight = Sight(
                time.monotonic(),
                status.generation,
                status.global_step,
                status.phase,
                status.policy,
            )
            last = self.sights[-1] if self.sights else None
            if last is None or replace(last, at=sight.at) != sight:
                self.sights.append(sight)
