"""Reads batches before they are needed."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

from psrpc.core.batch import BatchId

Prepared = TypeVar("Prepared")

PATIENCE_S = 0.01
"""Seconds that the reading thread waits for :meth:`Feed.waiting` while a batch is ready. Then it
reads anyway: a longer step mostly runs in TensorFlow, which lets other threads run."""

SHORT_S = 0.001
"""CPU seconds below which reading a batch costs less than waking the thread that reads it. It also
bounds the memory of the :data:`SHORT_DEPTH` batches: writing a few megabytes takes longer."""

SHORT_DEPTH = 8
"""How many batches are held ready, at least, if reading one takes less than :data:`SHORT_S`."""


class Feed(Generic[Prepared]):
    """Reads the expected batches, in order, on a thread of its own.

    Holds at most ``depth`` batches ready. While one is ready, it reads the next only when the
    consuming thread says that it waits for something else: both threads need the interpreter, and a
    short step would spend half of its time on getting it back.

    Waking the thread costs several times as much as reading a small batch, since the caches of its
    core then hold neither code nor data. So where reading is ``short``, the thread, once awake,
    reads up to :data:`SHORT_DEPTH` batches while the consuming thread waits, and then sleeps until
    fewer than ``depth`` are ready.

    Thread-safe; one lock guards expected and ready batches, and is not held while reading.
    """

    def __init__(
        self,
        read: Callable[[BatchId], Prepared],
        depth: int = 2,
        patience_s: float = PATIENCE_S,
        short: Callable[[float], bool] = lambda cpu_s: cpu_s < SHORT_S,
    ) -> None:
        """Args:
        read: prepares a batch for the step; any thread may call it.
        short: takes the CPU seconds of a read and returns whether that is short; not used if
            ``depth`` is 1.
        """
        self._read = read
        self._depth = depth
        self._short = short
        self._going_on = False
        """Whether to read up to :data:`SHORT_DEPTH` batches: the last read was short, and the
        consuming thread has been waiting since."""
        self._patience_s = patience_s
        self._changed = threading.Condition()
        self._expected: deque[BatchId] = deque()
        self._reading: BatchId | None = None
        self._waiting = False
        self._ready: dict[BatchId, _Outcome[Prepared]] = {}
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="feed", daemon=True)

    def __enter__(self) -> Feed[Prepared]:
        self._thread.start()
        return self

    def __exit__(self, *_exception: object) -> None:
        """Stops without waiting for a read in progress: a data source cannot be interrupted."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    def expect(self, batches: Iterable[BatchId]) -> None:
        """Queues ``batches`` after those expected before."""
        with self._changed:
            self._expected.extend(batches)
            self._changed.notify_all()

    def forget(self) -> None:
        """Drops all expected and ready batches."""
        with self._changed:
            self._expected.clear()
            self._ready.clear()
            self._reading = None
            self._changed.notify_all()

    def get(self, batch: BatchId) -> Prepared:
        """Returns the batch: waits if reading has begun, otherwise reads it at once. Raises the
        original error of reading this batch."""
        with self._changed:
            while self._reading == batch:
                self._changed.wait()
            outcome = self._ready.pop(batch, None)
            if outcome is None and batch in self._expected:
                self._expected.remove(batch)
            if self._has_to_do():
                self._changed.notify_all()
        if outcome is None:
            return self._read(batch)
        if outcome.error is not None:
            raise outcome.error
        return outcome.get()

    def waiting(self, now: bool) -> None:
        """Records whether the consuming thread waits for something else, so that reading does not
        disturb it."""
        with self._changed:
            self._waiting = now
            self._going_on = self._going_on and now
            if now and self._has_to_do():
                self._changed.notify_all()

    def peek(self, batch: BatchId) -> Prepared | None:
        """Returns the batch without removing it, if it was read without an error."""
        with self._changed:
            outcome = self._ready.get(batch)
            return None if outcome is None else outcome.peek()

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
            began = time.thread_time()
            outcome = _Outcome(self._read, batch)
            short = self._depth > 1 and self._short(time.thread_time() - began)
            with self._changed:
                # If this differs, the batch was forgotten during the read.
                if self._reading is batch:
                    self._ready[batch] = outcome
                    self._reading = None
                self._going_on = short and self._waiting
                self._changed.notify_all()

    def _has_to_do(self) -> bool:
        most = max(SHORT_DEPTH, self._depth) if self._going_on else self._depth
        return self._stopped or bool(self._expected and len(self._ready) < most)

    def _may_begin(self) -> bool:
        return self._stopped or self._waiting or not self._ready


class _Outcome(Generic[Prepared]):
    """The outcome of reading: the batch, or the error to raise in the consuming thread."""

    def __init__(self, read: Callable[[BatchId], Prepared], batch: BatchId) -> None:
        self.error: Exception | None = None
        self._prepared: list[Prepared] = []
        try:
            self._prepared.append(read(batch))
        except Exception as error:
            self.error = error

    def peek(self) -> Prepared | None:
        """Returns the batch, unless there is an error."""
        return self._prepared[0] if self._prepared else None

    def get(self) -> Prepared:
        """Returns the batch, once."""
        return self._prepared.pop()
