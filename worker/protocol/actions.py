"""What a worker does, as values: ``worker.protocol.conduct`` yields them, a performer carries them
out.

Every action says what its performer answers; an action that says nothing is answered by None. Any
of them may instead raise ``Stopped``, ``JobFailed``, or ``StaleGeneration``: this worker has to
join anew, so that nothing which it computed before may count.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from psrpc.core.batch import BatchId
from psrpc.v1 import coordinator_pb2, types_pb2
from worker.protocol.done import DoneBatch

WorkDone: TypeAlias = (
    coordinator_pb2.InitializeDone | coordinator_pb2.EvaluateDone | coordinator_pb2.MergeDone
)


@dataclass(frozen=True, slots=True)
class Register:
    """Become a worker of the job, or become one again; maybe under another name."""


@dataclass(frozen=True, slots=True)
class Join:
    """Find out where the shards are, which may take until all are ready, and get ready to call
    them in that generation."""


@dataclass(frozen=True, slots=True)
class Rejoin:
    """Drop all that belongs to the generation that was joined: connections, memory, leases, a
    request that is under way; then pause a little. ``Register`` comes next."""

    reason: str


@dataclass(frozen=True, slots=True)
class Lease:
    """Ask for work. Answered by a ``psrpc.v1.Lease``.

    ``after`` is why the coordinator had none at the last time of asking; empty where it had.
    """

    after: str = ""


@dataclass(frozen=True, slots=True)
class LeaseAhead:
    """Begin to ask for work, and go on at once; ``TakeLease`` follows, or ``Rejoin``."""


@dataclass(frozen=True, slots=True)
class TakeLease:
    """Wait for what ``LeaseAhead`` brings. Answered by a ``psrpc.v1.Lease``. Batches that are done
    by now must be reported meanwhile: whether there is more work may depend on them."""


@dataclass(frozen=True, slots=True)
class Expect:
    """These batches are computed next: good for reading ahead, and for nothing else. With
    ``instead``, those that were expected before are not."""

    batches: tuple[BatchId, ...]
    instead: bool = False


@dataclass(frozen=True, slots=True)
class Pull:
    """Receive the parameters that gradients are computed from: the newest (None), or exactly those
    of a round. The decision of the round before goes along, for shards that have not applied it.
    ``batch`` is computed next: rows of embedding tables that it needs may come along, and those
    that came before are of no use any more.

    Raises ``RoundPassed``.
    """

    round: int | None = None
    decision: types_pb2.SignedDecision | None = None
    batch: BatchId | None = None


@dataclass(frozen=True, slots=True)
class Compute:
    """Compute the gradient of a batch at the parameters that were received last, and keep it for
    the push that follows. Rows of embedding tables that it needs, and that have not come yet, are
    received first: of the same round, or the newest. ``following`` is the batch after it, where it
    is known. Answered by :class:`Computed`.

    Raises ``RoundPassed``.
    """

    batch: BatchId
    following: BatchId | None = None


@dataclass(frozen=True, slots=True)
class Computed:
    """Answers ``Compute``: the mean loss over the batch; whether all of the gradient is finite; and
    if it is not, what of the data is not either, in words, where that is known."""

    loss: float
    finite: bool
    not_finite: str = ""


@dataclass(frozen=True, slots=True)
class PushPull:
    """Async: have every shard apply the gradient, and receive the newest parameters, and rows of
    embedding tables for the batch ``following``, where it is known. With ``skip`` the batch is
    recorded as skipped. ``grant`` came with the attempt's lease. Answered by :class:`Pushed`."""

    batch: BatchId
    attempt: int
    skip: bool = False
    following: BatchId | None = None
    grant: bytes = b""


@dataclass(frozen=True, slots=True)
class Push:
    """Sync: have every shard stage the gradient, or that the batch is skipped. ``grant`` came with
    the attempt's lease. Answered by :class:`Pushed`.

    Raises ``RoundPassed``.
    """

    batch: BatchId
    attempt: int
    skip: bool = False
    grant: bytes = b""


@dataclass(frozen=True, slots=True)
class Pushed:
    """Answers a push that every shard has answered.

    Attributes:
        staleness: the greatest over the shards; of a staged gradient, when it was staged.
        had: shards that answered that the batch had been applied before.
        asked_again: shards that had to be asked more than once: what they had may be of this push.
        too_stale: shards that have refused the gradient as too stale, and changed nothing.
        apply_s: how long the slowest shard's update took, in seconds.
        receipts: what each shard answered for the coordinator.
    """

    staleness: int = 0
    had: tuple[int, ...] = ()
    asked_again: frozenset[int] = frozenset()
    too_stale: tuple[int, ...] = ()
    apply_s: float = 0.0
    receipts: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True)
class Settle:
    """The last gradient has been or will be used by all shards but ``unused``, which never will:
    what compression left out of it is accounted for."""

    unused: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class TakeBack:
    """No shard has used the last gradient that was not settled, and none will."""


@dataclass(frozen=True, slots=True)
class Done:
    """Async: report a batch that every shard has answered, when there is occasion."""

    batch: DoneBatch


@dataclass(frozen=True, slots=True)
class Commit:
    """Sync: every shard holds this attempt. Answered by the next ``psrpc.v1.Lease``."""

    round: int
    batch: DoneBatch


@dataclass(frozen=True, slots=True)
class Initialize:
    """Give every shard the job's first values. Answered by an ``InitializeDone``.

    ``grant`` came with the lease. ``first_rows`` is the checkpoint that tables begin with, and
    values too; empty: as the job says.
    """

    grant: bytes = b""
    first_rows: str = ""


@dataclass(frozen=True, slots=True)
class Evaluate:
    """Evaluate records on a kept snapshot. Answered by an ``EvaluateDone``.

    Raises ``RoundPassed``.
    """

    task: coordinator_pb2.EvaluateTask


@dataclass(frozen=True, slots=True)
class Merge:
    """Turn summed metric states into results. Answered by a ``MergeDone``."""

    merge: coordinator_pb2.MergeEvaluation


@dataclass(frozen=True, slots=True)
class ReportWork:
    """Report what was answered to one of the three before."""

    done: WorkDone


@dataclass(frozen=True, slots=True)
class Leave:
    """Give all leases back, best effort; it never raises. With ``fatal`` the job fails for
    everybody. The last action of a worker that has registered."""

    reason: str
    fatal: bool = False


Action: TypeAlias = (
    Register
    | Join
    | Rejoin
    | Lease
    | LeaseAhead
    | TakeLease
    | Expect
    | Pull
    | Compute
    | PushPull
    | Push
    | Settle
    | TakeBack
    | Done
    | Commit
    | Initialize
    | Evaluate
    | Merge
    | ReportWork
    | Leave
)
