"""A person who changes the policy of a running job."""

from __future__ import annotations

import threading
from types import TracebackType

from coordinator.client.client import CoordinatorClient
from psrpc.core.errors import PsError
from tests.chaos.observer import Observer
from tests.chaos.witness import Options
from tests.sim.operator import written

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

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
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
