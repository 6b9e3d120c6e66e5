"""The actions of a worker as values: ``worker.protocol.conduct`` yields them, a performer carries
them out.

Each documents its answer, which is None if it mentions none. Any may instead raise ``Stopped``,
``JobFailed`` or ``StaleGeneration``. After the last, the worker must join anew and drop everything
that it computed before."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import Any, TypeAlias

from psrpc.core.batch import BatchId
from psrpc.v1 import coordinator_pb2, types_pb2
from worker.protocol.done import DoneBatch

WorkDone: TypeAlias = (
    coordinator_pb2.InitializeDone | coordinator_pb2.EvaluateDone | coordinator_pb2.MergeDone
)


class Action:
    """The base of all actions; ``Computed`` and ``Pushed`` are answers."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Register(Action):
    """Register as a worker of the job, or again, possibly under another name."""


@dataclass(frozen=True, slots=True)
class Join(Action):
    """Wait until all shards are ready, and prepare to call them in that generation. Answered by the
    number of batches that this worker computes at once, one on each device; None means 1."""


@dataclass(frozen=True, slots=True)
class Rejoin(Action):
    """Drop all of the joined generation, and requests in flight; then pause briefly. ``Register``
    comes next."""

    reason: str


@dataclass(frozen=True, slots=True)
class Lease(Action):
    """Ask for work. Answered by a ``psrpc.v1.Lease``. ``after`` is why the coordinator had no work
    the last time; empty if it had some."""

    after: str = ""


@dataclass(frozen=True, slots=True)
class LeaseAhead(Action):
    """Start to request work, and continue at once; ``TakeLease`` or ``Rejoin`` follows."""


@dataclass(frozen=True, slots=True)
class TakeLease(Action):
    """Wait for the lease that ``LeaseAhead`` requested, and meanwhile report finished batches, on
    which further work may depend. Answered by a ``psrpc.v1.Lease``."""


@dataclass(frozen=True, slots=True)
class Expect(Action):
    """Announce the batches to compute next, so that they can be read ahead. With ``instead``, they
    replace the batches announced before."""

    batches: tuple[BatchId, ...]
    instead: bool = False


@dataclass(frozen=True, slots=True)
class Pull(Action):
    """Receive the parameters that gradients are computed from: those of ``round``, or the newest
    (None). ``decision``, of the round before, is for shards that have not applied it yet. Table
    rows of ``batch``, which is computed next, may come along; they replace rows received before.
    ``ahead`` (the round was decided ahead) and ``clock`` (ssp) mean that the pull waits for other
    workers, which may need long.

    Raises ``RoundPassed``.
    """

    round: int | None = None
    decision: types_pb2.SignedDecision | None = None
    batch: BatchId | None = None
    ahead: bool = False
    clock: types_pb2.WorkerClock | None = None


@dataclass(frozen=True, slots=True)
class Compute(Action):
    """Compute the gradient of a batch at the parameters received last, and keep it for the push
    that follows. Missing table rows are received first: of the same round, or the newest.
    ``following`` is the batch to compute after it, if known: its rows may be received meanwhile.
    The batches ``beside`` it are computed at once, each on another device and for a push of its
    own. With ``add`` the finite gradients, each times its number of records, are added to the sum
    for the next push of one of them. Answered by :class:`Computed`; with ``beside``, by a tuple of
    one for each batch. Raises ``RoundPassed``."""

    batch: BatchId
    following: BatchId | None = None
    beside: tuple[BatchId, ...] = ()
    add: bool = False


@dataclass(frozen=True, slots=True)
class Computed:
    """Answers ``Compute``: the mean loss over the batch; whether the whole gradient is finite; and
    if it is not, which records have data that is not finite either (empty if unknown)."""

    loss: float
    finite: bool
    not_finite: str = ""


@dataclass(frozen=True, slots=True)
class PushPull(Action):
    """Async: have every shard apply the gradient, and receive the newest parameters and the table
    rows for the batch ``following``, if known; nothing without ``pull``. With ``skip`` the batch is
    recorded as skipped. ``grant`` came with the attempt's lease, and ``clock`` (ssp) with the task.
    Answered by :class:`Pushed`; with ``summed``, attempts whose gradients are added to it, by a
    tuple of one for each."""

    batch: BatchId
    attempt: int
    skip: bool = False
    following: BatchId | None = None
    grant: bytes = b""
    clock: types_pb2.WorkerClock | None = None
    pull: bool = True
    summed: tuple[types_pb2.Attempt, ...] = ()


@dataclass(frozen=True, slots=True)
class Push(Action):
    """Sync: have every shard stage the gradient or, with ``skip``, record that the batch is
    skipped. ``grant`` came with the attempt's lease; ``ahead`` says that the round is decided
    already; ``summed`` are the others of a sum. Answered by :class:`Pushed`, with
    ``summed`` by a tuple of one for each. Raises ``RoundPassed``."""

    batch: BatchId
    attempt: int
    skip: bool = False
    grant: bytes = b""
    ahead: bool = False
    summed: tuple[types_pb2.Attempt, ...] = ()


@dataclass(frozen=True, slots=True)
class PushNext(Action):
    """Sync: do as :class:`Push` for a round that was decided ahead; then receive the parameters of
    ``round``, the next round with a micro-batch of this worker, and the table rows for the batch
    ``following``; nothing if the sum is refused. Answered as :class:`Push`. Raises the same."""

    batch: BatchId
    attempt: int
    round: int
    following: BatchId | None = None
    skip: bool = False
    grant: bytes = b""
    summed: tuple[types_pb2.Attempt, ...] = ()


@dataclass(frozen=True, slots=True)
class Confirm(Action):
    """Sync: tell every shard that all of them hold the gradients pushed for rounds decided ahead.
    A pull of such a round does so, too."""


@dataclass(frozen=True, slots=True)
class Pushed:
    """Answers a push that every shard has answered.

    Attributes:
        staleness: the greatest over the shards; for a staged gradient, that when it was staged.
        had: shards that had applied the batch before.
        asked_again: shards whose call was repeated; they may be in ``had`` due to an earlier try.
        too_stale: shards that refused the gradient as too stale, and changed nothing.
        one_by_one: the sum cannot be pushed, or a shard has refused it: push the gradients singly.
        apply_s: duration of the slowest shard's update, in seconds.
        receipts: each shard's receipt for the coordinator.
    """

    staleness: int = 0
    had: tuple[int, ...] = ()
    asked_again: frozenset[int] = frozenset()
    too_stale: tuple[int, ...] = ()
    one_by_one: bool = False
    apply_s: float = 0.0
    receipts: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True)
class Settle(Action):
    """Keep the residual of compression, since shards use the gradient of ``batch`` (None: the last
    one). For the shards ``unused``, which never will, restore that from before the gradient."""

    unused: tuple[int, ...] = ()
    batch: BatchId | None = None


@dataclass(frozen=True, slots=True)
class TakeBack(Action):
    """Restore the residual of compression from before the gradient of ``batch`` (None: all that are
    kept), which no shard will use. Does nothing if it is settled."""

    batch: BatchId | None = None


@dataclass(frozen=True, slots=True)
class Done(Action):
    """Queue the report of a batch that every shard has answered, for the next call. Not for open
    rounds (sync)."""

    batch: DoneBatch


@dataclass(frozen=True, slots=True)
class Commit(Action):
    """Sync: commit an attempt that every shard holds. With ``pull_next``, meanwhile receive the
    parameters of the next round, if they come soon. Answered by :class:`Committed`."""

    round: int
    batch: DoneBatch
    pull_next: bool = False


@dataclass(frozen=True, slots=True)
class Committed:
    """The reply to ``Commit``: the next ``psrpc.v1.Lease``, and whether the next round's parameters
    have been pulled."""

    lease: coordinator_pb2.Lease
    pulled: bool = False


@dataclass(frozen=True, slots=True)
class BeginCommit(Action):
    """Sync: start to commit an attempt that every shard holds; ``TakeCommit`` or ``Rejoin``
    follows."""

    round: int
    batch: DoneBatch


@dataclass(frozen=True, slots=True)
class TakeCommit(Action):
    """Wait for the answer to ``BeginCommit``. Answered by the next ``psrpc.v1.Lease``."""


@dataclass(frozen=True, slots=True)
class Initialize(Action):
    """Give every shard the job's first values, or those of the checkpoint ``first_rows``, which has
    the first rows of tables. ``grant`` came with the lease. Answered by an ``InitializeDone``."""

    grant: bytes = b""
    first_rows: str = ""


@dataclass(frozen=True, slots=True)
class Evaluate(Action):
    """Evaluate records on a snapshot that shards keep. Answered by an ``EvaluateDone``.

    Raises ``RoundPassed``.
    """

    task: coordinator_pb2.EvaluateTask


@dataclass(frozen=True, slots=True)
class Merge(Action):
    """Turn summed metric states into results. Answered by a ``MergeDone``."""

    merge: coordinator_pb2.MergeEvaluation


@dataclass(frozen=True, slots=True)
class ReportWork(Action):
    """Report the answer to ``Initialize``, ``Evaluate`` or ``Merge``."""

    done: WorkDone


@dataclass(frozen=True, slots=True)
class Leave(Action):
    """Return all leases, best effort; never raises. ``fatal`` fails the job. The last action."""

    reason: str
    fatal: bool = False


Conduct: TypeAlias = Generator[Action, Any, None]
"""A part of a worker's protocol."""

Leased: TypeAlias = Generator[Action, Any, coordinator_pb2.Lease]
"""A part of a worker's protocol that returns the next lease."""
