"""The work that the coordinator hands out and the reports that it gets back, as plain values.

The pure parts use these; ``messages`` converts them to protobuf and back.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

from psrpc.core.batch import BatchId
from psrpc.core.commands import Attempt, Decision, Ended, WorkerClock


@dataclass(frozen=True, slots=True)
class Report:
    """The outcome of one batch, reported by a worker. ``loss`` is the mean over the batch and may
    be NaN; ``staleness`` is the greatest over the shards. A ``too_stale`` batch must be computed
    again, since some shard refused its gradient. ``receipts`` are the shards' proofs that they have
    the batch. ``not_finite`` names the non-finite part of the data of a ``skipped`` batch, if
    known."""

    batch: BatchId
    attempt: int
    loss: float = 0.0
    staleness: int = 0
    skipped: bool = False
    too_stale: bool = False
    receipts: tuple[bytes, ...] = field(default=(), compare=False)
    not_finite: str = ""


@dataclass(frozen=True, slots=True)
class InitializationWork:
    """Orders a worker to initialize every shard."""


@dataclass(frozen=True, slots=True)
class Train:
    """Orders a worker to compute these batches in order and push each (async, ssp). ``fresh``: pull
    before the first. ``clock``: send it with pulls and pushes, since the shards count steps
    (ssp)."""

    batches: tuple[Attempt, ...]
    fresh: bool = False
    clock: WorkerClock | None = None


@dataclass(frozen=True, slots=True)
class Round:
    """Orders a worker to compute one micro-batch of a round, stage it and commit it (sync). It is
    computed from version ``round``, or from the ``newest``. ``pull_next``: the worker probably gets
    no other micro-batch of the round, so it may wait for the next round's parameters while it
    commits. ``ahead`` is a second micro-batch of the round for this worker: it may compute it while
    it commits this one. Those ``beside`` it are computed at the same time, on its other devices."""

    round: int
    attempt: Attempt
    decision: Decision | None
    newest: bool = False
    pull_next: bool = False
    ahead: Attempt | None = None
    beside: tuple[Attempt, ...] = ()


@dataclass(frozen=True, slots=True)
class RoundsLease:
    """Orders a worker to compute these attempts in order, each from exactly the version of its
    round, and to stage them on all shards. It does not commit them, since the shards already know
    the decisions of these rounds."""

    attempts: tuple[tuple[int, Attempt], ...]


@dataclass(frozen=True, slots=True)
class EvaluationWork:
    """Orders a worker to evaluate records ``[start, stop)`` of the evaluation data on a kept
    snapshot."""

    evaluation: str
    task: int
    snapshot: str
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class MetricVariable:
    """One variable of a metric, which is summed over tasks. ``values`` are row-major."""

    shape: tuple[int, ...]
    values: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class MergeWork:
    """Orders a worker to turn the summed metric states of an evaluation into results. For
    ``training`` data, the states are that of the mean loss and one flat variable of all other
    metrics."""

    evaluation: str
    states: tuple[MetricVariable, ...]
    training: bool = False


@dataclass(frozen=True, slots=True)
class Wait:
    """No work now, and why. ``until`` is the time from which on asking again may help although
    nothing has changed, or None."""

    reason: str
    until: float | None = None


TrainingWork: TypeAlias = Train | Round | RoundsLease | Wait

Work: TypeAlias = InitializationWork | EvaluationWork | MergeWork | TrainingWork | Ended


@dataclass(frozen=True, slots=True)
class TrainingPosition:
    """The training position. ``step`` is the global step, ``batches`` counts micro-batches,
    ``examples`` those that took part (skipped ones do not); all over the whole job."""

    step: int
    total_steps: int
    epoch: int
    batches: int
    examples: int
