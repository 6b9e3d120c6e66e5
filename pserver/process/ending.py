"""Decides when and how a shard's process ends."""

from __future__ import annotations

import math
import signal
import threading
from collections.abc import Callable

from psrpc.core.errors import JobFailed, PsError
from psrpc.ops.exit_status import DONE, INTERRUPTED, after_signal
from psrpc.ops.logs import get_logger
from psrpc.ops.threads import THREADS, Threads

log = get_logger()

STAY_S = 7.0
"""How long a stopping shard waits for its state to be saved. While the coordinator saves the whole
job, each of its answers starts this time again."""


class Ending:
    """Decides when and with which status the process ends; the first :meth:`end` wins.
    Thread-safe."""

    def __init__(self, threads: Threads = THREADS) -> None:
        self._now = threads.now
        self._until = -math.inf
        self.event = threads.event()
        self.error: PsError | None = None
        self.status = DONE
        """The exit status of a shard that ends without an error."""
        self._lock = threading.Lock()
        self._asked = threads.event()
        self._save: Callable[[], object] | None = None

    def end(self, error: PsError | None = None, status: int | None = None) -> None:
        """Ends now, with ``error`` or with exit status ``status``. If ``status`` is None, it is
        that of the received signal, or 0 without a signal."""
        with self._lock:
            if not self.event.is_set():
                self.error = error
                self.status = self.status if status is None else status
                self.event.set()
                self._asked.set()

    def shut_down(self, failed: bool, reason: str) -> None:
        """Ends as the coordinator's shutdown command orders."""
        if failed:
            self.end(JobFailed(reason))
        elif reason:
            log.info(f"the job was {reason}")
            self.end(status=INTERRUPTED)
        else:
            self.end(status=DONE)

    def save_first(self, save: Callable[[], object]) -> None:
        """Makes the next :meth:`stop` call ``save`` instead of ending. ``save`` has to cause a call
        of :meth:`end` when the state is saved."""
        with self._lock:
            self._save = save

    def stop(self, number: int = signal.SIGTERM) -> None:
        """Handles signal ``number``: asks the process to stop after saving its state. A second
        signal stops the process at once."""
        with self._lock:
            if self.event.is_set():
                # A supervisor may send a signal to a process that is ending already; its status is
                # settled.
                return
            self.status = after_signal(number)
            save, self._save = self._save, None
        if save is None:
            self.end()
        else:
            self._asked.set()
            save()

    def stay(self) -> None:
        """Extends :meth:`wait` to :data:`STAY_S` from now, because the coordinator is saving the
        job."""
        self._until = self._now() + STAY_S

    def wait(self) -> None:
        """Blocks until the end, and at most for :data:`STAY_S` after a request to stop or the last
        :meth:`stay`."""
        self._asked.wait()
        began = self._now()
        self.stay()
        while not self.event.is_set() and (left_s := self._until - self._now()) > 0:
            self.event.wait(left_s)
        if not self.event.is_set():
            log.warning(
                "leaving without its state saved: what came since the newest checkpoint may have "
                "to be done again",
                waited_s=round(self._now() - began, 1),
            )
        self.end()
