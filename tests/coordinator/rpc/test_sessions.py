"""Workers call a coordinator with their sessions: who they are, and whose part in it is over."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from coordinator.client.client import CoordinatorClient
from psrpc import SOFTWARE
from psrpc.core.errors import AccessDenied, InvalidArgument, StaleGeneration
from psrpc.security.signatures import read_session, receipt_of
from psrpc.v1 import coordinator_pb2 as pb
from psrpc.v1 import types_pb2 as types
from psrpc.wire.commands import from_batch
from tests.coordinator.builders import SHA, Served, make_run, serving
from tests.coordinator.fakes import (
    GRANT_KEYS,
    ShardDouble,
    WorkerDouble,
    report,
    start_training,
)

SHARDS = 2


class Job:
    """A job of two shards that trains with one worker, ``first``."""

    def __init__(self, served: Served, client: CoordinatorClient) -> None:
        self.served = served
        self.client = client
        self.shards, self.streams, [self.first] = start_training(client, SHARDS)

    @property
    def key(self) -> bytes:
        return GRANT_KEYS[self.client.address]

    def join(self, incarnation: int, secret: bytes = b"") -> WorkerDouble:
        worker = WorkerDouble(self.client, incarnation)
        worker.secret = secret or worker.secret
        worker.register()
        return worker

    def obey(self) -> list[str]:
        """The shards refuse the worker that comes next; whom."""
        pairs: list[tuple[ShardDouble, Iterator[pb.WatchResponse]]]
        pairs = list(zip(self.shards, self.streams, strict=True))
        return [shard.refuse(stream).worker for shard, stream in pairs]

    def state(self, worker: WorkerDouble) -> str:
        return self.served.job_run.members.workers[worker.name].state


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    run = make_run(tmp_path, SHARDS, train_records=16)
    with serving(run) as served, CoordinatorClient(served.address) as client:
        yield Job(served, client)


def held(worker: WorkerDouble) -> types.Attempt:
    """The batch that it is given."""
    attempt: types.Attempt = worker.lease().train.batches[0]
    return attempt


# -- sessions --------------------------------------------------------------------------------


def test_a_session_is_what_shards_read(job: Job) -> None:
    verify = job.shards[0].told[0].verify_key
    assert read_session(verify, job.first.session).worker == job.first.name
    attempt = held(job.first)
    assert len(attempt.grant) == 16


def test_a_registration_that_is_repeated_gets_the_same_session(job: Job) -> None:
    name, session = job.first.name, job.first.session
    assert job.first.register() == name
    assert job.first.session == session


def test_another_process_that_names_its_incarnation_is_another_worker(job: Job) -> None:
    """Incarnations stand in the status, for everyone to see."""
    attempt = held(job.first)
    thief = job.join(job.first.incarnation, secret=b"x" * 32)
    assert thief.name != job.first.name
    assert thief.session != job.first.session
    assert held(thief).batch != attempt.batch
    assert job.state(job.first) == "active"
    assert not job.first.heartbeat([report(attempt)]).unknown
    assert job.served.job_run.training.span.batches == 1


@pytest.mark.parametrize("length", [0, 31, 33])
def test_a_secret_has_32_bytes(job: Job, length: int) -> None:
    with pytest.raises(InvalidArgument, match=f"a secret of {length} bytes; expected 32"):
        job.client.register_worker(
            pb.RegisterWorkerRequest(
                incarnation=3, job_sha256=SHA, software=SOFTWARE, secret=bytes(length)
            )
        )


@pytest.mark.parametrize("session", [b"", b"x", b"x" * 255])
def test_a_session_that_is_not_known_here(job: Job, session: bytes) -> None:
    stranger = WorkerDouble(job.client, 9)
    stranger.name, stranger.session = job.first.name, session
    attempt = held(job.first)
    assert stranger.heartbeat([report(attempt)]).unknown
    for done in ([], [report(attempt)]):
        with pytest.raises(StaleGeneration, match="a worker without a session is not registered"):
            stranger.lease(done)
    with pytest.raises(StaleGeneration):
        stranger.report_work(initialized=pb.InitializeDone())
    stranger.leave("nothing of yours", fatal=True)
    assert job.state(job.first) == "active"
    assert job.client.get_job_status().phase == "training"
    assert job.served.job_run.training.span.batches == 0


def test_a_session_ends_when_its_worker_leaves(job: Job) -> None:
    job.first.leave()
    assert job.first.heartbeat().unknown
    with pytest.raises(StaleGeneration):
        job.first.lease()


# -- what only the shards can say ------------------------------------------------------------


def claim(job: Job, attempt: types.Attempt, *receipts: bytes) -> None:
    """The first worker reports ``attempt``, with these receipts alone."""
    done = report(attempt)
    done.receipts[:] = receipts
    job.client.heartbeat_worker(
        pb.HeartbeatWorkerRequest(session=job.first.session, generation=1, done=[done])
    )


def receipts(job: Job, attempt: types.Attempt, *shards: int, skipped: int = -1) -> list[bytes]:
    """Of ``shards``; ``skipped`` has it without a gradient."""
    batch = from_batch(attempt.batch)
    return [
        receipt_of(job.key, job.first.name, 1, batch, attempt.attempt, shard, shard == skipped)
        for shard in shards
    ]


@pytest.mark.parametrize("places", [(), (0,), (1, 0), (0, 0)])
def test_a_worker_that_reports_batches_it_did_not_push_is_dismissed(
    job: Job, places: tuple[int, ...]
) -> None:
    attempt = held(job.first)
    other = job.join(5)
    with pytest.raises(AccessDenied, match="has not vouched for it") as caught:
        claim(job, attempt, *receipts(job, attempt, *places))
    assert caught.value.code == "PS308"
    assert job.state(job.first) == "left"
    assert any("has not vouched" in warning for warning in job.client.get_job_status().warnings)
    with pytest.raises(AccessDenied) as caught:
        job.first.register()
    assert caught.value.code == "PS307"
    assert job.obey() == [job.first.name] * SHARDS
    assert held(other).batch == attempt.batch
    assert job.served.job_run.training.span.batches == 0


def test_a_receipt_of_another_attempt_is_none(job: Job) -> None:
    attempt = held(job.first)
    another = types.Attempt(batch=attempt.batch, attempt=attempt.attempt + 1)
    with pytest.raises(AccessDenied):
        claim(job, attempt, *receipts(job, another, 0, 1))


@pytest.mark.parametrize("skipped", [0, 1])
def test_a_skipped_push_that_is_reported_as_trained_counts_as_skipped(
    job: Job, skipped: int
) -> None:
    attempt = held(job.first)
    claim(job, attempt, *receipts(job, attempt, 0, 1, skipped=skipped))
    assert job.served.job_run.training.span.batches == 1
    assert job.served.job_run.training.progress.skipped == 1
    assert job.served.job_run.training.span.examples == 0
    assert job.state(job.first) == "active"


# -- revoked by an operator ------------------------------------------------------------------


@pytest.mark.parametrize("bar", [False, True])
def test_leases_of_a_revoked_worker_go_to_others_once_shards_refuse_it(job: Job, bar: bool) -> None:
    attempt = held(job.first)
    other = job.join(5)
    job.client.revoke_worker(job.first.name, 0, "it is odd", bar=bar)
    assert job.state(job.first) == "left"
    assert held(other).batch != attempt.batch, "shards may still take it of the first"
    assert job.first.heartbeat([report(attempt)]).unknown
    with pytest.raises(StaleGeneration):
        job.first.lease()
    assert job.obey() == [job.first.name] * SHARDS
    other.received = 0
    batches = [lease.batch for lease in job.join(6).lease().train.batches]
    assert attempt.batch in batches
    assert job.served.job_run.training.span.batches == 0


def test_a_process_that_is_barred_does_not_come_back_and_others_do(job: Job) -> None:
    job.client.revoke_worker(job.first.name, 0, "", bar=True)
    with pytest.raises(AccessDenied, match=f"was {job.first.name}, which was revoked") as caught:
        job.first.register()
    assert caught.value.code == "PS307"
    renamed = WorkerDouble(job.client, 77)
    renamed.secret = job.first.secret
    with pytest.raises(AccessDenied):
        renamed.register()
    # Another process is another worker, also with this one's incarnation.
    assert job.join(job.first.incarnation, secret=b"y" * 32).name == "worker-1"


def test_a_process_stays_barred_when_the_coordinator_is_started_again(tmp_path: Path) -> None:
    run = make_run(tmp_path, SHARDS, train_records=16)
    with serving(run) as served, CoordinatorClient(served.address) as client:
        first = Job(served, client).first
        client.revoke_worker(first.name, 0, "", bar=True)
    assert first.secret not in (tmp_path / "ledger.sqlite").read_bytes()
    with serving(run) as served, CoordinatorClient(served.address) as client:
        again = WorkerDouble(client, first.incarnation)
        again.secret = first.secret
        with pytest.raises(AccessDenied, match=f"was {first.name}, which was revoked"):
            again.register()
        assert WorkerDouble(client, 5).register() == "worker-1"


def test_a_process_that_is_not_barred_comes_back_under_another_name(job: Job) -> None:
    name, session = job.first.name, job.first.session
    job.client.revoke_worker(name, 0, "", bar=False)
    job.client.revoke_worker(name, 0, "", bar=False)
    assert job.first.register() != name
    assert job.first.session != session


def test_a_session_ends_with_its_certificate(job: Job) -> None:
    worker = job.served.job_run.members.workers[job.first.name]
    worker.serial = "5e1"
    other = job.join(5)
    job.served.do(job.served.engine.sessions.certificates_revoked, ["5e1", "5e2"])
    assert (job.state(job.first), job.state(other)) == ("left", "active")


def test_one_that_has_another_incarnation_than_was_meant_stays(job: Job) -> None:
    job.client.revoke_worker(job.first.name, job.first.incarnation + 1, "", bar=True)
    assert job.state(job.first) == "active"
    job.client.revoke_worker(job.first.name, job.first.incarnation, "", bar=False)
    assert job.state(job.first) == "left"


def test_a_worker_that_is_not_there_is_named(job: Job) -> None:
    with pytest.raises(InvalidArgument, match="there is no worker 'worker-9'"):
        job.client.revoke_worker("worker-9", 0, "", bar=True)
