"""Converts between protobuf messages and the values of :mod:`pserver.core`."""

from __future__ import annotations

from collections.abc import Callable

from pserver.core.assembly import Extent
from pserver.core.fence import Fence
from pserver.core.requests import (
    InitializeRequest,
    Outcome,
    PullRequest,
    PushRequest,
    PushResult,
    StagedEverywhere,
    SummedBatch,
    Values,
)
from pserver.core.table_ids import TableIds, from_table_ids, row_extents
from pserver.wire.streams import from_encoding, from_extents, to_extents
from psrpc.core.commands import WorkerClock
from psrpc.core.errors import InvalidArgument
from psrpc.core.plan import Plan
from psrpc.security.signatures import SignedDecision
from psrpc.v1 import parameter_server_pb2 as pb
from psrpc.v1 import types_pb2 as types
from psrpc.wire.commands import from_attempt, from_clock

SERVICE = pb.DESCRIPTOR.services_by_name["ParameterServer"].full_name

_OUTCOMES: dict[Outcome, pb.PushOutcome] = {
    "applied": pb.PUSH_OUTCOME_APPLIED,
    "already_applied": pb.PUSH_OUTCOME_ALREADY_APPLIED,
    "staged": pb.PUSH_OUTCOME_STAGED,
    "skipped": pb.PUSH_OUTCOME_SKIPPED,
    "too_stale": pb.PUSH_OUTCOME_TOO_STALE,
    "one_by_one": pb.PUSH_OUTCOME_ONE_BY_ONE,
}
_BY_NUMBER: dict[int, Outcome] = {number: name for name, number in _OUTCOMES.items()}


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
        attempt=from_attempt(header),
        base_version=header.base_version,
        examples=header.examples,
        skipped=header.skipped,
        extents=from_extents(header.extents),
        rows=from_table_ids(header.rows) if header.rows else (),
        totals=tuple(header.totals),
        grant=header.grant,
        summed=tuple(
            [SummedBatch(from_attempt(s), tuple(s.totals), s.grant) for s in header.summed]
        ),
    )


def from_pull(request: pb.PullRequest, gone: Callable[[], bool] = lambda: False) -> PullRequest:
    """Decodes a pull; raises InvalidArgument if it names no source. ``gone`` says whether its
    caller has gone."""
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
        tuple([StagedEverywhere(from_attempt(s), tuple(s.receipts)) for s in request.staged]),
        clock_of(request),
        gone,
    )


def clock_of(request: pb.PullRequest) -> WorkerClock | None:
    """Decodes the worker's clock in a pull; None if the pull has none (only ssp has clocks)."""
    return from_clock(request.clock) if request.HasField("clock") else None


def to_push_result(result: PushResult) -> pb.PushResult:
    """Encodes the outcome of a push."""
    return pb.PushResult(
        outcome=_OUTCOMES[result.outcome],
        version=result.version,
        staleness=result.staleness,
        apply_us=result.apply_us,
        receipt=result.receipt,
        behind=result.behind,
        waited_us=result.waited_us,
        summed_receipts=result.summed_receipts,
    )


def from_push_result(result: pb.PushResult) -> PushResult:
    """Decodes the outcome of a push; raises InvalidArgument for an unset or unknown outcome."""
    if result.outcome not in _BY_NUMBER:
        raise InvalidArgument(
            f"a push result has outcome {result.outcome}; expected 1 to {len(_OUTCOMES)}"
        )
    return PushResult(
        _BY_NUMBER[result.outcome],
        result.version,
        result.staleness,
        result.apply_us,
        receipt=result.receipt,
        behind=result.behind,
        waited_us=result.waited_us,
        summed_receipts=tuple(result.summed_receipts),
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
