"""Requests to a shard and its answers as plain values, between servicer and engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from pserver.core.applied import AppliedSet
from pserver.core.assembly import Extent
from pserver.core.fence import Fence
from pserver.core.table_ids import TableIds
from pserver.tables.tables import FrozenTables, Tables
from pserver.updates.engine import Slots
from psrpc.core.batch import BatchId
from psrpc.core.commands import Attempt, Decision, WorkerClock
from psrpc.core.encoding import Encoding
from psrpc.core.shard_reports import AppliedEpoch
from psrpc.security.signatures import SignedDecision

NDArray = npt.NDArray[Any]
Outcome = Literal["applied", "already_applied", "staged", "skipped", "too_stale", "one_by_one"]


@dataclass(frozen=True, slots=True)
class InitializeRequest:
    """The header of ``Initialize``."""

    fence: Fence
    extents: tuple[Extent, ...]
    grant: bytes = b""


@dataclass(frozen=True, slots=True)
class SummedBatch:
    """A batch whose gradient is part of the sum that another batch's push carries."""

    attempt: Attempt
    totals: tuple[float, ...] = ()
    grant: bytes = b""


@dataclass(frozen=True, slots=True)
class PushRequest:
    """The header of a push. ``worker`` is empty until :mod:`pserver.engine.gate` has
    identified it. If there are ``summed`` batches, the gradient is the sum of theirs and its
    own."""

    fence: Fence
    worker: str
    attempt: Attempt
    base_version: int
    examples: int
    skipped: bool
    extents: tuple[Extent, ...]
    rows: TableIds = ()
    totals: tuple[float, ...] = ()
    grant: bytes = b""
    summed: tuple[SummedBatch, ...] = ()

    @property
    def batch(self) -> BatchId:
        """The batch of the gradient; of a sum, the first."""
        return self.attempt.batch

    @property
    def parts(self) -> tuple[SummedBatch, ...]:
        """All batches of the gradient: one, unless it is a sum."""
        return (SummedBatch(self.attempt, self.totals, self.grant), *self.summed)

    @property
    def attempts(self) -> list[Attempt]:
        """Of all :attr:`parts`."""
        return [self.attempt, *[each.attempt for each in self.summed]]

    @property
    def batches(self) -> list[BatchId]:
        """Of all :attr:`parts`."""
        return [attempt.batch for attempt in self.attempts]


@dataclass(frozen=True, slots=True)
class PushResult:
    """Outcome of a push; see the protobuf message ``PushResult``.

    ``skipped``: the shard has recorded the batch without a gradient. ``behind``: the values sent
    with this result are older than the worker's next step allows (ssp). ``summed_skipped`` and
    ``summed_receipts`` are of the further batches of a sum. Comparison looks at outcome, version
    and staleness only.
    """

    outcome: Outcome
    version: int
    staleness: int = 0
    apply_us: int = field(default=0, compare=False)
    skipped: bool = field(default=False, compare=False)
    receipt: bytes = field(default=b"", compare=False)
    behind: bool = field(default=False, compare=False)
    waited_us: int = field(default=0, compare=False)
    summed_skipped: tuple[bool, ...] = field(default=(), compare=False)
    summed_receipts: tuple[bytes, ...] = field(default=(), compare=False)


@dataclass(frozen=True, slots=True)
class StagedEverywhere:
    """An attempt that every shard holds, with their receipts, by shard."""

    attempt: Attempt
    receipts: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class PullRequest:
    """The header of a pull.

    ``source`` is None for the newest values, the number of a round, or the name of a snapshot.
    ``worker`` is empty and ``decision`` None until :mod:`pserver.engine.gate` has identified the
    worker and checked ``signed`` and ``staged``. ``clock`` is only used in ssp; it has no worker
    name until then.
    """

    fence: Fence
    worker: str
    source: int | str | None
    decision: Decision | None = None
    encoding: Encoding = "plain"
    rows: TableIds = ()
    rows_only: bool = False
    signed: SignedDecision | None = None
    staged: tuple[StagedEverywhere, ...] = ()
    clock: WorkerClock | None = None
    gone: Callable[[], bool] = field(default=lambda: False, compare=False)
    """Whether the caller has gone, which ends the wait for a round."""


@dataclass(frozen=True, slots=True)
class RowsRequest:
    """The rows that a pull asks for. They are written to ``into`` (float32 ``[n, width]`` per
    table), or to new arrays if that is None. With ``only`` the pull asks for no arenas."""

    ids: TableIds
    into: tuple[npt.NDArray[np.float32], ...] | None = None
    only: bool = False


@dataclass(frozen=True, slots=True, weakref_slot=True)
class Values:
    """All arenas of a shard at one version, ``[shard length]`` each, read-only.

    ``encoding`` applies to arenas whose plan allows one (``ArenaPlan.encodable``). ``rows`` are the
    requested rows, ``[n, width]`` per table; with ``rows_only`` there are no arenas."""

    version: int
    generation: int
    arrays: Mapping[str, NDArray]
    encoding: Encoding = "plain"
    rows: tuple[npt.NDArray[np.float32], ...] = ()


@dataclass(frozen=True, slots=True)
class LookedUp:
    """Rows of one table, float32 ``[n, width]``, and whether the table has them, bool ``[n]``."""

    version: int
    generation: int
    rows: npt.NDArray[np.float32]
    present: npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The whole state of a shard at one moment: the contents of its checkpoint.

    Attributes:
        tables: the rows of that moment, if the job has tables. Read them only with ``lock`` held, a
            block at a time, since training waits for it. The receiver has to call :meth:`close`
            when done; otherwise memory grows.
        lock: the shard's, reentrant.
        let_go: called by ``close``.
    """

    values: Values
    slots: Slots
    applied: tuple[AppliedEpoch, ...]
    tables: FrozenTables | None = None
    lock: AbstractContextManager[object] = field(default_factory=nullcontext, compare=False)
    let_go: Callable[[], None] = field(default=lambda: None, compare=False)

    def close(self) -> None:
        """Releases the rows; may be repeated."""
        self.let_go()


@dataclass(frozen=True, slots=True)
class RestoredState:
    """The whole state of a shard, read from a checkpoint. The receiver owns the arrays.

    ``load_rows`` fills empty tables; see :meth:`pserver.engine.parameters.Parameters.restore`."""

    values: Mapping[str, NDArray]
    slots: Slots
    applied: AppliedSet
    version: int
    load_rows: Callable[[Tables], None] | None = None


@dataclass(frozen=True, slots=True)
class Begun:
    """The state of a shard after ``Begin``, with the batches that its parameters include."""

    generation: int
    version: int
    initialized: bool
    applied: tuple[AppliedEpoch, ...]
