"""Checks the pace of transfers to a shard, because a slow one occupies a buffer of the shard."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from queue import Empty, SimpleQueue

from psrpc.core.errors import Stalled
from psrpc.net.limits import PROGRESS_BYTES, PROGRESS_S


class TransferProgress:
    """Judges whether bytes arrive fast enough. Pure: the caller passes the time.

    At least :data:`psrpc.net.limits.PROGRESS_BYTES` have to arrive in each
    :data:`~psrpc.net.limits.PROGRESS_S`. A transfer with fewer bytes has to be complete within that
    time."""

    def __init__(self, now: float, limit_s: float | None = None) -> None:
        """``limit_s`` replaces :data:`psrpc.net.limits.PROGRESS_S`."""
        self._limit_s = PROGRESS_S if limit_s is None else limit_s
        self._due = now + self._limit_s
        self._nbytes = 0
        self._total = 0

    def received(self, nbytes: int, now: float) -> None:
        """Counts ``nbytes`` more received bytes."""
        self._nbytes += nbytes
        self._total += nbytes
        if self._nbytes >= PROGRESS_BYTES:
            self._nbytes = 0
            self._due = now + self._limit_s

    def left_s(self, now: float) -> float:
        """Returns how long to wait for more bytes.

        Raises:
            Stalled: the time is up; the message says how much arrived.
        """
        if now >= self._due:
            raise Stalled(
                f"the tensors of a push stopped coming: {self._nbytes} bytes in"
                f" {self._limit_s:g} s, after {self._total - self._nbytes}; expected"
                f" {PROGRESS_BYTES} in that time, so the shard has taken their buffer back"
            )
        return self._due - now


class AwaitedMessages:
    """Gets messages with a timeout from an iterator that may block forever, such as the requests of
    a gRPC call.

    A separate thread calls the iterator, for one message at a time and only on demand. After
    :meth:`close` that thread may remain blocked in the iterator until the call is over."""

    def __init__(self, messages: Iterator[bytes]) -> None:
        self._messages = messages
        self._wanted: SimpleQueue[bool] = SimpleQueue()
        self._came: SimpleQueue[bytes | BaseException | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def next(self, progress: TransferProgress) -> bytes | None:
        """Returns the next message; None at the end.

        Raises:
            Stalled: see :meth:`TransferProgress.left_s`.
        """
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="push", daemon=True)
            self._thread.start()
        self._wanted.put(True)
        while True:
            try:
                message = self._came.get(timeout=progress.left_s(time.monotonic()))
            except Empty:
                continue
            if isinstance(message, BaseException):
                raise message
            return message

    def close(self) -> None:
        """Lets the thread end; call it when no more messages are needed."""
        self._wanted.put(False)

    def _run(self) -> None:
        while self._wanted.get():
            try:
                self._came.put(next(self._messages, None))
            except BaseException as error:  # `next` raises it in the waiting thread
                self._came.put(error)
                return
