"""A worker leaves with a part of rounds that are decided ahead: shards forget them, and another
generation begins with all that any shard has applied."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from coordinator.core.lifecycle import STOPPED
from coordinator.core.work import RoundsLease, Wait
from coordinator.transitions.stopping import FINISH_S
from psrpc.core.commands import Attempt, Command, Decision, Revocation, RoundsAhead
from tests.coordinator.sync_job import SYNC, begins
from tests.coordinator.whole_coordinator import Worker, report, start

JOB: dict[str, Any] = {**SYNC, "train_records": 96, "total_updates": 24}


class Cluster:
    """Two shards and workers v and w, in round 2, which is decided ahead as some after it are."""

    def __init__(self, tmp_path: Path) -> None:
        self.coordinator, self.v = start(tmp_path, **JOB)
        self.w = Worker(self.coordinator, 2)
        self.v.ahead = self.w.ahead = True
        first = [self.v.round(), self.w.round(), self.v.round()]
        self.coordinator.clock.advance(0.01)
        self.v.commit(first[0])
        self.w.commit(first[1])
        self.mine, self.others = self.held(self.v), self.held(self.w)
        self.planned = [d for command in self.commands() for d in command.decisions]
        self.apply(0, 1)
        self.v.lease([report(self.mine.pop(0))])
        self.w.lease([report(self.others.pop(0))])
        self.coordinator.settle()
        assert [shard.version for shard in self.coordinator.shards] == [2, 2]
        del self.planned[0]
        assert [decision.round for decision in self.planned][:2] == [2, 3]

    def commands(self) -> list[RoundsAhead]:
        """The orders about rounds ahead that shard 0 gets; both carry out all else."""
        told: list[Command] = []
        for shard in self.coordinator.shards:
            while (command := shard.next()) is not None:
                shard.carry_out(command)
                told += [command] if shard.index == 0 else []
        return [command for command in told if isinstance(command, RoundsAhead)]

    def held(self, worker: Worker) -> list[Attempt]:
        work = worker.lease()
        assert isinstance(work, RoundsLease)
        return [attempt for _, attempt in work.attempts]

    def apply(self, *shards: int) -> None:
        """These shards apply the next round by themselves."""
        for shard in shards:
            of = self.coordinator.shards[shard]
            of.apply(next(d for d in self.planned if d.round == of.version))

    def leaves(self, worker: Worker) -> None:
        self.coordinator.engine.sessions.leave(worker.name, "it was stopped", fatal=False)

    @property
    def generation(self) -> int:
        return self.coordinator.job_run.run.generation

    @property
    def kept(self) -> list[tuple[bool, Decision | None]]:
        return [(begin.keep, begin.decision) for begin in begins(self.coordinator)]


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    return Cluster(tmp_path)


def test_another_generation_begins_once_every_shard_has_obeyed(cluster: Cluster) -> None:
    coordinator = cluster.coordinator
    cluster.apply(0)
    cluster.leaves(cluster.v)
    waits = cluster.w.lease()
    assert isinstance(waits, Wait)
    assert waits.reason.endswith(f"shards 0, 1 to refuse {cluster.v.name}")
    first, second = coordinator.shards
    [command] = [first.next()]
    assert isinstance(command, Revocation)
    first.carry_out(command)
    first.beat()
    coordinator.tick()
    assert cluster.generation == 1
    assert second.obey() == 1 + 1, "it obeys, and begins"
    assert cluster.generation == 2
    coordinator.settle()
    # Only shard 0 had applied round 2.
    assert cluster.kept == [(True, cluster.planned[0])] * 2
    assert [shard.version for shard in coordinator.shards] == [3, 3]
    assert coordinator.job_run.phase == "training"
    assert coordinator.job_run.standing == (2, 3)
    assert coordinator.job_run.training.span.examples == 3 * 8
    cluster.w.join()
    assert cluster.w.round().attempt.batch.first == 3 * 8


def test_rounds_that_every_shard_has_applied_need_no_report_to_be_kept(cluster: Cluster) -> None:
    coordinator = cluster.coordinator
    cluster.apply(0, 1)
    cluster.apply(0, 1)
    cluster.leaves(cluster.v)
    coordinator.settle()
    assert cluster.kept == [(True, None)] * 2
    assert coordinator.job_run.standing == (2, 4)
    assert not any("done again" in warning for warning in coordinator.job_run.warnings.kept)


def test_reports_meanwhile_change_nothing(cluster: Cluster) -> None:
    coordinator = cluster.coordinator
    cluster.apply(0)
    cluster.leaves(cluster.v)
    cluster.w.lease([report(attempt) for attempt in cluster.others])
    assert coordinator.job_run.standing == (1, 2)
    coordinator.settle()
    assert coordinator.job_run.standing == (2, 3)


def test_a_worker_that_falls_silent_is_no_other(cluster: Cluster) -> None:
    coordinator = cluster.coordinator
    cluster.apply(1)
    coordinator.job_run.departures.dismiss(cluster.w.name, "it cannot go on")
    coordinator.settle()
    assert cluster.kept == [(True, cluster.planned[0])] * 2
    assert coordinator.job_run.standing == (2, 3)


def test_a_worker_that_has_reported_all_its_parts_leaves_the_generation_as_it_is(
    cluster: Cluster,
) -> None:
    coordinator = cluster.coordinator
    cluster.v.ahead = False  # no more are decided
    cluster.v.lease([report(attempt) for attempt in cluster.mine])
    held = coordinator.job_run.training.rounds
    assert held is not None
    if held.ahead.held_by([cluster.v.name]):
        cluster.v.lease([report(attempt) for attempt in cluster.held(cluster.v)])
    cluster.leaves(cluster.v)
    coordinator.settle()
    assert cluster.generation == 1
    assert isinstance(cluster.w.lease(), RoundsLease)


def test_a_generation_that_begins_again_goes_on_as_usual(cluster: Cluster) -> None:
    """It is begun once, and a revocation in it is an ordinary one."""
    coordinator = cluster.coordinator
    cluster.leaves(cluster.v)
    coordinator.settle()
    assert cluster.generation == 2
    cluster.w.join()
    other = Worker(coordinator, 3)
    other.round()
    cluster.leaves(other)
    coordinator.settle()
    coordinator.tick()
    coordinator.settle()
    assert cluster.generation == 2
    assert not coordinator.job_run.generations.again


def stands_again(cluster: Cluster) -> None:
    """The streams of all shards have ended; each opens another one and says where it stands."""
    coordinator = cluster.coordinator
    for shard in list(coordinator.shards):
        assert shard.next() is None, "its stream has ended"
        coordinator.shards.remove(shard)
        shard.watch()
    coordinator.settle()


@pytest.mark.parametrize("leaves", [False, True], ids=["all stay", "a worker leaves"])
@pytest.mark.parametrize("applied", [(), (0,), (0, 1)])
def test_a_job_that_stops_begins_again_and_saves_what_shards_have_applied(
    cluster: Cluster, applied: tuple[int, ...], leaves: bool
) -> None:
    coordinator = cluster.coordinator
    cluster.apply(*applied)
    if leaves:
        cluster.leaves(cluster.v)
        coordinator.job_run.stop()
        coordinator.settle()
    else:
        coordinator.job_run.stop()
        assert coordinator.job_run.phase == "stopping"
        stands_again(cluster)
    assert coordinator.job_run.reason == STOPPED
    step = 3 if applied else 2
    assert coordinator.job_run.checkpoints.newest.partition(".")[0] == f"checkpoints/step-{step:08}"
    assert not any("is not saved" in warning for warning in coordinator.job_run.warnings.kept)


def test_a_job_that_stops_does_not_wait_for_ever_for_another_generation(cluster: Cluster) -> None:
    coordinator = cluster.coordinator
    coordinator.job_run.stop()
    coordinator.tick(FINISH_S)
    assert coordinator.job_run.reason == STOPPED
    assert any("another generation does not begin" in w for w in coordinator.job_run.warnings.kept)


def test_while_another_generation_begins_no_shard_goes_unsaved_and_a_stop_waits(
    cluster: Cluster,
) -> None:
    coordinator = cluster.coordinator
    cluster.apply(0, 1)
    cluster.leaves(cluster.v)
    for shard in coordinator.shards:
        revocation = shard.next()
        assert isinstance(revocation, Revocation)
        assert revocation.attempts == (), "a shard that lags may need them"
        shard.carry_out(revocation)
    phases: list[str] = [coordinator.job_run.phase]
    first = coordinator.shards[0]
    assert not coordinator.job_run.departures.shard_may_go(0, first.incarnation)
    coordinator.job_run.stop()
    phases.append(coordinator.job_run.phase)
    assert phases == ["recovering", "stopping"]
    coordinator.settle()
    assert coordinator.job_run.checkpoints.newest.partition(".")[0] == "checkpoints/step-00000003"
