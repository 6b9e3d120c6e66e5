"""Batches that are read before they are needed."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Generic, TypeVar

from psrpc.core.batch import BatchId

Prepared = TypeVar("Prepared")

PATIENCE_S = 0.01
"""How long reading waits for :meth:`Feed.waiting` while there is a batch ready. A step that takes
longer is TensorFlow's for the most part, which lets other threads run."""


class Feed(Generic[Prepared]):
    """Reads the batches that are expected, in order, on a thread of its own.

    At most ``depth`` batches are held ready. While one is, the next is read when the thread that
    gets them says that it waits for something else: both need the interpreter, and a short step
    would spend half of its time on asking for it back.

    Thread-safe; one lock guards what is expected and what is ready, and nothing is read while it is
    held.
    """

    def __init__(
        self,
        read: Callable[[BatchId], Prepared],
        depth: int = 2,
        patience_s: float = PATIENCE_S,
    ) -> None:
        """``read`` makes a batch ready for the step; any thread may call it."""
        self._read = read
        self._depth = depth
        self._patience_s = patience_s
        self._changed = threading.Condition()
        self._expected: deque[BatchId] = deque()
        self._reading: BatchId | None = None
        self._waiting = False
        self._ready: dict[BatchId, _Found[Prepared]] = {}
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="feed", daemon=True)

    def __enter__(self) -> Feed[Prepared]:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Lets a read in progress end by itself: a data source cannot be interrupted."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    def expect(self, batches: Iterable[BatchId]) -> None:
        """These are needed next, after those expected before."""
        with self._changed:
            self._expected.extend(batches)
            self._changed.notify_all()

    def forget(self) -> None:
        """Nothing that was expected is needed any more."""
        with self._changed:
            self._expected.clear()
            self._ready.clear()
            self._reading = None
            self._changed.notify_all()

    def get(self, batch: BatchId) -> Prepared:
        """The batch. It is waited for when its reading has begun, and read at once otherwise.

        Raises:
            Exception: what reading this batch raised, as it was raised.
        """
        with self._changed:
            while self._reading == batch:
                self._changed.wait()
            found = self._ready.pop(batch, None)
            if found is None and batch in self._expected:
                self._expected.remove(batch)
            self._changed.notify_all()
        if found is None:
            return self._read(batch)
        if found.error is not None:
            raise found.error
        return found.get()

    def waiting(self, now: bool) -> None:
        """Whether whoever gets the batches waits for something else: then to read disturbs
        nobody."""
        with self._changed:
            self._waiting = now
            if now and self._expected:
                self._changed.notify_all()

    def peek(self, batch: BatchId) -> Prepared | None:
        """The batch, which stays there, if it has been read without an error."""
        with self._changed:
            found = self._ready.get(batch)
            return None if found is None else found.peek()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(self._has_to_do)
                if self._ready and not self._waiting:
                    self._changed.wait_for(self._may_begin, self._patience_s)
                if self._stopped:
                    return
                if not self._has_to_do():
                    continue
                batch = self._reading = self._expected.popleft()
            found = _Found(self._read, batch)
            with self._changed:
                # Otherwise it was forgotten while it was being read.
                if self._reading is batch:
                    self._ready[batch] = found
                    self._reading = None
                self._changed.notify_all()

    def _has_to_do(self) -> bool:
        return self._stopped or bool(self._expected and len(self._ready) < self._depth)

    def _may_begin(self) -> bool:
        return self._stopped or self._waiting or not self._ready


class _Found(Generic[Prepared]):
    """What reading a batch came to: the batch, or the error that belongs to who asks for it."""

    def __init__(self, read: Callable[[BatchId], Prepared], batch: BatchId) -> None:
        self.error: Exception | None = None
        self._prepared: list[Prepared] = []
        try:
            self._prepared.append(read(batch))
        except Exception as error:
            self.error = error

    def peek(self) -> Prepared | None:
        """The batch, unless there is an error."""
        return self._prepared[0] if self._prepared else None

    def get(self) -> Prepared:
        """The batch, once."""
        return self._prepared.pop()
