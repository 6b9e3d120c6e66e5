"""The calls of shards: their places, generations, command streams and snapshots.

Everything runs on one event loop and nothing awaits between reading and changing state, so there is
no lock.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator

from coordinator.core.lifecycle import ENDED, FORMING
from coordinator.core.run import Run
from coordinator.job.authority import check_software
from coordinator.job.job_run import JobRun
from coordinator.training.streams import Stream
from psrpc.core.commands import Command
from psrpc.core.errors import JobFailed
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

    def __init__(self, course: JobRun) -> None:
        self._course = course
        self._places = course.members.places

    def register(self, shard: ShardRegistration) -> Run:
        """Registers a shard. Raises AlreadyExists, InvalidArgument, StaleGeneration or
        JobMismatch."""
        index, address, host, pid = shard.shard, shard.address, shard.host, shard.pid
        check_software(f"shard {index}", shard.software)
        now = self._course.now()
        if self._places.register(index, shard.incarnation, address, host, pid, now):
            self._course.note_process("shard", str(index), shard.incarnation, address)
            log.info("shard registered", shard=index, address=address, pid=pid, host=host)
            self.replaced(index)
        return self._course.run

    def replaced(self, index: int) -> None:
        """Handles a shard's replacement by another process."""
        self._course.generations.formation.gone(index)
        self._course.streams.end(index)
        self._course.advance()

    def report_ready(self, index: int, standing: HeldReport, error: str) -> None:
        """Records that a shard has begun a generation, or cannot. Raises StaleGeneration."""
        holding, now = standing.holding, self._course.now()
        self._places.seen(index, holding.incarnation, now)
        self._course.check_generation(holding.generation)
        if error:
            self._course.generations.failed(index, error)
        else:
            self._places.ready(index, holding.incarnation, holding.version, now)
            log.info("shard ready", shard=index, version=holding.version)
            self._course.generations.begun(index, standing)
        self._course.advance()

    def heartbeat(self, beat: ShardHeartbeat) -> tuple[bool, bool]:
        """Records a shard's heartbeat; a ``failure`` fails the job. Returns whether the shard has
        to register again, and whether a ``leaving`` shard may go. Raises StaleGeneration."""
        index, incarnation, figures = beat.shard, beat.incarnation, beat.figures
        if not self._places.knows(index, incarnation):
            return True, False
        self._places.beat(index, incarnation, figures, self._course.now())
        if index == 0 and self._course.stands(figures.generation):
            self._course.training.epochs.take_totals(figures.epochs)
        if beat.failure:
            why = JobFailed(beat.failure)
            self._course.fail(f"{why.code}: {self._places.shards[index]} cannot go on: {why}")
        self._course.departures.obeyed(index, figures.generation, beat.revoked)
        return False, beat.leaving and self._course.departures.shard_may_go(index, incarnation)

    def forming_waits_for(self) -> str:
        """Names the events that shards wait for before they begin a generation; empty once all have
        begun."""
        return self._course.waiting_for() if self._course.phase in FORMING else ""

    def watch_now(self, index: int, holding: HeldState) -> Stream:
        """Opens a shard's command stream, which begins with the commands that the shard may have
        missed. Give the stream to :meth:`watch_ended` when its connection ends. Raises
        StaleGeneration."""
        course = self._course
        self._places.watches(index, holding.incarnation, course.now())
        course.generations.formation.stands(index, holding)
        missed: list[Command] = []
        begin = course.generations.formation.told(index)
        if course.phase in ENDED:
            missed.append(course.end())
        elif begin is not None:
            missed.append(begin)
        elif course.complete:
            missed += course.training.missed(index)
            missed += course.departures.missed(index)
        stream = course.streams.open(index, holding.incarnation, missed)
        course.advance()
        return stream

    def watch_ended(self, stream: Stream) -> None:
        """Closes a command stream after its connection, its process or the job has ended."""
        if stream.told:
            self._places.left(stream.shard, stream.incarnation)
        if self._course.streams.close(stream):
            self._places.stopped_watching(stream.shard, stream.incarnation)
            self._course.generations.formation.absent(stream.shard)
            self._course.bell.ring()

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
        self._places.seen(file.shard, report.incarnation, self._course.now())
        self._course.check_standing(report.generation)
        outcome = self._course.training.orders.snapshots.report(report.name, file, report.error)
        if file.shard == 0:
            # First, since this snapshot may be the last one, with which the job ends.
            self._course.training.epochs.take_totals(report.epochs)
        self._course.checkpoints.reported(outcome)
