"""The buffers for arriving pushes, allocated once and reused, and the gradients in them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy.typing as npt

from psrpc.core.errors import NotReady
from psrpc.core.plan import Plan, aligned_empty
from psrpc.core.tables import Rows
from psrpc.net.limits import WORKER_BUFFERS
from psrpc.ops.threads import THREADS, Threads

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
        """Returns ``[nbytes] uint8`` for encoded data of arena ``name``, allocated on first use."""
        raw = self._raw.get(name)
        if raw is None or len(raw) < nbytes:
            raw = self._raw[name] = aligned_empty(nbytes, "uint8")
        return raw[:nbytes]


@dataclass(slots=True)
class Loan:
    """A lent set of buffers. If ``keep`` is set, the borrower keeps the set after the loan's
    block."""

    buffers: Buffers
    keep: bool = False


@dataclass(slots=True)
class Arrived:
    """A completely received gradient, in the form that the update engine takes.

    Attributes:
        arrays: arena name -> ``[shard length]``, aligned; in the arena's dtype, or in bfloat16 or
            float16 if the worker pushed it in that encoding.
        loan: the memory of the arrays; None if they lie in the pushing worker's own memory.
        rows: table -> the gradients of its rows. In the worker's memory their values may change at
            any time; the ids may not.
    """

    arrays: Mapping[str, NDArray]
    loan: Loan | None
    rows: Mapping[int, Rows] = field(default_factory=dict)


def pool_size(nbytes: int, replicas: int) -> int:
    """Number of pushes of ``nbytes`` that a shard holds at once.

    Sync: two attempts per micro-batch of the round, plus two pushes that are arriving. A round
    without faults needs half of them. The other half is for this case: all workers die after their
    gradients have reached this shard but not another. Every micro-batch is then computed again, but
    the memory of each first attempt is not free yet, because the coordinator may still commit it
    (its worker may only be slow).

    Async: two, so that one can arrive while another is applied, and more if they are small."""
    if replicas:
        return 2 * replicas + 2
    return 2 + min(14, _GENEROUS_BYTES // max(nbytes, 1))


def worker_quota(size: int) -> int:
    """Number of sets, out of ``size``, that arriving pushes of one worker may hold at once, so that
    one worker cannot take them all. Staged pushes do not count, since one worker may compute all
    micro-batches of a round; :class:`pserver.core.staging.Staging` bounds them."""
    return WORKER_BUFFERS if size >= 2 * WORKER_BUFFERS else 1


class BufferPool:
    """Lends at most ``size`` sets of buffers for one shard's part of the arenas, and at most
    :func:`worker_quota` of them to the arriving pushes of one worker. Thread-safe."""

    def __init__(self, plan: Plan, shard: int, size: int, threads: Threads = THREADS) -> None:
        self._arenas = [(a.name, a.shard_length(shard), a.dtype) for a in plan.arenas]
        self._size = size
        self._made = 0
        self._arriving: Counter[str] = Counter()
        """Sets of arriving pushes, by worker."""
        # Last in, first out: the set released last is still in the cache.
        self._free: list[Buffers] = []
        self._changed = threads.condition()
        self._now = threads.now

    def acquire(self, timeout_s: float, check: Callable[[], object] = lambda: None) -> Buffers:
        """Returns a free set; its contents are undefined.

        Args:
            check: raises when waiting has become pointless; called at each :meth:`wake`.

        Raises:
            NotReady: none became free within ``timeout_s``.
            MemoryError: out of memory for one more set; the existing ones stay.
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
        self, timeout_s: float, check: Callable[[], object] = lambda: None, worker: str = ""
    ) -> Iterator[Loan]:
        """Acquires a set for a block and releases it at the end, unless the borrower has set
        ``keep``. During the block the set counts towards the quota of ``worker``.

        Raises:
            NotReady: no set is free for ``timeout_s``, or ``worker`` has used up its quota.
        """

        def mine() -> bool:
            check()
            return self._arriving[worker] < worker_quota(self._size)

        began = self._now()
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
            loan = Loan(self.acquire(max(0.0, timeout_s - (self._now() - began)), check))
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
        """Returns a set to the pool."""
        with self._changed:
            if self._made > self._size:
                self._made -= 1
            else:
                self._free.append(buffers)
            self._changed.notify_all()

    def resize(self, size: int) -> None:
        """Limits the pool to ``size`` sets; sets in use stay until they are released."""
        with self._changed:
            self._size = size
            while self._free and self._made > size:
                self._free.pop()
                self._made -= 1
            self._changed.notify_all()

    def wake(self) -> None:
        """Makes all waiting threads call their ``check`` again."""
        with self._changed:
            self._changed.notify_all()

    def forget(self) -> None:
        """Stops counting one lent set, because its borrower keeps it forever."""
        with self._changed:
            self._made -= 1
            self._changed.notify_all()

    @property
    def in_use(self) -> int:
        """Number of lent sets."""
        with self._changed:
            return self._made - len(self._free)
