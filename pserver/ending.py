"""How a shard's process comes to its end."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable

from psrpc.errors import PsError
from psrpc.exit_status import DONE, after_signal
from psrpc.logs import get_logger

log = get_logger()

STAY_S = 7.0
"""How long a shard that is told to stop waits for its state to be saved."""


class Ending:
    """The first word counts. Thread-safe."""

    def __init__(self) -> None:
        self.event = threading.Event()
        self.error: PsError | None = None
        self.status = DONE
        """The exit status of a shard that ends without an error."""
        self._lock = threading.Lock()
        self._told = threading.Event()
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

    def wait(self) -> None:
        """Until the end has come; :data:`STAY_S` at most once somebody has asked to stop."""
        self._told.wait()
        if not self.event.wait(STAY_S):
            log.warning(
                "leaving without its state saved: what came since the newest checkpoint may have "
                "to be done again",
                waited_s=STAY_S,
            )
        self.end()
