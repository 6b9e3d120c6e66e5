"""Builds the status of a job from its state and the coordinator's environment."""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Mapping
from pathlib import Path

from coordinator.job.job_run import JobRun
from coordinator.membership.members import Shard, Worker
from coordinator.membership.membership import LEASE_S
from coordinator.membership.progress import WorkerProgress
from coordinator.membership.stragglers import name_stragglers
from coordinator.records.epochs import reduced_rate
from coordinator.rpc.messages import write_times, written_settings
from coordinator.training.gauges import (
    counts,
    counts_by_worker,
    late,
    ratios,
    refused,
    shard_rates,
    staleness_counts,
    version_skew,
)
from psrpc import SOFTWARE
from psrpc.checkpoint.manifest import MANIFEST
from psrpc.v1 import coordinator_pb2 as pb

UNKNOWN = -1
"""An age or a size that could not be determined."""

FREE_FOR_S = 5.0
"""How long a reading of the free disk space is reused."""


class Surroundings:
    """The coordinator's clock, version, disk and insecure flag. Not thread-safe."""

    def __init__(self, run_dir: Path, insecure: bool) -> None:
        """``insecure`` says whether plaintext may leave this machine."""
        self._run_dir = run_dir
        self._insecure = insecure
        self._checkpoint = ("", 0.0)
        self._free = (-math.inf, UNKNOWN)

    def describe(self, status: pb.GetJobStatusResponse) -> pb.GetJobStatusResponse:
        """Fills in the environment's fields; returns ``status``."""
        status.insecure = self._insecure
        status.software = SOFTWARE
        status.clock_s = time.time()
        status.run_dir = str(self._run_dir)
        status.free_nbytes = self._free_nbytes()
        written = self._written_s(status.newest_checkpoint)
        status.checkpoint_age_s = max(0.0, status.clock_s - written) if written else UNKNOWN
        return status

    def _written_s(self, checkpoint: str) -> float:
        """Returns the time of a checkpoint in seconds since 1970, 0 if unknown. Reads the disk once
        per checkpoint."""
        if checkpoint != self._checkpoint[0]:
            written = 0.0
            if checkpoint:
                with contextlib.suppress(OSError):
                    written = (self._run_dir / checkpoint / MANIFEST).stat().st_mtime
            self._checkpoint = (checkpoint, written)
        return self._checkpoint[1]

    def _free_nbytes(self) -> int:
        now = time.monotonic()
        if now - self._free[0] >= FREE_FOR_S:
            try:
                stat = os.statvfs(self._run_dir)
            except OSError:
                self._free = (now, UNKNOWN)
            else:
                self._free = (now, stat.f_bavail * stat.f_frsize)
        return self._free[1]


EVALUATIONS = 1000
"""Newest evaluations in a status; ``summary.json`` has all. Messages are bounded in size, and many
readers ask every second."""


def write_status(job_run: JobRun) -> pb.GetJobStatusResponse:
    """Returns the status; changes nothing but the windows of the rates."""
    now = job_run.now()
    run, training = job_run.run, job_run.training
    description, progress, span = run.description, training.progress, training.span
    generation, step = job_run.standing
    members, steps_per_s = job_run.members, progress.steps.rate(now)
    names = {worker.incarnation: worker.name for worker in members.workers.values()}
    interval_s = training.cadence.interval_s(steps_per_s)
    slow, counted, pushed = ratios(job_run), counts(job_run), counts_by_worker(job_run)
    return pb.GetJobStatusResponse(
        run_id=run.run_id,
        job=description.name,
        phase=job_run.phase,
        mode=run.settings.mode,
        replicas=run.settings.open,
        global_step=step,
        total_steps=span.total_steps,
        epoch=job_run.epoch,
        epochs=description.epochs,
        examples=span.examples,
        batches=span.batches,
        steps_per_s=steps_per_s,
        batches_per_s=progress.batch_rate.rate(now),
        examples_per_s=progress.records.rate(now),
        loss=training.watch.loss,
        mean_staleness=progress.mean_staleness,
        shards=[_shard(job_run, shard, names, now) for shard in members.places.shards],
        workers=[
            _worker(job_run, worker, slow.get(worker.name, 0.0), pushed.get(worker.name, ()), now)
            for worker in job_run.members.workers.values()
        ],
        evaluations=[
            pb.EvaluationResult(evaluation=name, global_step=step, results=values)
            for name, step, values in training.notes.results[-EVALUATIONS:]
        ],
        newest_checkpoint=job_run.checkpoints.newest,
        restored=job_run.restored,
        refused=refused(job_run),
        skipped=progress.skipped,
        failed=progress.failed,
        waiting_for=job_run.held_up(),
        waited_s=job_run.waited_s,
        reason=job_run.reason,
        warnings=job_run.warnings.kept,
        generation=generation,
        policy=run.policy,
        settings=str(run.settings),
        switching=str(job_run.changes),
        changed=written_settings(job_run.changes.changed),
        policies=[
            pb.PolicyChange(
                policy=followed.number,
                settings=str(followed.settings),
                global_step=followed.step,
                learning_rate=reduced_rate(run, index),
            )
            for index, followed in enumerate(run.followed)
        ],
        version_skew=version_skew(job_run),
        staleness_counts=staleness_counts(job_run),
        too_stale=counted["too_stale"],
        speculative=counted["speculative"],
        superseded=counted["superseded"],
        late=counted["late"],
        overdue=counted["overdue"],
        summed=counted.get("summed"),
        steps_done=progress.steps_done,
        workers_joined=members.joined_workers,
        workers_departed=members.joined_workers - members.active_workers,
        checkpoint_interval_s=UNKNOWN if interval_s is None else interval_s,
        stragglers=name_stragglers(slow) + late(job_run),
        stuck=job_run.stuck.lines(now),
    )


def _shard(job_run: JobRun, shard: Shard, names: Mapping[int, str], now: float) -> pb.ShardStatus:
    updates_per_s, gradient_nbytes_per_s = shard_rates(shard, now, LEASE_S)
    return pb.ShardStatus(
        shard=shard.index,
        address=shard.address,
        state=shard.state,
        version=shard.figures.version,
        nbytes=job_run.run.plan.shard_nbytes(shard.index),
        applied=shard.figures.applied,
        refused=shard.figures.refused,
        silent_s=now - shard.seen if shard.incarnation else 0.0,
        waiting_for=shard.figures.waiting_for,
        staleness_counts=shard.figures.staleness_counts,
        too_stale=shard.figures.too_stale,
        uncompensated=shard.figures.uncompensated,
        apply_s=shard.figures.apply_s,
        gradient_nbytes=shard.figures.gradient_nbytes,
        memory_nbytes=shard.figures.memory_nbytes,
        table_rows=shard.figures.table_rows,
        table_nbytes=shard.figures.table_nbytes,
        updates_per_s=updates_per_s,
        gradient_nbytes_per_s=gradient_nbytes_per_s,
        incarnation=shard.incarnation,
        slice=shard.index in job_run.run.hosted,
        worker=names.get(shard.worker, ""),
    )


def _worker(
    job_run: JobRun, worker: Worker, slowness: float, pushed: tuple[int, ...], now: float
) -> pb.WorkerStatus:
    progress = job_run.training.progress.workers.get(worker.name, WorkerProgress())
    return pb.WorkerStatus(
        worker=worker.name,
        host=worker.host,
        pid=worker.pid,
        device=worker.device,
        state=worker.state,
        batches=progress.batches,
        batches_per_s=progress.batch_rate.rate(now),
        silent_s=now - worker.seen,
        waiting_for=worker.waiting_for,
        incarnation=worker.incarnation,
        examples_per_s=progress.records.rate(now),
        times=write_times(worker.times),
        staleness_counts=pushed,
        slowness=slowness,
        unreachable=[
            pb.UnreachableShard(shard=shard, for_s=now - since)
            for shard, since in sorted(job_run.stuck.broken(worker.name).items())
        ],
        transports=[
            pb.Transport(shard=one.shard, kind=one.kind, why=one.why)  # type: ignore[arg-type]  # any number may have come
            for one in worker.transports
        ],
    )
