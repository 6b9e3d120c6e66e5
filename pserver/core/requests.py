"""What a shard is asked to do, as plain values: the servicer's words to the engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from pserver.core.applied import AppliedEpoch, AppliedSet
from pserver.core.assembly import Extent
from pserver.core.fence import Fence
from pserver.core.staging import Attempt
from pserver.core.table_ids import TableIds
from pserver.tables.tables import FrozenTables, Tables
from pserver.updates.engine import Slots
from psrpc.core.batch import BatchId
from psrpc.core.encoding import Encoding
from psrpc.core.policy import Policy
from psrpc.core.tables import FULL_EVERY
from psrpc.security.signatures import Keys, SignedDecision

NDArray = npt.NDArray[Any]
Outcome = Literal["applied", "already_applied", "staged", "skipped", "too_stale"]


@dataclass(frozen=True, slots=True)
class InitializeRequest:
    """The header of ``Initialize``."""

    fence: Fence
    extents: tuple[Extent, ...]
    grant: bytes = b""


@dataclass(frozen=True, slots=True)
class PushRequest:
    """The header of a push. ``worker`` is empty until :mod:`pserver.engine.authority` has found out
    who it is from."""

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

    @property
    def batch(self) -> BatchId:
        """The batch that the gradient is of."""
        return self.attempt.batch


@dataclass(frozen=True, slots=True)
class PushResult:
    """What became of a push; see the message of the same name. How long the update took says
    nothing about that. ``skipped``: the shard has the batch without a gradient."""

    outcome: Outcome
    version: int
    staleness: int = 0
    apply_us: int = field(default=0, compare=False)
    skipped: bool = field(default=False, compare=False)
    receipt: bytes = field(default=b"", compare=False)


@dataclass(frozen=True, slots=True)
class SnapshotOrder:
    """See the message of the same name."""

    name: str
    write: bool
    keep: bool
    directory: str
    global_step: int
    base: str = ""
    parts: int = FULL_EVERY


@dataclass(frozen=True, slots=True)
class Decision:
    """See the message of the same name."""

    generation: int
    round: int
    attempts: tuple[Attempt, ...]
    snapshots: tuple[SnapshotOrder, ...] = ()


@dataclass(frozen=True, slots=True)
class Begin:
    """See the message of the same name. What the shard holds then is what it holds now with
    ``keep``, else the checkpoint ``restore``, else nothing. Without ``settings`` its policy
    stays."""

    generation: int
    policy: int
    keep: bool = False
    restore: str = ""
    decision: Decision | None = None
    settings: Policy | None = None
    version: int | None = None
    rate_scale: float = 1.0
    warmup_updates: int = 0
    keys: Keys | None = None


@dataclass(frozen=True, slots=True)
class Revocation:
    """See the message of the same name."""

    number: int
    worker: str
    attempts: tuple[Attempt, ...] = ()


@dataclass(frozen=True, slots=True)
class PullRequest:
    """``source`` is None for the newest values, a round, or the name of a snapshot. ``worker`` is
    empty and ``decision`` absent until :mod:`pserver.engine.authority` has found out who it is from
    and checked ``signed``."""

    fence: Fence
    worker: str
    source: int | str | None
    decision: Decision | None = None
    encoding: Encoding = "plain"
    rows: TableIds = ()
    rows_only: bool = False
    signed: SignedDecision | None = None


@dataclass(frozen=True, slots=True)
class RowsRequest:
    """The rows of a pull: those of ``ids``, each table's into its float32 ``[n, width]`` of
    ``into``, or into new arrays. ``only``: no arenas."""

    ids: TableIds
    into: tuple[npt.NDArray[np.float32], ...] | None = None
    only: bool = False


@dataclass(frozen=True, slots=True, weakref_slot=True)
class Values:
    """All arenas of a shard at one version, ``[shard length]`` each, read-only.

    ``encoding`` is that of the arenas which may have one (see ``assembly.encodable``). ``rows`` are
    those that were asked for with them, or instead of them: ``[n, width]`` of each table.
    """

    version: int
    generation: int
    arrays: Mapping[str, NDArray]
    encoding: Encoding = "plain"
    rows: tuple[npt.NDArray[np.float32], ...] = ()


@dataclass(frozen=True, slots=True)
class LookedUp:
    """Rows of one table, float32 ``[n, width]``, and whether it has them, bool ``[n]``."""

    version: int
    generation: int
    rows: npt.NDArray[np.float32]
    present: npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A shard's whole state at one moment: what a checkpoint of it holds.

    Attributes:
        tables: the rows of that moment, if the job has tables. They are only read with ``lock``
            held, a block at a time, since training waits for it. Whoever gets the snapshot and
            has done with it says so by :meth:`close`; without that the memory grows.
        lock: the shard's; a thread that has it may take it again.
        let_go: what ``close`` does.
    """

    values: Values
    slots: Slots
    applied: tuple[AppliedEpoch, ...]
    tables: FrozenTables | None = None
    lock: AbstractContextManager[object] = field(default_factory=nullcontext, compare=False)
    let_go: Callable[[], None] = field(default=lambda: None, compare=False)

    def close(self) -> None:
        """Lets go of the rows; more than once is no error."""
        self.let_go()


@dataclass(frozen=True, slots=True)
class RestoredState:
    """A shard's whole state, as a checkpoint gives it back. The arrays are nobody else's.

    ``load_rows`` puts the rows into tables that are empty; see
    :meth:`pserver.engine.parameters.Parameters.restore`.
    """

    values: Mapping[str, NDArray]
    slots: Slots
    applied: AppliedSet
    version: int
    load_rows: Callable[[Tables], None] | None = None


@dataclass(frozen=True, slots=True)
class Begun:
    """Where a shard stands, and what the parameters that it holds have seen."""

    generation: int
    version: int
    initialized: bool
    applied: tuple[AppliedEpoch, ...]
