"""Everything a person wants to know about a job, read off the engine's state."""

from __future__ import annotations

from coordinator.engine import Engine
from coordinator.membership import Shard, Worker
from coordinator.progress import WorkerProgress
from psrpc.v1 import coordinator_pb2 as pb


def write_status(engine: Engine) -> pb.GetJobStatusResponse:
    """The status page; changes nothing but the windows of the rates."""
    now = engine.now()
    run, training = engine.run, engine.training
    description, progress, span = run.description, training.progress, training.span
    return pb.GetJobStatusResponse(
        run_id=run.run_id,
        job=description.name,
        phase=engine.phase,
        mode=description.mode,
        replicas=description.replicas,
        global_step=span.step,
        total_steps=span.total_steps,
        epoch=span.epoch,
        epochs=description.epochs,
        examples=span.examples,
        batches=span.batches,
        steps_per_s=progress.steps.rate(now),
        examples_per_s=progress.records.rate(now),
        loss=training.loss,
        mean_staleness=progress.mean_staleness,
        shards=[_shard(engine, shard, now) for shard in engine.members.shards],
        workers=[
            _worker(worker, progress.workers.get(worker.name, WorkerProgress()), now)
            for worker in engine.members.workers.values()
        ],
        evaluations=[
            pb.EvaluationResult(evaluation=name, global_step=step, results=values)
            for name, step, values in training.results
        ],
        newest_checkpoint=engine.newest_checkpoint,
        refused=refused(engine),
        skipped=progress.skipped,
        failed=progress.failed,
        waiting_for=engine.held_up(),
        reason=engine.reason,
        warnings=training.warnings,
        generation=run.generation,
        policy=run.policy,
    )


def refused(engine: Engine) -> int:
    """Pushes that shards have refused."""
    return sum(shard.figures.refused for shard in engine.members.shards)


def _shard(engine: Engine, shard: Shard, now: float) -> pb.ShardStatus:
    return pb.ShardStatus(
        shard=shard.index,
        address=shard.address,
        state=shard.state,
        version=shard.figures.version,
        nbytes=engine.run.plan.shard_nbytes(shard.index),
        applied=shard.figures.applied,
        refused=shard.figures.refused,
        silent_s=now - shard.seen if shard.incarnation else 0.0,
        waiting_for=shard.figures.waiting_for,
    )


def _worker(worker: Worker, progress: WorkerProgress, now: float) -> pb.WorkerStatus:
    return pb.WorkerStatus(
        worker=worker.name,
        host=worker.host,
        pid=worker.pid,
        device=worker.device,
        state=worker.state,
        batches=progress.batches,
        steps_per_s=progress.steps.rate(now),
        silent_s=now - worker.seen,
        waiting_for=worker.waiting_for,
    )
