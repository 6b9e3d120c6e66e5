"""A worker's name, session and generation: answers may come in any order."""

from __future__ import annotations

import pytest

from psrpc.core.batch import BatchId
from psrpc.core.errors import JobFailed, StaleGeneration
from psrpc.v1 import coordinator_pb2 as pb
from worker.protocol.done import DoneBatch, Stopped
from worker.protocol.membership import Beat, WorkerMembership

SECRET = bytes(range(32))


def registered(worker: str = "worker-0") -> pb.RegisterWorkerResponse:
    return pb.RegisterWorkerResponse(
        worker=worker, heartbeat_s=0.5, session=b"of " + worker.encode()
    )


def at(generation: int) -> pb.GetClusterResponse:
    return pb.GetClusterResponse(generation=generation, policy=1)


def joined(generation: int = 1) -> WorkerMembership:
    member = WorkerMembership(incarnation=7, secret=SECRET)
    member.registered(registered())
    member.joined(at(generation))
    return member


def beat(member: WorkerMembership) -> Beat:
    found = member.beat("")
    assert found is not None
    return found


def done(attempt: int) -> DoneBatch:
    return DoneBatch(BatchId(0, attempt, 1), attempt, 0.5)


def task(*attempts: int) -> pb.Lease:
    return pb.Lease(train=pb.TrainTask(batches=[{"attempt": attempt} for attempt in attempts]))


def test_a_newer_generation_is_learnt_from_a_heartbeat() -> None:
    member = joined()
    member.heard(beat(member), pb.HeartbeatWorkerResponse(generation=1))
    member.check()
    member.heard(beat(member), pb.HeartbeatWorkerResponse(generation=2))
    assert member.outdated
    with pytest.raises(StaleGeneration, match="generation 1 is over; the next is 2 or later"):
        member.check()


def test_an_answer_that_was_on_its_way_when_the_worker_joined_is_old_news() -> None:
    member = joined(2)
    late = beat(member)
    member.heard(beat(member), pb.HeartbeatWorkerResponse(generation=3))
    member.rejoins()
    member.heard(late, pb.HeartbeatWorkerResponse(generation=9, unknown=True))
    member.check()
    member.registered(registered())
    member.heard(late, pb.HeartbeatWorkerResponse(generation=9, unknown=True))
    member.joined(at(3))
    member.heard(beat(member), pb.HeartbeatWorkerResponse(generation=2))
    member.check()


def test_while_it_joins_a_worker_does_not_mind_which_generation_comes() -> None:
    member = joined()
    member.rejoins()
    assert member.beat("") is None, "it has no session"
    member.registered(registered())
    member.heard(beat(member), pb.HeartbeatWorkerResponse(generation=5))
    member.check()
    member.joined(at(4))
    with pytest.raises(StaleGeneration, match="generation 4 is over; the next is 5"):
        member.check()


def test_an_unknown_worker_registers_again_and_may_get_another_name() -> None:
    member = joined()
    member.heard(beat(member), pb.HeartbeatWorkerResponse(unknown=True))
    with pytest.raises(StaleGeneration, match="has taken this worker for gone"):
        member.check()
    member.rejoins()
    member.check()
    member.registered(registered("worker-5"))
    assert member.worker == "worker-5"
    assert beat(member).request.session == b"of worker-5"
    assert member.lease().request.session == b"of worker-5"


def test_work_of_an_older_generation_is_never_reported_in_a_newer_one() -> None:
    member = joined()
    member.done(done(1))
    sent = beat(member)
    assert [(report.attempt) for report in sent.request.done] == [1]
    member.rejoins()
    member.registered(registered())
    assert sent.request.generation == 1
    member.joined(at(2))
    assert not beat(member).request.done
    assert not member.lease().request.done
    # Attempts count anew there; the late answer is not about this one.
    member.done(done(1))
    member.heard(sent, pb.HeartbeatWorkerResponse())
    assert [report.attempt for report in member.lease().request.done] == [1]


def test_in_the_same_generation_what_all_shards_have_stays_to_be_reported() -> None:
    member = joined()
    member.done(done(1))
    member.heard(beat(member), pb.HeartbeatWorkerResponse(unknown=True))
    member.rejoins()
    member.registered(registered())
    member.joined(at(1))
    assert [report.attempt for report in member.lease().request.done] == [1]


def test_work_done_under_another_name_is_not_reported() -> None:
    """It was leased to that one, and so are the receipts: another one gets the batch, and shards
    answer that they have it."""
    member = joined()
    member.done(done(1))
    member.heard(beat(member), pb.HeartbeatWorkerResponse(unknown=True))
    member.rejoins()
    member.registered(registered("worker-1"))
    member.joined(at(1))
    assert not member.lease().request.done


def test_leases_that_were_dropped_are_asked_for_again_and_attempts_count_anew() -> None:
    member = joined()
    assert member.lease().request.received == 0
    asked = member.lease()
    member.leased(asked, task(40, 41))
    assert member.lease().request.received == 41
    member.rejoins()
    member.registered(registered())
    member.joined(at(2))
    again = member.lease()
    assert again.request.received == 0
    member.leased(again, task(3))
    assert member.lease().request.received == 3
    # What was asked for in generation 1 comes late.
    member.leased(asked, task(50))
    assert member.lease().request.received == 3


def test_a_signal_and_the_end_of_the_job_come_before_all_else() -> None:
    member = joined()
    failed = pb.Shutdown(failed=True, reason="it diverged")
    member.heard(beat(member), pb.HeartbeatWorkerResponse(unknown=True, shutdown=failed))
    with pytest.raises(JobFailed, match="it diverged"):
        member.check()
    member.rejoins()
    with pytest.raises(JobFailed):
        member.check()
    member.stop()
    with pytest.raises(Stopped, match="told to stop") as told:
        member.check()
    assert told.value.status == 75
    assert member.interrupted
    stopped = joined()
    over = pb.Shutdown(reason="stopped by a signal")
    stopped.heard(beat(stopped), pb.HeartbeatWorkerResponse(shutdown=over))
    with pytest.raises(Stopped, match="the job was stopped by a signal") as told:
        stopped.check()
    assert told.value.status == 130
    done = joined()
    done.stop()
    done.heard(beat(done), pb.HeartbeatWorkerResponse(shutdown=pb.Shutdown()))
    with pytest.raises(Stopped) as told:
        done.check()
    assert told.value.status == 0
