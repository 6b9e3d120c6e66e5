"""Converts messages on the wire into plain values."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from coordinator.checkpoints.snapshots import ShardFile
from coordinator.core.figures import (
    CAUSES,
    MAX_COUNTS,
    MAX_WORKERS,
    ReportedTotals,
    ReportedTransport,
    ShardFigures,
    WorkerTimes,
)
from coordinator.core.standstill import Phase, Position
from coordinator.core.work import MetricVariable, Report
from coordinator.membership.recovery import HeldState
from coordinator.rpc.answers import seconds
from coordinator.training.generations import HeldReport
from psrpc.checkpoint.manifest import RowsFileEntry
from psrpc.core.batch import LOSS, MAX_VALUES, BatchId
from psrpc.core.errors import InvalidArgument
from psrpc.core.intervals import IntervalSet
from psrpc.core.names import check_file_name
from psrpc.core.text import sanitize
from psrpc.v1 import coordinator_pb2 as pb
from psrpc.v1 import types_pb2 as types

PHASES: Mapping[int, Phase] = {
    pb.WorkerPosition.PHASE_WAITING: "waiting",
    pb.WorkerPosition.PHASE_DATA: "data",
    pb.WorkerPosition.PHASE_COMPILING: "compiling",
    pb.WorkerPosition.PHASE_COMPUTING: "computing",
    pb.WorkerPosition.PHASE_EXCHANGING: "exchanging",
}


def read_batch(message: types.BatchId) -> BatchId:
    """Converts a batch id."""
    return BatchId(message.epoch, message.first, message.count)


def read_report(message: pb.BatchReport) -> Report:
    """Converts the outcome of one batch."""
    return Report(
        read_batch(message.batch),
        message.attempt,
        message.loss,
        message.staleness,
        message.skipped,
        message.too_stale,
        tuple(message.receipts),
        sanitize(message.not_finite),
    )


def read_reports(messages: Iterable[pb.BatchReport]) -> list[Report]:
    """Converts the outcomes of several batches."""
    return [read_report(message) for message in messages]


def read_figures(message: pb.HeartbeatShardRequest) -> ShardFigures:
    """Converts the figures that a shard reports about itself."""
    return ShardFigures(
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
        epochs=read_totals(message.epochs),
    )


def read_totals(messages: Iterable[types.EpochTotals]) -> tuple[ReportedTotals, ...]:
    """Converts totals of epochs; drops those of a wrong length or with values that are not
    finite."""
    return tuple(
        ReportedTotals(message.epoch, message.records, tuple(message.totals))
        for message in messages
        if LOSS <= len(message.totals) <= MAX_VALUES and all(map(math.isfinite, message.totals))
    )


def read_times(message: pb.WorkerTimes) -> WorkerTimes:
    """Converts a worker's times. Clock differences may be anything: negative or non-finite values
    count as 0 s."""
    return WorkerTimes(**{cause: seconds(getattr(message, cause)) for cause in CAUSES})


def read_unreachable(message: pb.HeartbeatWorkerRequest, shards: int) -> dict[int, float]:
    """Returns the shards (below ``shards``) that a worker cannot reach, each with its duration in
    seconds."""
    return {
        one.shard: seconds(one.for_s) for one in message.unreachable[:shards] if one.shard < shards
    }


def read_position(message: pb.WorkerPosition) -> Position:
    """Converts a worker's position; an unknown phase becomes the empty one."""
    phase = PHASES.get(message.phase, "")
    return Position(phase, message.position, seconds(message.median_step_s))


def read_transports(
    message: pb.HeartbeatWorkerRequest, shards: int
) -> tuple[ReportedTransport, ...]:
    """Converts the transports that carry a worker's tensors to shards below ``shards``."""
    return tuple(
        ReportedTransport(one.shard, one.kind, sanitize(one.why))
        for one in message.transports[:shards]
        if one.shard < shards
    )


def read_manifest_file(message: pb.ReportSnapshotRequest) -> ShardFile:
    """Converts a shard's part of a snapshot.

    Raises:
        InvalidArgument: a file name is a path; names never become paths.
    """
    for file in (message.file, message.evicted.file, *(rows.file for rows in message.rows)):
        if file:  # empty if the shard could not write it
            check_file_name(file, f"the file that shard {message.shard} reports")
    return ShardFile(
        message.shard,
        message.version,
        message.file,
        message.nbytes,
        message.sha256,
        tuple(map(_read_rows, message.rows)),
        _read_rows(message.evicted) if message.HasField("evicted") else None,
    )


def _read_rows(message: pb.RowsFile) -> RowsFileEntry:
    return RowsFileEntry(message.file, message.nbytes, message.sha256)


def read_applied(
    messages: Iterable[types.AppliedEpoch],
) -> tuple[dict[int, IntervalSet], dict[int, IntervalSet]]:
    """Converts a shard's applied-set per epoch, and the skipped part of it.

    Raises:
        InvalidArgument: an interval that is empty or reversed.
    """
    applied: dict[int, IntervalSet] = {}
    skipped: dict[int, IntervalSet] = {}
    try:
        for message in messages:
            applied[message.epoch] = IntervalSet((i.start, i.stop) for i in message.applied)
            skipped[message.epoch] = IntervalSet((i.start, i.stop) for i in message.skipped)
    except ValueError as error:
        raise InvalidArgument(f"applied-set: {error}") from None
    return applied, skipped


def read_holding(message: pb.WatchRequest) -> HeldState:
    """Converts the holding of a shard that opens its command stream."""
    return HeldState(message.incarnation, message.generation, message.initialized, message.version)


def read_standing(message: pb.ReportShardReadyRequest) -> HeldReport:
    """Converts the standing of a shard that has begun a generation.

    Raises:
        InvalidArgument: as :func:`read_applied`.
    """
    holding = HeldState(
        message.incarnation, message.generation, message.initialized, message.version
    )
    applied, skipped = read_applied(message.applied)
    totals = [
        types.EpochTotals(epoch=one.epoch, records=len(applied[one.epoch]), totals=one.totals)
        for one in message.applied
    ]
    return HeldReport(holding, applied, skipped, read_totals(totals))


def read_states(message: pb.MetricStates) -> tuple[MetricVariable, ...]:
    """Converts the metric states of one evaluation task.

    Raises:
        InvalidArgument: a variable whose values do not fill its shape.
    """
    variables = []
    for index, variable in enumerate(message.variables):
        size = 1
        for extent in variable.shape:
            size *= extent
        if size != len(variable.values):
            raise InvalidArgument(
                f"metric variable {index} of shape {list(variable.shape)} has "
                f"{len(variable.values)} values; expected {size}"
            )
        variables.append(MetricVariable(tuple(variable.shape), tuple(variable.values)))
    return tuple(variables)
