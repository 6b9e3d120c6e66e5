"""Converts values of the job into messages of the coordinator."""

from __future__ import annotations

import json
import math

from coordinator.core.figures import WorkerTimes
from coordinator.core.work import (
    Begin,
    Command,
    Decision,
    Ended,
    EvaluationWork,
    InitializationWork,
    LeasedAttempt,
    MergeWork,
    Release,
    Revocation,
    Round,
    SnapshotOrder,
    Train,
    Wait,
    Work,
)
from coordinator.job.authority import Authority
from psrpc.security.signatures import Keys
from psrpc.v1 import coordinator_pb2 as pb
from psrpc.v1 import types_pb2 as types


def write_times(times: WorkerTimes) -> pb.WorkerTimes:
    """Converts a worker's times."""
    return pb.WorkerTimes(**times.by_cause())


def write_attempt(attempt: LeasedAttempt) -> types.Attempt:
    """Converts one attempt at a batch."""
    batch = types.BatchId(
        epoch=attempt.batch.epoch, first=attempt.batch.first, count=attempt.batch.count
    )
    return types.Attempt(batch=batch, attempt=attempt.number)


def write_order(order: SnapshotOrder) -> types.SnapshotOrder:
    """Converts an order to take a snapshot."""
    return types.SnapshotOrder(
        name=order.name,
        write=order.write,
        keep=order.keep,
        directory=order.directory,
        global_step=order.global_step,
        base=order.base,
        parts=order.parts,
    )


def write_decision(decision: Decision) -> types.Decision:
    """Converts the decision of a round."""
    return types.Decision(
        generation=decision.generation,
        round=decision.round,
        attempts=[write_attempt(a) for a in decision.attempts],
        snapshots=[write_order(s) for s in decision.snapshots],
    )


def write_begin(begin: Begin, keys: Keys) -> pb.Begin:
    """Converts the state that a shard begins a generation with; ``keys`` let it check workers."""
    message = pb.Begin(
        generation=begin.generation,
        policy=begin.policy,
        settings=json.dumps(begin.settings.to_json()).encode(),
        version=begin.version,
        rate_scale=begin.rate_scale,
        warmup_updates=begin.warmup_updates,
        verify_key=keys.verify,
        grant_key=keys.grant,
    )
    if begin.restore:
        message.restore = begin.restore
    elif begin.keep:
        message.keep = True
    else:
        message.fresh = True
    if begin.decision is not None:
        message.decision.CopyFrom(write_decision(begin.decision))
    return message


def write_revocation(revocation: Revocation) -> pb.Revocation:
    """Converts the revocation of a worker."""
    return pb.Revocation(
        number=revocation.number,
        worker=revocation.worker,
        attempts=[write_attempt(a) for a in revocation.attempts],
    )


def write_shutdown(ended: Ended) -> pb.Shutdown:
    """Converts the end of the job."""
    return pb.Shutdown(failed=ended.failed, reason=ended.reason)


def write_command(command: Command, keys: Keys) -> pb.WatchResponse:
    """Converts a command to a shard, which checks workers by ``keys``."""
    match command:
        case Decision():
            return pb.WatchResponse(decision=write_decision(command))
        case SnapshotOrder():
            return pb.WatchResponse(snapshot=write_order(command))
        case Release():
            return pb.WatchResponse(release_snapshot=command.name)
        case Begin():
            return pb.WatchResponse(begin=write_begin(command, keys))
        case Revocation():
            return pb.WatchResponse(revocation=write_revocation(command))
        case Ended():
            return pb.WatchResponse(shutdown=write_shutdown(command))


def write_lease(
    work: Work, worker: str, generation: int, policy: int, authority: Authority
) -> pb.Lease:
    """Converts the next work of ``worker``, with the grants that shards require for it."""
    lease = pb.Lease(generation=generation, policy=policy)

    def leased(attempt: LeasedAttempt) -> types.Attempt:
        message = write_attempt(attempt)
        message.grant = authority.grant(worker, generation, attempt)
        return message

    match work:
        case InitializationWork():
            lease.initialize.grant = authority.grant_initialize(worker, generation)
        case Train():
            lease.train.batches.extend(map(leased, work.batches))
            lease.train.fresh = work.fresh
        case Round():
            lease.round.round = work.round
            lease.round.attempt.CopyFrom(leased(work.attempt))
            lease.round.newest = work.newest
            if work.decision is not None:
                decision = write_decision(work.decision).SerializeToString(deterministic=True)
                signed = authority.sign(decision)
                lease.round.decision.decision = signed.decision
                lease.round.decision.signature = signed.signature
        case EvaluationWork():
            lease.evaluate.CopyFrom(
                pb.EvaluateTask(
                    evaluation=work.evaluation,
                    task=work.task,
                    snapshot=work.snapshot,
                    start=work.start,
                    stop=work.stop,
                )
            )
        case MergeWork():
            lease.merge.evaluation = work.evaluation
            lease.merge.training = work.training
            lease.merge.states.variables.extend(
                pb.MetricVariable(shape=v.shape, values=v.values) for v in work.states
            )
        case Wait():
            lease.wait.reason = work.reason
        case Ended():
            lease.finished.CopyFrom(write_shutdown(work))
    return lease


def seconds(value: float) -> float:
    return max(0.0, value) if math.isfinite(value) else 0.0
