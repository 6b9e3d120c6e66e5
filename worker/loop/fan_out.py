"""Calls all shards of a generation in parallel."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

from psrpc.core.errors import PsError, SegmentLost
from worker.loop.session import WorkerSession

Result = TypeVar("Result")


class FanOut:
    """Runs one call per shard and returns when all have ended. One thread uses it; the clients of
    the shards report to it from other threads.

    Attributes:
        abort: ends the clients' retries when set.
        own: the shard that the calling thread takes; the others have threads of their own.
    """

    def __init__(
        self,
        standing: WorkerSession,
        shards: int,
        peer: Callable[[int], str],
        waiting: Callable[[bool], object] = lambda _now: None,
    ) -> None:
        """``peer`` names a shard. ``waiting(True)`` is called from any thread when the requests of
        a call have gone to all shards, ``waiting(False)`` when all have answered."""
        self._standing = standing
        self._shards = range(shards)
        self.own = 0
        self._peer = peer
        self._waiting = waiting
        self.abort = standing.threads.event()
        self._unsent: set[int] = set()
        """Shards whose requests are not sent yet; changed under the lock."""
        self._sending = threading.Lock()
        self._others = ""
        """Describes the workers that shards wait for before they answer; empty for none."""
        self._why: dict[int, str] = {}
        """Shard -> why its last call had to be repeated."""
        self._pending: set[int] = set()
        self._pool = standing.threads.pool(max(1, shards - 1), "shard")

    def close(self) -> None:
        """Ends all calls."""
        self.abort.set()
        self._pool.shutdown()

    @property
    def asked_again(self) -> frozenset[int]:
        """Shards whose last call was repeated; an earlier try may have taken effect."""
        return frozenset(self._why)

    def awaited(self) -> str:
        """Returns the shards that have not answered, with the reasons for retries if known."""
        # Copies, because other threads change both.
        pending, why = sorted(self._pending), dict(self._why)
        if self._others and not why.keys() & pending:
            return self._others
        peers = ", ".join(why.get(shard, self._peer(shard)) for shard in pending)
        return f"the shards: {peers}" if why.keys() & pending else peers

    def sent(self, shard: int) -> None:
        """Notes that the request to ``shard`` has left. Any thread may call it."""
        with self._sending:
            # A repeated request is sent twice.
            if shard not in self._unsent:
                return
            self._unsent.remove(shard)
            last = not self._unsent
        if last:
            self._waiting(True)

    def repeated(self, shard: int, reason: str) -> None:
        """Notes that the call of ``shard`` has to be repeated. Any thread may call it."""
        self._why[shard] = reason
        self._standing.hurry(True)

    def call(
        self,
        call: Callable[[int], Result],
        *,
        shards: range | None = None,
        finishing: bool = False,
        report_wait: bool = True,
        others: str = "",
    ) -> list[Result]:
        """Runs ``call`` for each shard, or for ``shards`` alone; no call is in flight on return.

        Args:
            finishing: as for :meth:`WorkerSession.check`.
            report_wait: whether to report the wait to ``waiting``.
            others: describes, for the log, the workers that shards wait for before they answer.

        Raises:
            PsError: of several errors, one that no retry can fix if there is any.
        """
        # Clear before checking, so that an interrupt in between is not lost.
        self.abort.clear()
        self._standing.check(finishing=finishing)
        if self._standing.interrupted:
            self.abort.set()
        self._why.clear()
        self._others = others
        shards = self._shards if shards is None else shards
        own = self.own if self.own in shards else shards[0]
        self._pending.update(shards)
        self._unsent = set(shards if report_wait else ())
        with self._standing.waits.on(self.awaited):
            peers = [shard for shard in shards if shard != own]
            futures = [self._pool.submit(self._one, call, shard) for shard in peers]
            results: list[Result] = []
            errors: list[BaseException] = []
            try:
                try:
                    results.append(self._one(call, own))
                except PsError as error:
                    errors.append(error)
                errors += [failed for each in futures if (failed := each.exception())]
                if errors:
                    # If a signal or the end of the job cut a retry short, raise that. If not, an
                    # error that no retry can fix may have ended the other calls.
                    self._standing.check()
                    raise min(errors, key=lambda e: isinstance(e, PsError) and e.retryable)
                answers = [each.result() for each in futures]
                at = shards.index(own)
                return [*answers[:at], *results, *answers[at:]]
            finally:
                self._standing.hurry(False)
                if report_wait:
                    self._waiting(False)

    def _one(self, call: Callable[[int], Result], shard: int) -> Result:
        routes = self._standing.routes
        routes.asked(shard)
        try:
            result = call(shard)
        except PsError as error:
            self.abort.set()
            if error.retryable or isinstance(error, SegmentLost):
                routes.given_up(shard)
            elif routes.answered(shard):
                self._standing.flush()
            raise
        finally:
            self._pending.discard(shard)
        if routes.answered(shard):
            self._standing.flush()
        return result
