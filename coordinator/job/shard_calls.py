"""The calls of shards: their places, generations, command streams and snapshots.

Everything runs on one event loop and nothing awaits between reading and changing state, so there is
no lock.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator

from coordinator.core.description import no_shard_belongs
from coordinator.core.lifecycle import ENDED, FORMING
from coordinator.core.run import Run
from coordinator.core.wording import shards as in_words
from coordinator.job.authority import check_software
from coordinator.job.job_run import JobRun
from coordinator.training.streams import Stream
from psrpc.core.commands import Command
from psrpc.core.errors import InvalidArgument, JobFailed
from psrpc.core.shard_reports import (
    HeldReport,
    HeldState,
    ShardHeartbeat,
    ShardRegistration,
    SnapshotReport,
)
from psrpc.ops.logs import get_logger

log = get_logger()


class ShardCalls:
    """Handles the calls of shards on one run of a job. Every method runs on one event loop."""

    def __init__(self, job_run: JobRun) -> None:
        self._job_run = job_run
        self._places = job_run.members.places

    def register(self, shard: ShardRegistration) -> Run:
        """Registers a shard. Raises AlreadyExists, InvalidArgument, StaleGeneration or
        JobMismatch."""
        index, address, host, pid = shard.shard, shard.address, shard.host, shard.pid
        check_software(f"shard {index}", shard.software)
        self._check_host(shard)
        now, worker = self._job_run.now(), shard.worker
        if self._places.register(index, shard.incarnation, address, host, pid, now, worker):
            self._job_run.note_process("shard", str(index), shard.incarnation, address)
            log.info("shard registered", shard=index, address=address, pid=pid, host=host)
            self.replaced(index)
        return self._job_run.run

    def _check_host(self, shard: ShardRegistration) -> None:
        run, index = self._job_run.run, shard.shard
        if index in run.hosted and not shard.worker:
            if rows := run.hosted.start:
                raise InvalidArgument(
                    f"dense is 'allreduce', so workers host the dense parameters, shard {index} "
                    f"among them; start `pserver serve` for {in_words(range(rows))} alone, which "
                    f"{'has' if rows == 1 else 'have'} the rows of the embedding tables"
                )
            raise no_shard_belongs()
        if shard.worker and index not in run.hosted:
            why = f"shard {index} is no slice" if run.hosted else "dense is 'shards'"
            raise InvalidArgument(f"a worker offers to host a shard, and {why}")

    def replaced(self, index: int) -> None:
        """Handles a shard's replacement by another process."""
        self._job_run.generations.formation.gone(index)
        self._job_run.streams.end(index)
        self._job_run.advance()

    def report_ready(self, index: int, standing: HeldReport, error: str) -> None:
        """Records that a shard has begun a generation, or cannot. Raises StaleGeneration."""
        holding, now = standing.holding, self._job_run.now()
        self._places.seen(index, holding.incarnation, now)
        self._job_run.check_generation(holding.generation)
        if error:
            self._job_run.generations.failed(index, error)
        else:
            self._places.ready(index, holding.incarnation, holding.version, now)
            log.info("shard ready", shard=index, version=holding.version)
            self._job_run.generations.begun(index, standing)
        self._job_run.advance()

    def heartbeat(self, beat: ShardHeartbeat) -> tuple[bool, bool]:
        """Records a shard's heartbeat; a ``failure`` fails the job. Returns whether the shard has
        to register again, and whether a ``leaving`` shard may go. Raises StaleGeneration."""
        index, incarnation, figures = beat.shard, beat.incarnation, beat.figures
        if not self._places.knows(index, incarnation):
            return True, False
        self._places.beat(index, incarnation, figures, self._job_run.now())
        if index == 0 and self._job_run.stands(figures.generation):
            self._job_run.training.epochs.take_totals(figures.epochs)
        if beat.failure:
            why = JobFailed(beat.failure)
            self._job_run.fail(f"{why.code}: {self._places.shards[index]} cannot go on: {why}")
        self._job_run.departures.obeyed(index, figures.generation, beat.revoked)
        return False, beat.leaving and self._job_run.departures.shard_may_go(index, incarnation)

    def forming_waits_for(self) -> str:
        """Names the events that shards wait for before they begin a generation; empty once all have
        begun."""
        return self._job_run.waiting_for() if self._job_run.phase in FORMING else ""

    def watch_now(self, index: int, holding: HeldState) -> Stream:
        """Opens a shard's command stream, which begins with the commands that the shard may have
        missed. Give the stream to :meth:`watch_ended` when its connection ends. Raises
        StaleGeneration."""
        job_run = self._job_run
        self._places.watches(index, holding.incarnation, job_run.now())
        job_run.generations.formation.stands(index, holding)
        missed: list[Command] = []
        begin = job_run.generations.formation.told(index)
        if job_run.phase in ENDED:
            missed.append(job_run.end())
        elif begin is not None:
            missed.append(begin)
        elif job_run.complete:
            missed += job_run.training.missed(index)
            missed += job_run.departures.missed(index)
        stream = job_run.streams.open(index, holding.incarnation, missed)
        job_run.advance()
        return stream

    def watch_ended(self, stream: Stream) -> None:
        """Closes a command stream after its connection, its process or the job has ended."""
        if stream.told:
            self._places.left(stream.shard, stream.incarnation)
        if self._job_run.streams.close(stream):
            self._places.stopped_watching(stream.shard, stream.incarnation)
            self._job_run.generations.formation.absent(stream.shard)
            self._job_run.bell.ring()

    async def watch(self, index: int, holding: HeldState) -> AsyncGenerator[Command, None]:
        """Yields the commands for a shard, from those that it may have missed to the end of the
        job. Raises StaleGeneration."""
        stream = self.watch_now(index, holding)
        try:
            async for command in stream:
                yield command
        finally:
            self.watch_ended(stream)

    def report_snapshot(self, report: SnapshotReport) -> None:
        """Records a shard's snapshot. Raises StaleGeneration, InvalidArgument."""
        file = report.file
        self._places.seen(file.shard, report.incarnation, self._job_run.now())
        self._job_run.check_standing(report.generation)
        outcome = self._job_run.training.orders.snapshots.report(report.name, file, report.error)
        if file.shard == 0:
            # First, since this snapshot may be the last one, with which the job ends.
            self._job_run.training.epochs.take_totals(report.epochs)
        self._job_run.checkpoints.reported(outcome)
