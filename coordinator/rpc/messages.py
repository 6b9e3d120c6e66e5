"""Converts messages of the coordinator's service into plain values, and values of the job into
messages."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping

from coordinator.core.figures import (
    CAUSES,
    Phase,
    Position,
    ReportedTransport,
    WorkerHeartbeat,
    WorkerRegistration,
    WorkerTimes,
)
from coordinator.core.run import Run
from coordinator.core.work import (
    EvaluationWork,
    InitializationWork,
    MergeWork,
    MetricVariable,
    Report,
    Round,
    RoundsLease,
    Train,
    Wait,
    Work,
)
from coordinator.job.authority import Authority
from coordinator.job.job_run import JobRun
from coordinator.membership.members import Shard, Worker
from coordinator.transitions.holding import HoldEnd, JobHold
from psrpc import SOFTWARE
from psrpc.core.commands import Attempt, Ended
from psrpc.core.errors import InvalidArgument
from psrpc.core.names import check_file_name
from psrpc.core.text import NAME_CHARS, sanitize
from psrpc.security.signatures import SECRET_BYTES
from psrpc.v1 import coordinator_pb2 as pb
from psrpc.v1 import types_pb2 as types
from psrpc.wire.commands import decision_bytes, from_batch, to_attempt, to_clock, to_shutdown
from psrpc.wire.shard_reports import seconds

HEARTBEAT_S = 1.0
"""Interval between the heartbeats of a shard or worker."""

PHASES: Mapping[int, Phase] = {
    pb.WorkerPosition.PHASE_WAITING: "waiting",
    pb.WorkerPosition.PHASE_DATA: "data",
    pb.WorkerPosition.PHASE_COMPILING: "compiling",
    pb.WorkerPosition.PHASE_COMPUTING: "computing",
    pb.WorkerPosition.PHASE_EXCHANGING: "exchanging",
}


def written_settings(settings: Mapping[str, str]) -> list[str]:
    """Returns settings as ``key=value``."""
    return [f"{key}={value}" for key, value in settings.items()]


def read_report(message: pb.BatchReport) -> Report:
    """Converts the outcome of one batch."""
    return Report(
        from_batch(message.batch),
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


def read_heartbeat(message: pb.HeartbeatWorkerRequest, shards: int) -> WorkerHeartbeat:
    """Converts a worker's heartbeat, without entries for shards that a job of ``shards`` shards
    does not have. Clock differences may be anything: negative or non-finite times count as 0."""
    times, unreachable = message.times, message.unreachable[:shards]
    return WorkerHeartbeat(
        message.generation,
        read_reports(message.done),
        sanitize(message.waiting_for),
        WorkerTimes(**{cause: seconds(getattr(times, cause)) for cause in CAUSES}),
        {one.shard: seconds(one.for_s) for one in unreachable if one.shard < shards},
        read_position(message.position),
        tuple(
            ReportedTransport(one.shard, one.kind, sanitize(one.why))
            for one in message.transports[:shards]
            if one.shard < shards
        ),
    )


def read_position(message: pb.WorkerPosition) -> Position:
    """Converts a worker's position; an unknown phase becomes the empty one."""
    phase = PHASES.get(message.phase, "")
    return Position(phase, message.position, seconds(message.median_step_s))


def read_registration(
    message: pb.RegisterWorkerRequest, certificate: str, address: str
) -> WorkerRegistration:
    """Converts a worker's request to register. Raises InvalidArgument for a secret of the wrong
    length."""
    if len(message.secret) != SECRET_BYTES:
        raise InvalidArgument(
            f"a worker registers with a secret of {len(message.secret)} bytes; expected "
            f"{SECRET_BYTES}"
        )
    return WorkerRegistration(
        message.incarnation,
        sanitize(message.host, NAME_CHARS),
        message.pid,
        sanitize(message.device, NAME_CHARS),
        message.job_sha256,
        message.software,
        message.settings_sha256,
        message.secret,
        certificate,
        address,
        message.hosts,
    )


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


def write_job(run: Run) -> pb.GetJobResponse:
    """Converts the facts about the job that a worker needs before it registers."""
    job = run.description
    return pb.GetJobResponse(
        run_id=run.run_id,
        job_path=run.job_path,
        job_sha256=job.job_sha256,
        overrides=run.overrides,
        mode=job.mode,
        replicas=job.replicas,
        software=SOFTWARE,
        intra_op_threads=job.intra_op_threads,
        data_fingerprint=job.data_fingerprint,
        settings_sha256=run.settings_sha256,
    )


def write_shard_job(run: Run) -> pb.RegisterShardResponse:
    """Converts the facts about the job that a shard needs."""
    job = run.description
    return pb.RegisterShardResponse(
        run_id=run.run_id,
        plan=run.plan.to_json(),
        optimizer=json.dumps(job.optimizer).encode(),
        engine=job.engine,
        run_dir=str(run.run_dir),
        token=run.token,
        heartbeat_s=HEARTBEAT_S,
        wire_dtype=job.wire_dtype,
        first_rows=job.first_rows,
    )


def write_session(worker: Worker) -> pb.RegisterWorkerResponse:
    """Converts a registered worker into the answer to its registration."""
    return pb.RegisterWorkerResponse(
        worker=worker.name, heartbeat_s=HEARTBEAT_S * worker.calm, session=worker.session
    )


def write_cluster(run: Run, shards: Iterable[Shard]) -> pb.GetClusterResponse:
    """Converts the addresses of the shards and the plan that distributes the parameters."""
    return pb.GetClusterResponse(
        generation=run.generation,
        policy=run.policy,
        plan=run.plan.to_json(),
        shards=[pb.ShardAddress(address=s.address, incarnation=s.incarnation) for s in shards],
    )


def write_times(times: WorkerTimes) -> pb.WorkerTimes:
    """Converts a worker's times."""
    return pb.WorkerTimes(**times.by_cause())


def write_lease(work: Work, worker: str, run: Run, authority: Authority) -> pb.Lease:
    """Converts the next work of ``worker``, with the grants that shards require for it."""
    generation = run.generation
    lease = pb.Lease(generation=generation, policy=run.policy)

    def leased(attempt: Attempt) -> types.Attempt:
        message = to_attempt(attempt)
        message.grant = authority.grant(worker, generation, attempt)
        return message

    match work:
        case InitializationWork():
            lease.initialize.grant = authority.grant_initialize(worker, generation)
            lease.initialize.first_rows = run.description.first_rows
        case Train():
            lease.train.batches.extend(map(leased, work.batches))
            lease.train.fresh = work.fresh
            if work.clock is not None:
                clock = authority.proven(generation, work.clock)
                lease.train.clock.CopyFrom(to_clock(clock))
        case Round():
            lease.round.round = work.round
            lease.round.attempt.CopyFrom(leased(work.attempt))
            lease.round.newest = work.newest
            lease.round.pull_next = work.pull_next
            if work.ahead is not None:
                lease.round.ahead.CopyFrom(leased(work.ahead))
            lease.round.beside.extend(map(leased, work.beside))
            if work.decision is not None:
                decision = decision_bytes(work.decision)
                signed = authority.sign(decision)
                lease.round.decision.decision = signed.decision
                lease.round.decision.signature = signed.signature
        case RoundsLease():
            for number, attempt in work.attempts:
                lease.rounds.attempts.add(round=number, attempt=leased(attempt))
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


def write_hold(hold: JobHold | None, job_run: JobRun) -> pb.AwaitHoldResponse:
    """Returns the response with ``hold``, or, if that is None, with the progress of the job."""
    stands = hold or job_run.holding.present
    response = pb.AwaitHoldResponse(
        held=hold is not None,
        at=stands.at,
        global_step=stands.global_step,
        epoch=stands.epoch,
        phase=job_run.phase,
        reason=job_run.reason,
        warnings=job_run.warnings.kept,
    )
    if hold is not None or job_run.phase == "done":
        response.checkpoint = stands.checkpoint
        response.evaluation.update(stands.evaluation)
    return response


def read_hold_end(request: pb.EndHoldRequest) -> HoldEnd:
    """Returns the end of a hold. Raises InvalidArgument if ``restore`` is not a file name."""
    if request.restore:
        check_file_name(request.restore, "restore")
    rate = request.rate if request.HasField("rate") else None
    return HoldEnd(request.at, request.until, rate, request.restore)
