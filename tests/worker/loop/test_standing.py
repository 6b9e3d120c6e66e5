from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from coordinator.client.client import CoordinatorClient
from psrpc.core.batch import BatchId
from psrpc.core.errors import (
    CoordinatorUnreachable,
    DeadlinePassed,
    Forming,
    InvalidArgument,
    JobFailed,
    NotReady,
    OutcomeUnknown,
    ShardUnreachable,
    StaleGeneration,
)
from psrpc.ops.threads import Threads
from psrpc.v1 import coordinator_pb2 as pb
from tests.pserver.shards import session_of
from tests.worker.scripted_coordinator import ScriptedCoordinator, serve_script
from worker.loop.session import PAUSE_S, WorkerSession
from worker.protocol.done import DoneBatch, Stopped


@contextmanager
def joined() -> Iterator[tuple[ScriptedCoordinator, WorkerSession]]:
    """A worker that has registered and knows the cluster, with its threads running."""
    with (
        serve_script() as coordinator,
        CoordinatorClient(coordinator.address) as client,
        WorkerSession(client, incarnation=7, connect_timeout_s=5) as standing,
    ):
        standing.register("sha", "cpu")
        standing.get_cluster()
        yield coordinator, standing


def done(attempt: int) -> DoneBatch:
    return DoneBatch(BatchId(0, attempt, 1), attempt, 0.5)


def test_heartbeats_carry_what_is_done_and_what_is_awaited() -> None:
    with joined() as (coordinator, standing), standing.waits.on("shard 1"):
        standing.done(done(3))
        while not any(beat.done for beat in coordinator.of(pb.HeartbeatWorkerRequest)):
            standing.flush()
        beat = next(b for b in coordinator.of(pb.HeartbeatWorkerRequest) if b.done)
        assert [report.attempt for report in beat.done] == [3]
        assert beat.waiting_for == "shard 1"
        assert (beat.session, beat.generation) == (session_of("worker-0"), 1)


def test_a_worker_names_the_job_it_has_loaded_to_later_coordinators_too() -> None:
    with (
        serve_script() as coordinator,
        CoordinatorClient(coordinator.address) as client,
    ):
        standing = WorkerSession(client, incarnation=7, connect_timeout_s=5)
        coordinator.job.settings_sha256 = "ef" * 32
        standing.get_job()
        coordinator.job.settings_sha256 = "00" * 32
        for _ in range(2):
            standing.register("sha", "cpu")
            standing.begin_again()
        said = [r.settings_sha256 for r in coordinator.of(pb.RegisterWorkerRequest)]
        assert said == ["ef" * 32] * 2


def test_reports_stay_until_a_call_that_carried_them_succeeded() -> None:
    with (
        serve_script() as coordinator,
        CoordinatorClient(coordinator.address) as client,
    ):
        # Not entered: no heartbeats take the reports along.
        standing = WorkerSession(client, incarnation=7, connect_timeout_s=5)
        standing.register("sha", "cpu")
        coordinator.leases.append(InvalidArgument("no"))
        standing.done(done(1))
        with pytest.raises(InvalidArgument):
            standing.lease()
        standing.done(done(2))
        standing.lease()
        standing.lease()
        sent = [[r.attempt for r in r.done] for r in coordinator.of(pb.LeaseWorkRequest)]
        assert sent == [[1], [1, 2], []]


def test_dropped_leases_are_requested_again_until_an_answer_comes() -> None:
    with joined() as (coordinator, standing):
        task = pb.TrainTask(batches=[{"attempt": 5}])
        coordinator.leases.extend([InvalidArgument("no"), pb.Lease(train=task)])
        with pytest.raises(InvalidArgument):
            standing.lease()
        standing.lease()
        standing.lease()
        received = [request.received for request in coordinator.of(pb.LeaseWorkRequest)]
        assert received == [0, 0, 5]
        standing.get_cluster()
        standing.lease()
        assert coordinator.of(pb.LeaseWorkRequest)[-1].received == 0


def test_dropped_leases_are_requested_again_after_an_evaluation() -> None:
    with joined() as (coordinator, standing):
        evaluate = pb.Lease(evaluate=pb.EvaluateTask(evaluation="epoch-0"))
        merge = pb.Lease(merge=pb.MergeEvaluation(evaluation="epoch-0"))
        task = pb.TrainTask(batches=[{"attempt": 5}])
        coordinator.leases.extend([pb.Lease(train=task), evaluate, merge, pb.Lease(train=task)])
        standing.lease()
        standing.get_cluster()
        for _ in range(4):
            standing.lease()
        received = [request.received for request in coordinator.of(pb.LeaseWorkRequest)]
        assert received == [0, 0, 0, 0, 5]


def test_work_of_a_worker_taken_for_lost_is_reported_when_it_returns() -> None:
    with joined() as (coordinator, standing):
        coordinator.heartbeat.unknown = True
        standing.done(done(3))
        beats = len(coordinator.of(pb.HeartbeatWorkerRequest))
        # The one under way may have been made up before.
        unheard = coordinator.wait_for(pb.HeartbeatWorkerRequest, beats + 4)[beats + 1 :]
        assert all([report.attempt for report in beat.done] == [3] for beat in unheard)


def test_a_worker_that_was_taken_for_gone_joins_again() -> None:
    with joined() as (coordinator, standing):
        coordinator.heartbeat.unknown = True
        beats = len(coordinator.of(pb.HeartbeatWorkerRequest))
        # The answer to the first one is in when the second one comes.
        coordinator.wait_for(pb.HeartbeatWorkerRequest, beats + 3)
        with pytest.raises(StaleGeneration, match="taken this worker for gone"):
            standing.check()
        coordinator.heartbeat.unknown = False
        beats = len(coordinator.of(pb.HeartbeatWorkerRequest))
        coordinator.wait_for(pb.HeartbeatWorkerRequest, beats + 3)
        standing.begin_again()
        standing.register("sha", "cpu")
        standing.check()
        assert len(coordinator.of(pb.RegisterWorkerRequest)) == 2


def test_a_failed_job_ends_a_wait() -> None:
    with joined() as (coordinator, standing):
        coordinator.heartbeat.shutdown.failed = True
        coordinator.heartbeat.shutdown.reason = "shard 1 is gone"
        with pytest.raises(JobFailed, match="shard 1 is gone"):
            standing.pause(60)


def test_a_stop_ends_the_wait_for_a_coordinator() -> None:
    with CoordinatorClient("127.0.0.1:1") as client:
        standing = WorkerSession(client, incarnation=7, connect_timeout_s=600)
        standing.stop()
        with pytest.raises(Stopped):
            standing.get_job()
        # No lease to give back, and no coordinator to tell.
        standing.leave("stopped")


def test_a_shard_that_never_comes() -> None:
    with (
        serve_script() as coordinator,
        CoordinatorClient(coordinator.address) as client,
    ):
        standing = WorkerSession(client, incarnation=7, connect_timeout_s=0)
        standing.register("sha", "cpu")
        # The words change with the time, the fact does not.
        coordinator.not_ready.extend(NotReady(f"shard 1, silent for {s} s") for s in (10, 11, 12))
        with pytest.raises(ShardUnreachable, match=r"away for 0 s: shard 1, silent for 11 s; "):
            standing.get_cluster()
        assert len(coordinator.not_ready) == 1


def test_shards_that_begin_are_awaited_as_long_as_it_takes() -> None:
    with (
        serve_script() as coordinator,
        CoordinatorClient(coordinator.address) as client,
    ):
        standing = WorkerSession(client, incarnation=7, connect_timeout_s=0)
        standing.register("sha", "cpu")
        begins, away = Forming("shard 0 to begin generation 3"), NotReady("shard 1 to come back")
        # A shard that came back between two answers was not away for the whole time.
        coordinator.not_ready.extend([begins, begins, away, begins, away, begins, begins])
        assert standing.get_cluster().generation == 1
        assert not coordinator.not_ready


def test_a_coordinator_that_never_comes() -> None:
    with CoordinatorClient("127.0.0.1:1") as client:
        standing = WorkerSession(client, incarnation=7, connect_timeout_s=0)
        with pytest.raises(CoordinatorUnreachable, match="nothing listens at 127"):
            standing.get_job()


def test_a_newer_generation_interrupts_a_wait() -> None:
    with joined() as (coordinator, standing):
        heard: list[bool] = []
        standing.interrupt_with(heard.append)
        coordinator.heartbeat.generation = 2
        with pytest.raises(StaleGeneration, match="generation 1 is over"):
            standing.pause(60)
        assert heard[0], "what is under way cannot matter any more"
        coordinator.cluster.generation = 2
        standing.begin_again()
        standing.register("sha", "cpu")
        standing.get_cluster()
        standing.check()
        # Nor does a flag that was left set make every wait short.
        assert not standing._interrupted.is_set()


def test_a_stop_lets_the_step_under_way_finish() -> None:
    with joined() as (_, standing):
        heard: list[bool] = []
        standing.interrupt_with(heard.append)
        standing.stop()
        assert not any(heard)
        with pytest.raises(Stopped):
            standing.check()


def test_heartbeats_hurry_while_a_shard_is_awaited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker.loop.session.HURRY_S", 0.001)
    with joined() as (coordinator, standing):
        standing.membership.heartbeat_s = 3600
        # The last one that the old pace sends.
        beats = len(coordinator.of(pb.HeartbeatWorkerRequest))
        coordinator.wait_for(pb.HeartbeatWorkerRequest, beats)
        standing.hurry(True)
        coordinator.wait_for(pb.HeartbeatWorkerRequest, beats + 5)
        standing.hurry(False)


def test_a_commit_that_was_never_answered_has_an_unknown_outcome() -> None:
    with (
        serve_script() as coordinator,
        CoordinatorClient(coordinator.address) as client,
    ):
        standing = WorkerSession(client, incarnation=7, connect_timeout_s=0)
        standing.register("sha", "cpu")
        coordinator.leases.append(DeadlinePassed("so it seems"))
        expected = r"not answered the commit of epoch 1 positions 3..3 in round 5.*is safe"
        with pytest.raises(OutcomeUnknown, match=expected):
            standing.committing(5, done(3))()
    with CoordinatorClient("127.0.0.1:1") as client:
        standing = WorkerSession(client, incarnation=7, connect_timeout_s=0)
        with pytest.raises(CoordinatorUnreachable):
            standing.committing(5, done(3))()


def test_a_worker_joins_anew_at_once_unless_it_has_only_just_joined(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with serve_script() as coordinator, CoordinatorClient(coordinator.address) as client:
        now_s, paused = 100.0, list[float]()
        threads = Threads()
        monkeypatch.setattr(threads, "now", lambda: now_s)
        standing = WorkerSession(client, incarnation=7, connect_timeout_s=5, threads=threads)
        monkeypatch.setattr(standing, "pause", paused.append)
        for after_s in (0.0, 0.05, 3.0):
            standing.register("sha", "cpu")
            standing.get_cluster()
            now_s += after_s
            standing.begin_again()
        assert paused == pytest.approx([PAUSE_S, PAUSE_S - 0.05, 0.0])
