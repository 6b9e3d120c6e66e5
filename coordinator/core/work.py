"""What the coordinator hands out and gets back, as plain values.

The pure cores speak these; ``messages`` turns them into protobuf and back.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

from psrpc.core.batch import BatchId
from psrpc.core.intervals import IntervalSet
from psrpc.core.policy import ASYNC, Policy
from psrpc.core.tables import FULL_EVERY

Positions: TypeAlias = Mapping[int, IntervalSet]
"""Positions of records, by epoch."""


@dataclass(frozen=True, slots=True)
class Attempt:
    """One try at a batch; ``number`` is unique in a job and rises."""

    batch: BatchId
    number: int


@dataclass(frozen=True, slots=True)
class Report:
    """The fate of one batch, as a worker tells it. ``loss`` is the mean over the batch and may be
    NaN; ``staleness`` is the greatest over the shards. Of a batch that is ``too_stale`` some shard
    refused the gradient, so it has to be computed again. ``receipts`` are the shards' own words.
    ``not_finite`` says in words what of the data of a batch that was ``skipped`` is not finite,
    where that is known."""

    batch: BatchId
    attempt: int
    loss: float = 0.0
    staleness: int = 0
    skipped: bool = False
    too_stale: bool = False
    receipts: tuple[bytes, ...] = field(default=(), compare=False)
    not_finite: str = ""


@dataclass(frozen=True, slots=True)
class SnapshotOrder:
    """Tells the shards to freeze their state under ``name``: to ``write`` it into ``directory``
    (relative to the run directory), to ``keep`` it for pulls until it is released, or both.
    ``base`` is the checkpoint, named in the same way, whose rows of tables a shard may add to, as
    long as there are at most ``parts`` files of them."""

    name: str
    global_step: int
    write: bool = False
    keep: bool = False
    directory: str = ""
    base: str = ""
    parts: int = FULL_EVERY


@dataclass(frozen=True, slots=True)
class Decision:
    """A decided round: exactly ``attempts``, in batch-id order, turn version ``round`` into
    ``round + 1``."""

    generation: int
    round: int
    attempts: tuple[Attempt, ...]
    snapshots: tuple[SnapshotOrder, ...] = ()


@dataclass(frozen=True, slots=True)
class Release:
    """Tells the shards to forget a kept snapshot."""

    name: str


@dataclass(frozen=True, slots=True)
class Begin:
    """Tells one shard to stand at ``generation``: with what it holds (after ``decision``, where it
    is given and is of the round that the shard stands at), with the checkpoint ``restore``
    (relative to the run directory), or, with neither, with nothing. ``settings`` is the policy of
    number ``policy``; ``version``, where it is given, what the shard's version becomes; the other
    two are for the learning rate, see the message of the same name."""

    generation: int
    policy: int
    keep: bool = False
    restore: str = ""
    decision: Decision | None = None
    settings: Policy = ASYNC
    version: int | None = None
    rate_scale: float = 1.0
    warmup_updates: int = 0


@dataclass(frozen=True, slots=True)
class Revocation:
    """Tells the shards to refuse a worker that is gone, and to drop these of its attempts."""

    number: int
    worker: str
    attempts: tuple[Attempt, ...] = ()


@dataclass(frozen=True, slots=True)
class Ended:
    """The job is over; ``reason`` says why it failed, or was stopped."""

    failed: bool
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Initialize:
    """Initialize every shard."""


@dataclass(frozen=True, slots=True)
class Train:
    """Run these batches in order and push each (async, ssp). ``fresh``: pull before the first."""

    batches: tuple[Attempt, ...]
    fresh: bool = False


@dataclass(frozen=True, slots=True)
class Round:
    """Compute one micro-batch of a round, stage it, commit it (sync). It is computed from version
    ``round``, or from the ``newest`` that there is."""

    round: int
    attempt: Attempt
    decision: Decision | None
    newest: bool = False


@dataclass(frozen=True, slots=True)
class Evaluate:
    """Evaluate records ``[start, stop)`` of the evaluation data on a kept snapshot."""

    evaluation: str
    task: int
    snapshot: str
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class MetricVariable:
    """One variable of a metric: additive over tasks. ``values`` are row-major."""

    shape: tuple[int, ...]
    values: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Merge:
    """Turn the summed metric states of an evaluation into results; those of ``training`` data are
    the mean loss's, and one flat variable of all others."""

    evaluation: str
    states: tuple[MetricVariable, ...]
    training: bool = False


@dataclass(frozen=True, slots=True)
class Wait:
    """No work now, and why. ``until`` is when asking again may bring some though nothing has
    happened; None if only an event can."""

    reason: str
    until: float | None = None


Command: TypeAlias = Decision | SnapshotOrder | Release | Begin | Revocation | Ended
Work: TypeAlias = Initialize | Train | Round | Evaluate | Merge | Wait | Ended


@dataclass(frozen=True, slots=True)
class Span:
    """Where training stands. ``step`` is the global step, ``batches`` counts micro-batches,
    ``examples`` those that took part (skipped ones do not); all over the whole job."""

    step: int
    total_steps: int
    epoch: int
    batches: int
    examples: int


class Schedule(Protocol):
    """Who trains what next: the ledger (async, ssp) or the rounds (sync)."""

    @property
    def finished(self) -> bool:
        """Whether every batch of the job is done."""

    @property
    def exhausted(self) -> bool:
        """Whether every batch is done that the policy is for."""

    @property
    def drained(self) -> bool:
        """Whether nothing is under way any more since :meth:`drain`; all shards have the same."""

    @property
    def idle(self) -> bool:
        """Whether nobody holds anything that is not done."""

    @property
    def finished_epochs(self) -> list[int]:
        """All epochs that are done."""

    @property
    def span(self) -> Span:
        """Where training stands."""

    def lease(
        self, worker: str, now: float, received: int, workers: int, /
    ) -> Train | Round | Wait:
        """Work for ``worker``. ``received`` is the greatest attempt that reached it, ``workers``
        how many share what is left."""

    def report(self, worker: str, reports: Sequence[Report], now: float, /) -> list[Report]:
        """Records batches that are done on all shards; returns those that count now."""

    def revoke(self, worker: str) -> list[Attempt]:
        """What ``worker``, which is gone, holds and has not committed. Nobody else gets it yet."""

    def release(self, worker: str) -> int:
        """No shard takes anything from ``worker`` any more, so others get what it held; how many
        batches that are."""

    def hand_over(self, stuck: Collection[str], /) -> list[str]:
        """``stuck`` are the workers that cannot go on, all of them: others may do what they hold.
        Those of them of which shards have to take nothing more before that."""

    def extend(self, until_epoch: int, /) -> None:
        """Epochs before ``until_epoch`` may be begun from now on."""

    def drain(self) -> None:
        """Begins nothing new; what is under way is finished."""

    def tick(self, now: float, /) -> None:
        """What time alone brings."""

    def stragglers(self, now: float, /) -> list[str]:
        """Who is late with what all others wait for, in words."""

    def idle_worker(self, worker: str) -> None:
        """``worker`` does something else, such as an evaluation; it does not hold up others."""

    def take_finished_epochs(self) -> list[int]:
        """Epochs whose batches have all been done since the last call."""

    def waiting_for(self) -> str:
        """What the next step waits for, in words."""
