"""One micro-batch of a round, and the workers that compute it."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass, field

from coordinator.core.work import Report
from psrpc.core.batch import BatchId
from psrpc.core.errors import InvalidArgument

LIVE_ATTEMPTS = 2
"""Attempts of one micro-batch that shards may hold at once; they have room for no more."""


@dataclass(frozen=True, slots=True)
class Held:
    """A worker's attempt: since when, and since which round."""

    worker: str
    since: float
    round: int


@dataclass(slots=True, eq=False)
class MicroBatch:
    """A micro-batch and its ``attempts`` by number. ``superseded`` are the numbers of attempts that
    were taken back or came second; shards may still accept those of ``revoked`` workers. ``base``
    is the version that the committed attempt was computed from, or an older one."""

    batch: BatchId
    attempts: dict[int, Held] = field(default_factory=dict)
    superseded: set[int] = field(default_factory=set)
    revoked: set[str] = field(default_factory=set)
    committed: Report | None = None
    base: int = 0

    @property
    def open(self) -> bool:
        """Whether any worker may have it."""
        return self.committed is None and not self.attempts and not self.revoked

    @property
    def awaited(self) -> bool:
        """Whether a worker has an uncommitted attempt of it."""
        return self.committed is None and bool(self.attempts)

    @property
    def under_way(self) -> bool:
        """Whether a worker has begun it, so that some shard may have it."""
        return self.committed is not None or bool(self.attempts) or bool(self.revoked)

    @property
    def holders(self) -> set[str]:
        """The workers that may commit it, or that must be refused before another's commit."""
        return {held.worker for held in self.attempts.values()} | self.revoked

    @property
    def oldest(self) -> Held:
        """The attempt that was leased first; there must be one."""
        return min(self.attempts.values(), key=lambda held: held.since)

    def attempt_of(self, worker: str) -> int | None:
        """Returns the attempt that ``worker`` holds, or None."""
        return next((n for n, held in self.attempts.items() if held.worker == worker), None)

    def held(self, number: int, worker: str) -> Held:
        """Returns the attempt ``number`` of ``worker``. Raises InvalidArgument if it has none."""
        held = self.attempts.get(number)
        if held is None or held.worker != worker:
            whose = "no such attempt" if held is None else f"it is {held.worker}'s, which"
            raise InvalidArgument(
                f"commit of attempt {number} of {self.batch} by {worker}: {whose} was handed out"
            )
        return held

    @property
    def may_be_doubled(self) -> bool:
        """Whether a second attempt of it is allowed."""
        return self.awaited and len(self.attempts) + len(self.revoked) < LIVE_ATTEMPTS

    def held_by(self, workers: Set[str]) -> bool:
        """Whether it is awaited, and only from these workers."""
        return self.awaited and all(held.worker in workers for held in self.attempts.values())

    def revoke(self, worker: str) -> int | None:
        """Takes back the attempt of ``worker`` unless it is committed; returns its number."""
        number = self.attempt_of(worker)
        if number is None or self.committed is not None:
            return None
        del self.attempts[number]
        self.superseded.add(number)
        self.revoked.add(worker)
        return number


@dataclass(slots=True)
class Tally:
    """Counts of one run since its coordinator started. They only rise.

    Attributes:
        speculative: second attempts of micro-batches whose worker was slow.
        superseded: attempts that lost to another attempt of their micro-batch.
        late: micro-batches that counted in a later round than that of their lease.
        overdue: rounds that lasted longer than ``round_deadline_s``.
        too_stale: gradients that a shard refused because their parameters were too old.
        summed: rounds in which a worker was to push several gradients as one sum.
    """

    speculative: int = 0
    superseded: int = 0
    late: int = 0
    overdue: int = 0
    too_stale: int = 0
    summed: int = 0
