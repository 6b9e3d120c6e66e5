"""How a shard's process comes to its end."""

from __future__ import annotations

import math
import signal
import threading
from collections.abc import Callable

from psrpc.core.errors import PsError
from psrpc.core.exit_status import DONE, after_signal
from psrpc.ops.logs import get_logger
from psrpc.ops.threads import THREADS, Threads

log = get_logger()

STAY_S = 7.0
"""How long a shard that is told to stop waits for its state to be saved; from the last word of the
coordinator, where that saves the whole job."""


class Ending:
    """The first word counts. Thread-safe."""

    def __init__(self, threads: Threads = THREADS) -> None:
        self._now = threads.now
        self._until = -math.inf
        self.event = threads.event()
        self.error: PsError | None = None
        self.status = DONE
        """The exit status of a shard that ends without an error."""
        self._lock = threading.Lock()
        self._told = threads.event()
        self._save: Callable[[], object] | None = None

    def end(self, error: PsError | None = None, status: int | None = None) -> None:
        """Ends now, with ``error`` or with the exit status ``status``; None is that of the signal,
        if there was one."""
        with self._lock:
            if not self.event.is_set():
                self.error = error
                self.status = self.status if status is None else status
                self.event.set()
                self._told.set()

    def save_first(self, save: Callable[[], object]) -> None:
        """From now on there is something to lose: who asks to stop has ``save`` called, which
        sees to it that :meth:`end` is called when that is done."""
        with self._lock:
            self._save = save

    def stop(self, number: int = signal.SIGTERM) -> None:
        """Asks the process to stop; a second time, to stop at once. For signals."""
        with self._lock:
            if self.event.is_set():
                # Supervisors stop what is about to leave by itself; it has its status already.
                return
            self.status = after_signal(number)
            save, self._save = self._save, None
        if save is None:
            self.end()
        else:
            self._told.set()
            save()

    def stay(self) -> None:
        """The job is being saved, and needs this shard for :data:`STAY_S` more."""
        self._until = self._now() + STAY_S

    def wait(self) -> None:
        """Until the end has come; :data:`STAY_S` at most after a request to stop, or after
        :meth:`stay`."""
        self._told.wait()
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
