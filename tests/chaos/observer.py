"""An observer that reads the job's status all the time."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, replace

from coordinator.client.client import CoordinatorClient
from psrpc.core.errors import PsError
from psrpc.v1.coordinator_pb2 import GetJobStatusResponse
from tests.chaos.witness import Options
from tests.sim.operator import written

PAUSE_S = 0.02


@dataclass(frozen=True)
class Sight:
    """Content of one answer; ``at`` is when it came, in monotonic seconds."""

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


PAUSE_S = 0.02

VAIN_S = 10.0
"""Without any answer for so long, it is given up."""


class Operator:
    """Asks in a thread of its own for the change that the options have, until that is accepted.
    Use it with ``with``."""

    def __init__(self, address: str, options: Options, observer: Observer) -> None:
        self.over = options.change is None
        """Whether there is nothing (more) to ask for."""
        self._client = CoordinatorClient(address)
        self._options = options
        self._observer = observer
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="operator", daemon=True)

    def __enter__(self) -> Operator:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stopping.set()
        self._client.close()
        self._thread.join()

    def _run(self) -> None:
        change, waited_s = self._options.change, 0.0
        while change is not None and not self._stopping.wait(PAUSE_S):
            if self._observer.training and self._observer.step >= self._options.change_step:
                waited_s += PAUSE_S
                try:
                    self._client.set_policy(written(change))
                except PsError as error:
                    if error.retryable and waited_s < VAIN_S:
                        continue
                break
        self.over = True
