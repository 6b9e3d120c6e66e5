"""Between messages and the shard's own words; and the streams that carry tensors."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import TypeVar

import numpy as np
from google.protobuf.message import DecodeError, Message

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
from pserver.transport.buffers import AwaitedMessages, Progress
from pserver.wire.row_messages import pulled_parts
from psrpc.core.batch import BatchId
from psrpc.core.encoding import Encoding, Gradient
from psrpc.core.errors import InvalidArgument, InvalidJob
from psrpc.core.plan import Plan
from psrpc.core.policy import Policy
from psrpc.core.tables import FULL_EVERY
from psrpc.security.signatures import Keys, SignedDecision
from psrpc.v1 import coordinator_pb2 as coordinator
from psrpc.v1 import parameter_server_pb2 as pb
from psrpc.v1 import types_pb2 as types
from psrpc.wire.bounds import check_bounds
from psrpc.wire.codec import Piece, parse_message

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

_ENCODINGS: dict[Encoding, types.Encoding] = {
    "plain": types.ENCODING_PLAIN,
    "bfloat16": types.ENCODING_BFLOAT16,
    "float16": types.ENCODING_FLOAT16,
    "int8": types.ENCODING_INT8,
    "topk": types.ENCODING_TOPK,
}
_ENCODING_BY_NUMBER: dict[int, Encoding] = {number: e for e, number in _ENCODINGS.items()}

Header = TypeVar("Header", bound=Message)


def read_stream(
    messages: Iterator[bytes],
    header: type[Header],
    announced: Callable[[Header], int] | None = None,
    *,
    paced: bool = False,
) -> tuple[Header, Iterator[Piece]]:
    """The header of a tensor stream, and its chunks as they arrive.

    Args:
        announced: how many bytes follow a header, where another header may come after them;
            otherwise the stream ends with its last chunk.
        paced: chunks have to come as :class:`pserver.transport.buffers.Progress` demands, from
        when the
            first is asked for.

    Raises:
        InvalidArgument: no header where one must be, or bytes that are none; the iterator raises
            it as well.
    """
    first = next(messages, None)
    if first is None:
        raise InvalidArgument("the stream is empty; expected a header")
    message = parse_message(first)
    if message.header is None:
        raise InvalidArgument("the stream begins without a header")
    found = parse_header(message.header, header)
    nbytes = announced and announced(found)
    if nbytes == 0 and message.chunk is not None:
        raise InvalidArgument(
            f"a chunk of {len(message.chunk.data)} bytes comes with a header that announces none"
        )
    if not paced or nbytes == (0 if message.chunk is None else len(message.chunk.data)):
        return found, _pieces(message.chunk, partial(next, messages, None), nbytes)
    return found, _paced_pieces(message.chunk, messages, nbytes)


def parse_header(data: bytes, header: type[Header]) -> Header:
    """A message of class ``header``; raises InvalidArgument when the bytes are none, or it has a
    field that is longer than it may be (:mod:`psrpc.wire.bounds`)."""
    try:
        found = header.FromString(data)
    except DecodeError as error:
        raise InvalidArgument(f"a header cannot be read as {header.__name__}: {error}") from None
    check_bounds(found, len(data))
    return found


def _paced_pieces(
    first: Piece | None, messages: Iterator[bytes], nbytes: int | None
) -> Iterator[Piece]:
    awaited, progress = AwaitedMessages(messages), Progress(time.monotonic())
    try:
        for piece in _pieces(first, partial(awaited.next, progress), nbytes):
            progress.received(len(piece.data), time.monotonic())
            yield piece
    finally:
        awaited.close()


def _pieces(
    first: Piece | None, receive: Callable[[], bytes | None], nbytes: int | None
) -> Iterator[Piece]:
    received = 0
    if first is not None:
        received = len(first.data)
        yield first
    while nbytes is None or received < nbytes:
        data = receive()
        if data is None:
            return
        message = parse_message(data)
        if message.header is not None:
            raise InvalidArgument("the stream has a second header; expected chunks only")
        if message.chunk is not None:
            received += len(message.chunk.data)
            yield message.chunk


def announced_nbytes(extents: Iterable[types.Extent]) -> int:
    """How many bytes of chunks follow the header with ``extents``."""
    return sum(extent.nbytes for extent in extents)


def value_parts(plan: Plan, values: Values, rows: TableIds = ()) -> list[tuple[int, memoryview]]:
    """All arenas as the codec wants them, in plan order, and ``values.rows``, of ``rows``; empty
    ones make no chunk."""
    parts = [
        (index, values.arrays[arena.name].view(np.uint8).data)
        for index, arena in enumerate(plan.arenas if values.arrays else ())
        if values.arrays[arena.name].size
    ]
    if rows:
        parts.extend(pulled_parts(plan, rows, values.rows))
    return parts


def gradient_parts(plan: Plan, gradient: Gradient) -> list[tuple[int, memoryview]]:
    """The same of a gradient."""
    return [
        (index, part.view(np.uint8).data)
        for index, arena in enumerate(plan.arenas)
        for part in gradient[arena.name].parts
        if part.size
    ]


def gradient_extents(plan: Plan, gradient: Gradient) -> list[Extent]:
    """What a gradient announces, in plan order."""
    return [
        Extent(index, gradient[arena.name].nbytes, gradient[arena.name].encoding)
        for index, arena in enumerate(plan.arenas)
    ]


def to_encoding(encoding: Encoding) -> types.Encoding:
    """An encoding as a message has it."""
    return _ENCODINGS[encoding]


def from_encoding(number: int) -> Encoding:
    """The inverse; raises InvalidArgument for one that was not set or is unknown."""
    if number not in _ENCODING_BY_NUMBER:
        raise InvalidArgument(f"encoding {number} is unknown; expected 1 to {len(_ENCODINGS)}")
    return _ENCODING_BY_NUMBER[number]


def to_extents(extents: Iterable[Extent]) -> list[types.Extent]:
    """Extents as messages."""
    return [
        types.Extent(arena=arena, nbytes=nbytes, encoding=_ENCODINGS[encoding])
        for arena, nbytes, encoding in extents
    ]


def from_extents(extents: Iterable[types.Extent]) -> tuple[Extent, ...]:
    """Extents as tuples."""
    return tuple(Extent(e.arena, e.nbytes, from_encoding(e.encoding)) for e in extents)


def to_batch(batch: BatchId) -> types.BatchId:
    """A batch id as a message."""
    return types.BatchId(epoch=batch.epoch, first=batch.first, count=batch.count)


def _from_attempt(batch: types.BatchId, attempt: int) -> Attempt:
    if batch.count < 1:
        raise InvalidArgument(f"a batch id has count {batch.count}; expected at least 1")
    if batch.first + batch.count > _POSITIONS:
        # Its end would not fit the messages that tell what was applied.
        raise InvalidArgument(f"a batch id has first {batch.first}; expected less than 2^63")
    return Attempt(BatchId(batch.epoch, batch.first, batch.count), attempt)


def _from_fence(fence: types.Fence) -> Fence:
    return Fence(
        fence.generation, fence.policy, fence.plan_hash, fence.shard_incarnation, fence.session
    )


def from_initialize(header: pb.InitializeHeader) -> InitializeRequest:
    """The header of ``Initialize``."""
    extents = from_extents(header.extents)
    return InitializeRequest(_from_fence(header.fence), extents, header.grant)


def from_push(header: pb.PushHeader) -> PushRequest:
    """The header of a push; raises InvalidArgument for a batch of nothing."""
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
    """An order for a snapshot."""
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
    """A decided round."""
    return Decision(
        generation=decision.generation,
        round=decision.round,
        attempts=tuple(_from_attempt(a.batch, a.attempt) for a in decision.attempts),
        snapshots=tuple(map(from_order, decision.snapshots)),
    )


def from_begin(begin: coordinator.Begin) -> Begin:
    """Where to begin; raises InvalidArgument when it does not say with what, or has no keys."""
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
    """A worker to be refused."""
    return Revocation(
        revocation.number,
        revocation.worker,
        tuple(_from_attempt(a.batch, a.attempt) for a in revocation.attempts),
    )


def from_pull(request: pb.PullRequest) -> PullRequest:
    """A pull; raises InvalidArgument when it does not say of what."""
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
    """What became of a push, as a message."""
    return pb.PushResult(
        outcome=_OUTCOMES[result.outcome],
        version=result.version,
        staleness=result.staleness,
        apply_us=result.apply_us,
        receipt=result.receipt,
    )


def from_push_result(result: pb.PushResult) -> PushResult:
    """What became of a push; raises InvalidArgument for an outcome that was not set."""
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
    """What goes before pulled values."""
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
    """Staleness by worker, as messages."""
    return [types.WorkerStaleness(worker=w, counts=c) for w, c in counters.workers.items()]


def to_applied(epochs: Sequence[AppliedEpoch]) -> list[types.AppliedEpoch]:
    """An applied-set as messages."""
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
    """Totals of epochs as messages."""
    return [types.EpochTotals(epoch=e, records=n, totals=values) for e, n, values in epochs]
