"""Converts values of the job into messages of the coordinator."""

from __future__ import annotations

import math

from coordinator.core.figures import WorkerTimes
from coordinator.core.work import (
    EvaluationWork,
    InitializationWork,
    MergeWork,
    Round,
    Train,
    Wait,
    Work,
)
from coordinator.job.authority import Authority
from psrpc.core.commands import (
    Attempt,
    Ended,
)
from psrpc.v1 import coordinator_pb2 as pb
from psrpc.v1 import types_pb2 as types
from psrpc.wire.commands import decision_bytes, to_attempt, to_shutdown


def write_times(times: WorkerTimes) -> pb.WorkerTimes:
    """Converts a worker's times."""
    return pb.WorkerTimes(**times.by_cause())


def write_lease(
    work: Work, worker: str, generation: int, policy: int, authority: Authority
) -> pb.Lease:
    """Converts the next work of ``worker``, with the grants that shards require for it."""
    lease = pb.Lease(generation=generation, policy=policy)

    def leased(attempt: Attempt) -> types.Attempt:
        message = to_attempt(attempt)
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
            lease.round.pull_next = work.pull_next
            if work.decision is not None:
                decision = decision_bytes(work.decision)
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
            lease.finished.CopyFrom(to_shutdown(work))
    return lease


def seconds(value: float) -> float:
    return max(0.0, value) if math.isfinite(value) else 0.0
