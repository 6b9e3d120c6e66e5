"""Converts between protobuf messages and the values of :mod:`pserver.core`."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence

from pserver.core.applied import AppliedEpoch, EpochTotals
from pserver.core.assembly import Extent
from pserver.core.counters import Counters
from pserver.core.fence import Fence
from pserver.core.requests import (
    Begin,
    Decision,
    InitializeRequest,
    Outcome,
    PullRequest,
    PushRequest,
    PushResult,
    Revocation,
    SnapshotOrder,
    Values,
)
from pserver.core.staging import Attempt
from pserver.core.table_ids import TableIds, from_table_ids, row_extents
from pserver.wire.streams import from_encoding, from_extents, to_extents
from psrpc.core.batch import BatchId
from psrpc.core.errors import InvalidArgument, InvalidJob
from psrpc.core.plan import Plan
from psrpc.core.policy import Policy
from psrpc.core.tables import FULL_EVERY
from psrpc.security.signatures import Keys, SignedDecision
from psrpc.v1 import coordinator_pb2 as coordinator
from psrpc.v1 import parameter_server_pb2 as pb
from psrpc.v1 import types_pb2 as types

SERVICE = pb.DESCRIPTOR.services_by_name["ParameterServer"].full_name

_OUTCOMES: dict[Outcome, pb.PushOutcome] = {
    "applied": pb.PUSH_OUTCOME_APPLIED,
    "already_applied": pb.PUSH_OUTCOME_ALREADY_APPLIED,
    "staged": pb.PUSH_OUTCOME_STAGED,
    "skipped": pb.PUSH_OUTCOME_SKIPPED,
    "too_stale": pb.PUSH_OUTCOME_TOO_STALE,
}
_POSITIONS = 1 << 63

_BY_NUMBER: dict[int, Outcome] = {number: name for name, number in _OUTCOMES.items()}


def to_batch(batch: BatchId) -> types.BatchId:
    """Encodes a batch id."""
    return types.BatchId(epoch=batch.epoch, first=batch.first, count=batch.count)


def _from_attempt(batch: types.BatchId, attempt: int) -> Attempt:
    if batch.count < 1:
        raise InvalidArgument(f"a batch id has count {batch.count}; expected at least 1")
    if batch.first + batch.count > _POSITIONS:
        # Its end would not fit the messages that list applied intervals.
        raise InvalidArgument(f"a batch id has first {batch.first}; expected less than 2^63")
    return Attempt(BatchId(batch.epoch, batch.first, batch.count), attempt)


def _from_fence(fence: types.Fence) -> Fence:
    return Fence(
        fence.generation, fence.policy, fence.plan_hash, fence.shard_incarnation, fence.session
    )


def from_initialize(header: pb.InitializeHeader) -> InitializeRequest:
    """Decodes the header of ``Initialize``."""
    extents = from_extents(header.extents)
    return InitializeRequest(_from_fence(header.fence), extents, header.grant)


def from_push(header: pb.PushHeader) -> PushRequest:
    """Decodes the header of a push; raises InvalidArgument for an empty batch."""
    return PushRequest(
        fence=_from_fence(header.fence),
        worker="",
        attempt=_from_attempt(header.batch, header.attempt),
        base_version=header.base_version,
        examples=header.examples,
        skipped=header.skipped,
        extents=from_extents(header.extents),
        rows=from_table_ids(header.rows) if header.rows else (),
        totals=tuple(header.totals),
        grant=header.grant,
    )


def from_order(order: types.SnapshotOrder) -> SnapshotOrder:
    """Decodes an order for a snapshot."""
    return SnapshotOrder(
        order.name,
        order.write,
        order.keep,
        order.directory,
        order.global_step,
        order.base,
        order.parts or FULL_EVERY,
    )


def from_decision(decision: types.Decision) -> Decision:
    """Decodes a decided round."""
    return Decision(
        generation=decision.generation,
        round=decision.round,
        attempts=tuple(_from_attempt(a.batch, a.attempt) for a in decision.attempts),
        snapshots=tuple(map(from_order, decision.snapshots)),
    )


def from_begin(begin: coordinator.Begin) -> Begin:
    """Decodes ``Begin``; raises InvalidArgument if it names no source or has invalid settings."""
    source = begin.WhichOneof("source")
    if source is None:
        raise InvalidArgument("Begin names no source; expected keep, restore or fresh")
    return Begin(
        begin.generation,
        begin.policy,
        keep=source == "keep",
        restore=begin.restore,
        decision=from_decision(begin.decision) if begin.HasField("decision") else None,
        settings=_from_settings(begin.settings),
        version=begin.version if begin.HasField("version") else None,
        rate_scale=begin.rate_scale or 1.0,
        warmup_updates=begin.warmup_updates,
        keys=Keys(begin.verify_key, begin.grant_key),
    )


def _from_settings(document: bytes) -> Policy | None:
    if not document:
        return None
    try:
        return Policy.from_json(json.loads(document))
    except (ValueError, TypeError, InvalidJob) as error:
        raise InvalidArgument(f"Begin has settings {document[:200]!r}: {error}") from None


def from_revocation(revocation: coordinator.Revocation) -> Revocation:
    """Decodes the revocation of a worker."""
    return Revocation(
        revocation.number,
        revocation.worker,
        tuple(_from_attempt(a.batch, a.attempt) for a in revocation.attempts),
    )


def from_pull(request: pb.PullRequest) -> PullRequest:
    """Decodes a pull; raises InvalidArgument if it names no source."""
    source: int | str | None
    match request.WhichOneof("source"):
        case "newest":
            source = None
        case "round":
            source = request.round
        case "snapshot":
            source = request.snapshot
        case _:
            raise InvalidArgument("a pull names no source; expected newest, round or snapshot")
    signed = request.decision if request.HasField("decision") else None
    return PullRequest(
        _from_fence(request.fence),
        "",
        source,
        None,
        from_encoding(request.encoding),
        from_table_ids(request.rows) if request.rows else (),
        request.rows_only,
        SignedDecision(signed.decision, signed.signature) if signed is not None else None,
    )


def to_push_result(result: PushResult) -> pb.PushResult:
    """Encodes the outcome of a push."""
    return pb.PushResult(
        outcome=_OUTCOMES[result.outcome],
        version=result.version,
        staleness=result.staleness,
        apply_us=result.apply_us,
        receipt=result.receipt,
    )


def from_push_result(result: pb.PushResult) -> PushResult:
    """Decodes the outcome of a push; raises InvalidArgument for an unset or unknown outcome."""
    if result.outcome not in _BY_NUMBER:
        raise InvalidArgument(f"a push result has outcome {result.outcome}; expected 1 to 5")
    return PushResult(
        _BY_NUMBER[result.outcome],
        result.version,
        result.staleness,
        result.apply_us,
        receipt=result.receipt,
    )


def to_pull_header(plan: Plan, values: Values, rows: TableIds = ()) -> pb.PullHeader:
    """Makes the header that precedes pulled values."""
    header = pb.PullHeader(
        version=values.version,
        generation=values.generation,
        extents=to_extents(
            Extent(
                index,
                values.arrays[arena.name].nbytes,
                values.encoding if arena.encodable else "plain",
            )
            for index, arena in enumerate(plan.arenas if values.arrays else ())
        ),
    )
    if rows:
        header.extents.extend(to_extents(row_extents(plan, rows)))
    return header


def to_workers(counters: Counters) -> list[types.WorkerStaleness]:
    """Encodes the staleness by worker."""
    return [types.WorkerStaleness(worker=w, counts=c) for w, c in counters.workers.items()]


def to_applied(epochs: Sequence[AppliedEpoch]) -> list[types.AppliedEpoch]:
    """Encodes an applied-set."""
    return [
        types.AppliedEpoch(
            epoch=item["epoch"],
            applied=[types.Interval(start=a, stop=b) for a, b in item["applied"]],
            skipped=[types.Interval(start=a, stop=b) for a, b in item["skipped"]],
            totals=item.get("totals", ()),
        )
        for item in epochs
    ]


def to_totals(epochs: Iterable[EpochTotals]) -> list[types.EpochTotals]:
    """Encodes totals of epochs."""
    return [types.EpochTotals(epoch=e, records=n, totals=values) for e, n, values in epochs]
