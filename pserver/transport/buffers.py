"""The arrays that pushes arrive in: allocated once, used again and again."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from time import monotonic
from typing import Any

import numpy.typing as npt

from psrpc.core.errors import NotReady, Stalled
from psrpc.core.plan import Plan, aligned_empty
from psrpc.net.limits import PROGRESS_BYTES, PROGRESS_S, WORKER_BUFFERS

NDArray = npt.NDArray[Any]

_GENEROUS_BYTES = 16 << 20


class Buffers:
    """Memory for one push.

    Attributes:
        arrays: arena name -> aligned ``[shard length]`` array in the arena's dtype.
    """

    def __init__(self, arrays: dict[str, NDArray]) -> None:
        self.arrays = arrays
        self._raw: dict[str, NDArray] = {}

    def raw(self, name: str, nbytes: int) -> NDArray:
        """``[nbytes] uint8`` beside the array of arena ``name``, for what has to be decoded into
        it. Made when first needed."""
        found = self._raw.get(name)
        if found is None or len(found) < nbytes:
            found = self._raw[name] = aligned_empty(nbytes, "uint8")
        return found[:nbytes]


@dataclass(slots=True)
class Loan:
    """A set of buffers in somebody's hands. With ``keep`` set it outlives the loan's block."""

    buffers: Buffers
    keep: bool = False


def pool_size(nbytes: int, replicas: int) -> int:
    """How many pushes of ``nbytes`` a shard holds at once.

    Sync: two attempts of each of the round's micro-batches, and two on their way. A round that goes
    well needs half of it, but fewer would not do: when all workers die after their gradients have
    reached this shard and not another, every micro-batch is computed again, while each first
    attempt may still be committed (its worker may only be slow), so its memory is not free.

    Async: two, so that one can arrive while another is applied, and more where they are small.
    """
    if replicas:
        return 2 * replicas + 2
    return 2 + min(14, _GENEROUS_BYTES // max(nbytes, 1))


def worker_quota(size: int) -> int:
    """How many of ``size`` sets the pushes of one worker may hold while they arrive: never all of
    them. What has arrived and is staged does not count, since a worker may have all of a round's
    micro-batches to do; :class:`pserver.core.staging.Staging` bounds that."""
    return WORKER_BUFFERS if size >= 2 * WORKER_BUFFERS else 1


class BufferPool:
    """At most ``size`` sets of buffers for one shard's part of the arenas, and
    :func:`worker_quota` of them for what one worker has on its way. Thread-safe."""

    def __init__(self, plan: Plan, shard: int, size: int) -> None:
        self._arenas = [(a.name, a.shard_length(shard), a.dtype) for a in plan.arenas]
        self._size = size
        self._made = 0
        self._arriving: Counter[str] = Counter()
        """Sets by worker, while what they are for arrives."""
        # The one released last is taken first: it is still in the cache.
        self._free: list[Buffers] = []
        self._changed = threading.Condition()

    def acquire(self, timeout_s: float, check: Callable[[], object] = lambda: None) -> Buffers:
        """A set that nobody else holds; its contents are undefined.

        Args:
            check: raises when there is no use in waiting any longer; asked at each :meth:`wake`.

        Raises:
            NotReady: none became free within ``timeout_s``.
            MemoryError: there is none for one more set; those that were made are still there.
        """

        def available() -> bool:
            check()
            return bool(self._free) or self._made < self._size

        with self._changed:
            if not self._changed.wait_for(available, timeout_s):
                raise NotReady(
                    f"all {self._size} buffers for arriving gradients are in use;"
                    f" none became free within {timeout_s:.1f} s"
                )
            if self._free:
                return self._free.pop()
            self._made += 1
        try:
            return Buffers({name: aligned_empty(n, dtype) for name, n, dtype in self._arenas})
        except MemoryError:
            with self._changed:
                self._made -= 1
                self._changed.notify_all()
            raise

    @contextmanager
    def loan(
        self,
        timeout_s: float,
        check: Callable[[], object] = lambda: None,
        worker: str = "",
    ) -> Iterator[Loan]:
        """:meth:`acquire` for the length of a block, unless the borrower keeps it longer. It counts
        as one of ``worker``'s for as long as the block lasts.

        Raises:
            NotReady: also where ``worker`` has its quota for as long.
        """

        def mine() -> bool:
            check()
            return self._arriving[worker] < worker_quota(self._size)

        began = monotonic()
        with self._changed:
            if not self._changed.wait_for(mine, timeout_s):
                held = self._arriving[worker]
                raise NotReady(
                    f"{worker or 'a worker'} has {held} of {self._size} buffers for pushes that are"
                    f" still on their way, as many as one may; none came back within"
                    f" {timeout_s:.1f} s"
                )
            self._arriving[worker] += 1
        try:
            loan = Loan(self.acquire(max(0.0, timeout_s - (monotonic() - began)), check))
            try:
                yield loan
            finally:
                if not loan.keep:
                    self.release(loan.buffers)
        finally:
            with self._changed:
                self._arriving[worker] -= 1
                if not self._arriving[worker]:
                    del self._arriving[worker]
                self._changed.notify_all()

    def release(self, buffers: Buffers) -> None:
        """Gives a set back."""
        with self._changed:
            if self._made > self._size:
                self._made -= 1
            else:
                self._free.append(buffers)
            self._changed.notify_all()

    def resize(self, size: int) -> None:
        """At most so many sets from now on; those that are in use are given back first."""
        with self._changed:
            self._size = size
            while self._free and self._made > size:
                self._free.pop()
                self._made -= 1
            self._changed.notify_all()

    def wake(self) -> None:
        """Has everybody who waits for a set ask again whether to."""
        with self._changed:
            self._changed.notify_all()

    def forget(self) -> None:
        """One set that is out will not come back: its borrower has it for good."""
        with self._changed:
            self._made -= 1
            self._changed.notify_all()

    @property
    def in_use(self) -> int:
        """How many sets are held by somebody."""
        with self._changed:
            return self._made - len(self._free)


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
