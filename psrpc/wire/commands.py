"""Converts commands to shards into messages, and back."""

from __future__ import annotations

import json

from google.protobuf.message import DecodeError

from psrpc.core.batch import BatchId
from psrpc.core.commands import (
    Attempt,
    AwaitedWorkers,
    Begin,
    Command,
    Decision,
    Ended,
    Keys,
    Release,
    Revocation,
    RoundsAhead,
    SnapshotOrder,
    WorkerClock,
)
from psrpc.core.errors import InvalidArgument, InvalidJob
from psrpc.core.policy import Policy
from psrpc.core.tables import FULL_EVERY
from psrpc.v1 import coordinator_pb2 as pb
from psrpc.v1 import parameter_server_pb2, types_pb2

_POSITIONS = 1 << 63


def to_command(command: Command) -> pb.WatchResponse:
    """Encodes a command."""
    match command:
        case Decision():
            return pb.WatchResponse(decision=to_decision(command))
        case RoundsAhead():
            rounds = pb.RoundsAhead(decisions=map(to_decision, command.decisions))
            return pb.WatchResponse(rounds_ahead=rounds)
        case AwaitedWorkers():
            awaited = pb.AwaitedWorkers(
                number=command.number, workers=map(to_clock, command.workers)
            )
            return pb.WatchResponse(awaited=awaited)
        case SnapshotOrder():
            return pb.WatchResponse(snapshot=to_order(command))
        case Release():
            return pb.WatchResponse(release_snapshot=command.name)
        case Begin():
            return pb.WatchResponse(begin=to_begin(command))
        case Revocation():
            return pb.WatchResponse(revocation=to_revocation(command))
        case Ended():
            return pb.WatchResponse(shutdown=to_shutdown(command))


def from_command(message: pb.WatchResponse) -> Command | None:
    """Decodes a command; None for one of an unknown kind. Raises InvalidArgument."""
    match message.WhichOneof("command"):
        case "decision":
            return from_decision(message.decision)
        case "rounds_ahead":
            return RoundsAhead(tuple(map(from_decision, message.rounds_ahead.decisions)))
        case "awaited":
            awaited = message.awaited
            return AwaitedWorkers(awaited.number, tuple(map(from_clock, awaited.workers)))
        case "snapshot":
            return from_order(message.snapshot)
        case "release_snapshot":
            return Release(message.release_snapshot)
        case "begin":
            return from_begin(message.begin)
        case "revocation":
            return from_revocation(message.revocation)
        case "shutdown":
            return from_shutdown(message.shutdown)
        case _:
            return None


def to_batch(batch: BatchId) -> types_pb2.BatchId:
    """Encodes a batch id."""
    return types_pb2.BatchId(epoch=batch.epoch, first=batch.first, count=batch.count)


def from_batch(message: types_pb2.BatchId) -> BatchId:
    """Decodes a batch id, unchecked."""
    return BatchId(message.epoch, message.first, message.count)


def to_attempt(attempt: Attempt) -> types_pb2.Attempt:
    """Encodes an attempt."""
    return types_pb2.Attempt(batch=to_batch(attempt.batch), attempt=attempt.number)


def from_attempt(
    message: types_pb2.Attempt
    | parameter_server_pb2.PushHeader
    | parameter_server_pb2.StagedEverywhere
    | parameter_server_pb2.SummedBatch,
) -> Attempt:
    """Decodes an attempt. Raises InvalidArgument for an empty batch or one beyond 2^63."""
    batch = message.batch
    if batch.count < 1:
        raise InvalidArgument(f"a batch id has count {batch.count}; expected at least 1")
    if batch.first + batch.count > _POSITIONS:
        # Its end would not fit the messages that list applied intervals.
        raise InvalidArgument(f"a batch id has first {batch.first}; expected less than 2^63")
    return Attempt(from_batch(batch), message.attempt)


def to_clock(clock: WorkerClock) -> types_pb2.WorkerClock:
    """Encodes the clock of a worker."""
    return types_pb2.WorkerClock(
        worker=clock.worker, entry=clock.entry, steps=clock.steps, proof=clock.proof
    )


def from_clock(message: types_pb2.WorkerClock) -> WorkerClock:
    """Decodes the clock of a worker."""
    return WorkerClock(message.worker, message.entry, message.steps, message.proof)


def to_order(order: SnapshotOrder) -> types_pb2.SnapshotOrder:
    """Encodes an order for a snapshot."""
    return types_pb2.SnapshotOrder(
        name=order.name,
        write=order.write,
        keep=order.keep,
        directory=order.directory,
        global_step=order.global_step,
        base=order.base,
        parts=order.parts,
    )


def from_order(message: types_pb2.SnapshotOrder) -> SnapshotOrder:
    """Decodes an order for a snapshot."""
    return SnapshotOrder(
        name=message.name,
        write=message.write,
        keep=message.keep,
        directory=message.directory,
        global_step=message.global_step,
        base=message.base,
        parts=message.parts or FULL_EVERY,
    )


def to_decision(decision: Decision) -> types_pb2.Decision:
    """Encodes a decided round."""
    return types_pb2.Decision(
        generation=decision.generation,
        round=decision.round,
        attempts=map(to_attempt, decision.attempts),
        snapshots=map(to_order, decision.snapshots),
    )


def from_decision(message: types_pb2.Decision) -> Decision:
    """Decodes a decided round. Raises InvalidArgument as :func:`from_attempt`."""
    return Decision(
        generation=message.generation,
        round=message.round,
        attempts=tuple(map(from_attempt, message.attempts)),
        snapshots=tuple(map(from_order, message.snapshots)),
    )


def decision_bytes(decision: Decision) -> bytes:
    """Serializes a decided round for the coordinator to sign."""
    return to_decision(decision).SerializeToString(deterministic=True)


def parse_decision(signed: bytes) -> Decision:
    """The inverse of :func:`decision_bytes`, for bytes whose signature was checked."""
    try:
        return from_decision(types_pb2.Decision.FromString(signed))
    except DecodeError:
        raise AssertionError("the coordinator signs only decisions") from None


def to_begin(begin: Begin) -> pb.Begin:
    """Encodes the order to begin a generation."""
    message = pb.Begin(
        generation=begin.generation,
        policy=begin.policy,
        version=begin.version,
        rate_scale=begin.rate_scale,
        warmup_updates=begin.warmup_updates,
    )
    if begin.settings is not None:
        message.settings = json.dumps(begin.settings.to_json()).encode()
    if begin.keys is not None:
        message.verify_key, message.grant_key = begin.keys.verify, begin.keys.grant
    if begin.restore:
        message.restore = begin.restore
    elif begin.keep:
        message.keep = True
    else:
        message.fresh = True
    if begin.decision is not None:
        message.decision.CopyFrom(to_decision(begin.decision))
    return message


def from_begin(message: pb.Begin) -> Begin:
    """Decodes the order to begin a generation. Raises InvalidArgument if it names no source, or has
    invalid settings or keys."""
    source = message.WhichOneof("source")
    if source is None:
        raise InvalidArgument("Begin names no source; expected keep, restore or fresh")
    return Begin(
        generation=message.generation,
        policy=message.policy,
        keep=source == "keep",
        restore=message.restore,
        decision=from_decision(message.decision) if message.HasField("decision") else None,
        settings=_from_settings(message.settings),
        version=message.version if message.HasField("version") else None,
        rate_scale=message.rate_scale if message.HasField("rate_scale") else 1.0,
        warmup_updates=message.warmup_updates,
        keys=Keys(message.verify_key, message.grant_key),
    )


def _from_settings(document: bytes) -> Policy | None:
    if not document:
        return None
    try:
        return Policy.from_json(json.loads(document))
    except (ValueError, TypeError, InvalidJob) as error:
        raise InvalidArgument(f"Begin has settings {document[:200]!r}: {error}") from None


def to_revocation(revocation: Revocation) -> pb.Revocation:
    """Encodes the revocation of a worker."""
    return pb.Revocation(
        number=revocation.number,
        worker=revocation.worker,
        attempts=map(to_attempt, revocation.attempts),
        ends_ahead=revocation.ends_ahead,
    )


def from_revocation(message: pb.Revocation) -> Revocation:
    """Decodes the revocation of a worker. Raises InvalidArgument as :func:`from_attempt`."""
    attempts = tuple(map(from_attempt, message.attempts))
    return Revocation(message.number, message.worker, attempts, message.ends_ahead)


def to_shutdown(ended: Ended) -> pb.Shutdown:
    """Encodes the end of the job."""
    return pb.Shutdown(failed=ended.failed, reason=ended.reason)


def from_shutdown(message: pb.Shutdown) -> Ended:
    """Decodes the end of the job."""
    return Ended(message.failed, message.reason)
