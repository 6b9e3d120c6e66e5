"""Repeats a client's calls to its shard, and chooses the error when it gives up."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from psrpc.core.batch import BatchId
from psrpc.core.errors import (
    DeadlinePassed,
    NotReady,
    OutcomeUnknown,
    PsError,
    ShardUnreachable,
    Unreachable,
)
from psrpc.ops.retry import GaveUp, RetryPolicy, retry
from psrpc.ops.threads import Threads

Result = TypeVar("Result")


class Tries:
    """Repeats the calls of one thread. Any thread may cancel a try.

    Attributes:
        announce: gets the reason why a call is repeated.
    """

    def __init__(
        self,
        peer: str,
        policy: RetryPolicy,
        stop: threading.Event,
        announce: Callable[[str], object],
        failed: Callable[[], object],
        threads: Threads,
    ) -> None:
        """Args: see :class:`pserver.client.client.ShardClient`; ``peer`` is its shard in errors."""
        self.announce = announce
        self._peer = peer
        self._policy = policy
        self._stop = stop
        self._failed = failed
        self._threads = threads
        self._counting = threading.Lock()
        self._cancels_begun = self._cancels_over = 0

    def repeat(self, call: Callable[[], Result], batch: BatchId | None = None) -> Result:
        """Repeats ``call`` until it succeeds or the budget is used up; ``batch`` is the pushed
        batch, None if the call pushes nothing."""

        def give_up(tries: GaveUp) -> PsError:
            if batch is not None and tries.sent:
                return OutcomeUnknown(
                    f"{self._peer} has not answered the push of {batch}, so whether it has the"
                    f" batch is not known; pushing it again is safe ({tries})"
                )
            if isinstance(tries.last, NotReady):
                return tries.last
            return ShardUnreachable(f"{self._peer} did not answer {tries}")

        return retry(
            lambda: self.once(call),
            self._policy,
            give_up,
            stop=self._stop,
            announce=self.announce,
            now=self._threads.now,
            chance=self._threads.chance,
        )

    def once(self, call: Callable[[], Result]) -> Result:
        """Makes one try. Calls ``failed`` if there was no answer, unless the try was cancelled."""
        # A cancellation that is over by now cannot end this try.
        over = self._cancels_over
        try:
            return call()
        except (Unreachable, DeadlinePassed):
            if self._cancels_begun == over:
                self._failed()
            raise

    @contextmanager
    def cancelling(self) -> Iterator[None]:
        """Marks the block in which another thread cancels the current try."""
        with self._counting:
            self._cancels_begun += 1
        try:
            yield
        finally:
            with self._counting:
                self._cancels_over += 1
