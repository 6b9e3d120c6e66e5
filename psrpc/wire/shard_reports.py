"""Converts what shards report to the coordinator into messages, and back.

The decoders drop or limit impossible values, and sanitize the texts of shards.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from psrpc.core.batch import LOSS, MAX_VALUES
from psrpc.core.errors import InvalidArgument
from psrpc.core.intervals import IntervalSet
from psrpc.core.names import check_file_name
from psrpc.core.shard_reports import (
    MAX_COUNTS,
    MAX_WORKERS,
    AppliedEpoch,
    EpochTotals,
    HeldReport,
    HeldState,
    RowsFileEntry,
    ShardFigures,
    ShardFile,
    ShardHeartbeat,
    ShardRegistration,
    SnapshotReport,
)
from psrpc.core.text import NAME_CHARS, sanitize
from psrpc.v1 import coordinator_pb2 as pb
from psrpc.v1 import types_pb2 as types


def seconds(value: float) -> float:
    """Returns a duration from a peer, in seconds; 0.0 if it is negative or not finite."""
    return max(0.0, value) if math.isfinite(value) else 0.0


def to_registration(shard: ShardRegistration) -> pb.RegisterShardRequest:
    """Encodes a shard's request to register."""
    return pb.RegisterShardRequest(
        shard=shard.shard,
        incarnation=shard.incarnation,
        address=shard.address,
        host=shard.host,
        pid=shard.pid,
        software=shard.software,
        worker=shard.worker,
    )


def from_registration(message: pb.RegisterShardRequest) -> ShardRegistration:
    """Decodes a shard's request to register. Raises InvalidArgument for an address that sanitizing
    would alter, since workers dial it unchanged."""
    address = message.address
    if sanitize(address, NAME_CHARS) != address:
        raise InvalidArgument(
            f"a shard's address is {address[:NAME_CHARS]!r}; expected HOST:PORT of at most "
            f"{NAME_CHARS} characters"
        )
    host = sanitize(message.host, NAME_CHARS)
    shard, who = (message.shard, message.incarnation, address), message.worker
    return ShardRegistration(*shard, host, message.pid, message.software, who)


def to_watch(shard: int, held: HeldState) -> pb.WatchRequest:
    """Encodes the request of a shard with state ``held`` for its commands."""
    return pb.WatchRequest(
        shard=shard,
        incarnation=held.incarnation,
        generation=held.generation,
        initialized=held.initialized,
        version=held.version,
    )


def from_held(message: pb.WatchRequest | pb.ReportShardReadyRequest) -> HeldState:
    """Decodes the state of a shard."""
    return HeldState(message.incarnation, message.generation, message.initialized, message.version)


def to_ready(
    shard: int, held: HeldState, applied: Iterable[AppliedEpoch], error: str = ""
) -> pb.ReportShardReadyRequest:
    """Encodes the report of a shard that has begun a generation, or with ``error`` of a shard that
    cannot begin it."""
    return pb.ReportShardReadyRequest(
        shard=shard,
        incarnation=held.incarnation,
        generation=held.generation,
        version=held.version,
        initialized=held.initialized,
        applied=[
            types.AppliedEpoch(
                epoch=item["epoch"],
                applied=[types.Interval(start=a, stop=b) for a, b in item["applied"]],
                skipped=[types.Interval(start=a, stop=b) for a, b in item["skipped"]],
                totals=item.get("totals", ()),
            )
            for item in applied
        ],
        error=error,
    )


def from_ready(message: pb.ReportShardReadyRequest) -> HeldReport:
    """Decodes the report of a shard that has begun a generation. Raises InvalidArgument for an
    interval that is empty or reversed."""
    try:
        applied = {one.epoch: _from_intervals(one.applied) for one in message.applied}
        skipped = {one.epoch: _from_intervals(one.skipped) for one in message.applied}
    except ValueError as error:
        raise InvalidArgument(f"applied-set: {error}") from None
    totals = _plausible((one.epoch, len(applied[one.epoch]), one.totals) for one in message.applied)
    return HeldReport(from_held(message), applied, skipped, totals)


def _from_intervals(messages: Iterable[types.Interval]) -> IntervalSet:
    return IntervalSet((interval.start, interval.stop) for interval in messages)


def to_totals(epochs: Iterable[EpochTotals]) -> list[types.EpochTotals]:
    """Encodes totals of epochs."""
    return [types.EpochTotals(epoch=e, records=n, totals=values) for e, n, values in epochs]


def from_totals(messages: Iterable[types.EpochTotals]) -> tuple[EpochTotals, ...]:
    """Decodes totals of epochs; drops those of a wrong length or with values that are not
    finite."""
    return _plausible((one.epoch, one.records, one.totals) for one in messages)


def _plausible(epochs: Iterable[tuple[int, int, Sequence[float]]]) -> tuple[EpochTotals, ...]:
    return tuple(
        EpochTotals(epoch, records, tuple(totals))
        for epoch, records, totals in epochs
        if LOSS <= len(totals) <= MAX_VALUES and all(map(math.isfinite, totals))
    )


def to_workers(workers: Mapping[str, Sequence[int]]) -> list[types.WorkerStaleness]:
    """Encodes staleness counts by worker."""
    return [types.WorkerStaleness(worker=w, counts=counts) for w, counts in workers.items()]


def to_heartbeat(beat: ShardHeartbeat) -> pb.HeartbeatShardRequest:
    """Encodes a heartbeat of a shard."""
    figures = beat.figures
    return pb.HeartbeatShardRequest(
        shard=beat.shard,
        incarnation=beat.incarnation,
        generation=figures.generation,
        version=figures.version,
        revoked=beat.revoked,
        failure=beat.failure,
        leaving=beat.leaving,
        waiting_for=figures.waiting_for,
        applied=figures.applied,
        already_applied=figures.already_applied,
        skipped=figures.skipped,
        refused=figures.refused,
        staleness_counts=figures.staleness_counts,
        workers=to_workers(figures.workers),
        too_stale=figures.too_stale,
        uncompensated=figures.uncompensated,
        apply_s=figures.apply_s,
        gradient_nbytes=figures.gradient_nbytes,
        memory_nbytes=figures.memory_nbytes,
        table_rows=figures.table_rows,
        table_nbytes=figures.table_nbytes,
        epochs=to_totals(figures.epochs),
    )


def from_heartbeat(message: pb.HeartbeatShardRequest) -> ShardHeartbeat:
    """Decodes a heartbeat of a shard."""
    figures = ShardFigures(
        version=message.version,
        applied=message.applied,
        already_applied=message.already_applied,
        skipped=message.skipped,
        refused=message.refused,
        waiting_for=sanitize(message.waiting_for),
        generation=message.generation,
        staleness_counts=tuple(message.staleness_counts[:MAX_COUNTS]),
        workers={w.worker: tuple(w.counts[:MAX_COUNTS]) for w in message.workers[:MAX_WORKERS]},
        too_stale=message.too_stale,
        uncompensated=message.uncompensated,
        apply_s=seconds(message.apply_s),
        gradient_nbytes=message.gradient_nbytes,
        memory_nbytes=message.memory_nbytes,
        table_rows=message.table_rows,
        table_nbytes=message.table_nbytes,
        epochs=from_totals(message.epochs),
    )
    return ShardHeartbeat(
        message.shard,
        message.incarnation,
        figures,
        sanitize(message.failure),
        message.revoked,
        message.leaving,
    )


def to_snapshot_report(report: SnapshotReport) -> pb.ReportSnapshotRequest:
    """Encodes a shard's report of a snapshot."""
    file = report.file
    return pb.ReportSnapshotRequest(
        shard=file.shard,
        incarnation=report.incarnation,
        generation=report.generation,
        name=report.name,
        version=file.version,
        file=file.file,
        nbytes=file.nbytes,
        sha256=file.sha256,
        rows=map(_to_rows, file.rows),
        evicted=None if file.evicted is None else _to_rows(file.evicted),
        error=report.error,
        epochs=to_totals(report.epochs),
    )


def from_snapshot_report(message: pb.ReportSnapshotRequest) -> SnapshotReport:
    """Decodes a shard's report of a snapshot.

    Raises:
        InvalidArgument: a file name is not a plain name; it must never lead into another directory.
    """
    for file in (message.file, message.evicted.file, *(rows.file for rows in message.rows)):
        if file:  # empty if the shard could not write it
            check_file_name(file, f"the file that shard {message.shard} reports")
    return SnapshotReport(
        message.incarnation,
        message.generation,
        message.name,
        ShardFile(
            message.shard,
            message.version,
            message.file,
            message.nbytes,
            message.sha256,
            tuple(map(_from_rows, message.rows)),
            _from_rows(message.evicted) if message.HasField("evicted") else None,
        ),
        sanitize(message.error),
        from_totals(message.epochs),
    )


def _to_rows(file: RowsFileEntry) -> pb.RowsFile:
    return pb.RowsFile(file=file.name, nbytes=file.nbytes, sha256=file.sha256)


def _from_rows(message: pb.RowsFile) -> RowsFileEntry:
    return RowsFileEntry(message.file, message.nbytes, message.sha256)
