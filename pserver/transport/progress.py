"""Progress of tensors that are on their way to a shard, which has lent a buffer for them."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from queue import Empty, SimpleQueue

from psrpc.core.errors import Stalled
from psrpc.net.limits import PROGRESS_BYTES, PROGRESS_S


class Progress:
    """Judges whether enough comes. Pure: time comes in.

    The rule: at least :data:`psrpc.net.limits.PROGRESS_BYTES` in each
    :data:`~psrpc.net.limits.PROGRESS_S`. What is less than that and complete is judged by its end
    alone."""

    def __init__(self, now: float, limit_s: float | None = None) -> None:
        """``limit_s`` instead of :data:`psrpc.net.limits.PROGRESS_S`."""
        self._limit_s = PROGRESS_S if limit_s is None else limit_s
        self._due = now + self._limit_s
        self._nbytes = 0
        self._total = 0

    def received(self, nbytes: int, now: float) -> None:
        """``nbytes`` more are here."""
        self._nbytes += nbytes
        self._total += nbytes
        if self._nbytes >= PROGRESS_BYTES:
            self._nbytes = 0
            self._due = now + self._limit_s

    def left_s(self, now: float) -> float:
        """How long to wait for more.

        Raises:
            Stalled: no longer; says how much came.
        """
        if now >= self._due:
            raise Stalled(
                f"the tensors of a push stopped coming: {self._nbytes} bytes in"
                f" {self._limit_s:g} s, after {self._total - self._nbytes}; expected"
                f" {PROGRESS_BYTES} in that time, so the shard has taken their buffer back"
            )
        return self._due - now


class AwaitedMessages:
    """Messages of an iterator that may block for good, such as the requests of a gRPC call.

    A thread of its own asks the iterator, one message at a time, and only when one is wanted. It
    ends with the iterator: after an error it may wait in there until the call is over.
    """

    def __init__(self, messages: Iterator[bytes]) -> None:
        self._messages = messages
        self._wanted: SimpleQueue[bool] = SimpleQueue()
        self._came: SimpleQueue[bytes | BaseException | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def next(self, progress: Progress) -> bytes | None:
        """The next message; None at the end.

        Raises:
            Stalled: see :meth:`Progress.left_s`.
        """
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="push", daemon=True)
            self._thread.start()
        self._wanted.put(True)
        while True:
            try:
                found = self._came.get(timeout=progress.left_s(time.monotonic()))
            except Empty:
                continue
            if isinstance(found, BaseException):
                raise found
            return found

    def close(self) -> None:
        """No message is wanted any more."""
        self._wanted.put(False)

    def _run(self) -> None:
        while self._wanted.get():
            try:
                self._came.put(next(self._messages, None))
            except BaseException as error:  # it is raised where it is waited for
                self._came.put(error)
                return
