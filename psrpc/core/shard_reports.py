"""Reports of shards to the coordinator, as plain values. Both roles use these;
:mod:`psrpc.wire.shard_reports` converts them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple, NotRequired, TypeAlias, TypedDict

from psrpc.core.intervals import IntervalSet

Positions: TypeAlias = Mapping[int, IntervalSet]
"""Positions of records, by epoch."""


MAX_WORKERS = 256
"""Maximum number of workers whose figures are kept separately."""

MAX_EPOCHS = 1024
"""Maximum number of epochs whose totals one report contains. It contains the newest; the totals of
older epochs were reported before."""

MAX_COUNTS = 256
"""Maximum number of entries of a histogram that the coordinator reads. Shards send 64."""


class AppliedEpoch(TypedDict):
    """One epoch of an applied-set as plain JSON. Load-bearing: the header of a shard's file
    contains it."""

    epoch: int
    applied: list[list[int]]
    skipped: list[list[int]]
    totals: NotRequired[list[float]]


class EpochTotals(NamedTuple):
    """Sums over the ``records`` of an epoch that a shard has applied, see
    :mod:`psrpc.core.batch`."""

    epoch: int
    records: int
    totals: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class ShardRegistration:
    """A shard's request to register. ``address`` is the HOST:PORT where workers reach it;
    ``worker`` is the incarnation of the worker that hosts it, 0 for a process of its own."""

    shard: int
    incarnation: int
    address: str
    host: str
    pid: int
    software: str
    worker: int = 0


@dataclass(frozen=True, slots=True)
class HeldState:
    """The state of a shard: whether it has parameters (``initialized``), their ``version``, and the
    ``generation`` that it is in."""

    incarnation: int
    generation: int = 0
    initialized: bool = False
    version: int = 0


@dataclass(frozen=True, slots=True)
class HeldReport:
    """A shard's state when it has begun a generation: its applied-set, the skipped part of that,
    and the totals of its epochs."""

    holding: HeldState
    applied: Positions
    skipped: Positions
    totals: tuple[EpochTotals, ...] = ()


@dataclass(frozen=True, slots=True)
class ShardFigures:
    """Figures of a shard.

    ``staleness_counts[s]`` is the number of pushes applied with staleness s; the last entry also
    counts all larger ones. ``workers`` has the same counts by worker. ``apply_s`` is the time spent
    in updates. See HeartbeatShardRequest for the others.

    All counts begin at 0 when a process starts, so a sum over shards covers only the present
    processes."""

    version: int = 0
    applied: int = 0
    already_applied: int = 0
    skipped: int = 0
    refused: int = 0
    waiting_for: str = ""
    generation: int = 0
    staleness_counts: tuple[int, ...] = ()
    workers: Mapping[str, tuple[int, ...]] = field(default_factory=lambda: MappingProxyType({}))
    too_stale: int = 0
    uncompensated: int = 0
    apply_s: float = 0.0
    gradient_nbytes: int = 0
    memory_nbytes: int = 0
    table_rows: int = 0
    table_nbytes: int = 0
    epochs: tuple[EpochTotals, ...] = ()


@dataclass(frozen=True, slots=True)
class ShardHeartbeat:
    """A heartbeat of a shard. ``failure`` says why it cannot continue, and ``revoked`` is the
    number of the newest revocation that it has carried out. A ``leaving`` shard waits for its state
    to be saved."""

    shard: int
    incarnation: int
    figures: ShardFigures
    failure: str = ""
    revoked: int = 0
    leaving: bool = False


@dataclass(frozen=True)
class RowsFileEntry:
    """One file of a shard's rows, which may have been written for an earlier checkpoint.
    Load-bearing: manifests contain these fields."""

    name: str
    nbytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class ShardFile:
    """One shard's part of a snapshot. ``file`` is empty if the snapshot was not to be written.
    ``rows`` are the files with the rows of its tables, in order; ``evicted`` is the file of evicted
    rows."""

    shard: int
    version: int
    file: str = ""
    nbytes: int = 0
    sha256: str = ""
    rows: tuple[RowsFileEntry, ...] = ()
    evicted: RowsFileEntry | None = None


@dataclass(frozen=True, slots=True)
class SnapshotReport:
    """A shard's report of the snapshot ``name``, with the totals of that moment. ``error`` says why
    the snapshot could not be taken or written."""

    incarnation: int
    generation: int
    name: str
    file: ShardFile
    error: str = ""
    epochs: tuple[EpochTotals, ...] = ()
