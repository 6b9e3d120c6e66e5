"""A member that means harm can do what its role may, and no more.

A worker pushes gradients for what is leased to it. Every job ends with each batch counted once, and
attacks leave a line in a log or in the status. The attackers hold nothing but the files of a role.
What remains possible is shown, too, by tests whose names say ``can``.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from coordinator.client.client import CoordinatorClient
from psrpc import SOFTWARE
from psrpc.core.encoding import plain
from psrpc.core.errors import (
    AccessDenied,
    AlreadyExists,
    InvalidArgument,
    StaleGeneration,
)
from psrpc.security.credentials import PLAINTEXT, Security
from psrpc.security.identity import PERMISSIONS, Role
from psrpc.security.signatures import grant_of, receipt_of
from psrpc.v1 import coordinator_pb2 as pb
from psrpc.v1 import types_pb2 as types
from psrpc.wire.commands import from_batch
from tests.chaos.witness import WITNESS
from tests.coordinator.builders import SHA, make_run, serving
from tests.security.conftest import JOB
from tests.security.forgery import forge
from tests.security.insider import (
    SYNC,
    Cluster,
    Insider,
    cluster,
    mean_states,
    refusal,
)
from tests.security.rpcs import COORDINATOR, SHARD
from tests.security.targets import Target

pytestmark = pytest.mark.slow


def assert_denied(call: Callable[[], object], code: str) -> None:
    """The call is refused as one that its caller may not make."""
    error = refusal(call)
    assert isinstance(error, AccessDenied), error
    assert error.code == code, error


def decision_of(job: Cluster, number: int, attempts: list[types.Attempt]) -> types.Decision:
    """A round as the coordinator might decide it, with the order to write a snapshot."""
    order = types.SnapshotOrder(
        name="step-00000099", write=True, keep=True, directory="checkpoints/mine", global_step=99
    )
    return types.Decision(
        generation=job.run_now.generation, round=number, attempts=attempts, snapshots=[order]
    )


# -- rounds ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("signature", ["none", "random", "of a session"])
def test_a_made_up_decision_moves_no_round_and_writes_no_file(
    certs: Path, tmp_path: Path, signature: str
) -> None:
    with cluster(certs, tmp_path, SYNC) as job:
        job.train_to(8)
        with Insider(job).join() as insider:
            before = insider.versions()
            files = sorted(tmp_path.rglob("*"))
            made = decision_of(job, before[0], []).SerializeToString()
            signed = types.SignedDecision(decision=made, signature=bytes(64))
            if signature == "none":
                signed.signature = b""
            elif signature == "of a session":
                signed.decision, signed.signature = insider.session[64:], insider.session[:64]
            for shard in range(2):
                assert_denied(partial(insider.pull, before[shard] + 1, shard, signed), "PS306")
            assert insider.versions() == before
            assert sorted(tmp_path.rglob("*")) == files
            insider.leave()
        assert job.told("was not signed by this job's coordinator")
        job.finish()


def test_a_round_commits_nothing_that_was_not_pushed(certs: Path, tmp_path: Path) -> None:
    with cluster(certs, tmp_path, SYNC) as job, Insider(job) as insider:
        job.train_to(8)
        insider.join()
        attempt = insider.lease().round.attempt
        commit = pb.CommitBatchRequest(
            session=insider.session,
            generation=insider.generation,
            policy=insider.policy,
            round=insider.versions()[0],
            report=insider.report(attempt, [bytes(16), bytes(16)]),
        )
        assert_denied(lambda: insider.client.commit_batch(commit), "PS308")
        assert job.told(f"{insider.name} reports attempt {attempt.attempt}")
        assert isinstance(refusal(insider.lease), StaleGeneration)
        job.finish()


# -- pushes ---------------------------------------------------------------------------------------


def test_batches_of_others_cannot_be_skipped(certs: Path, tmp_path: Path) -> None:
    """Those that are leased to another, and those that are leased to no worker."""
    with cluster(certs, tmp_path) as job:
        job.train_to(8)
        with Insider(job).join() as insider:
            own = insider.lease().train.batches[0]
            grants = [b"", bytes(16), own.grant]
            for number in range(32):
                batch = types.BatchId(epoch=0, first=4 * number, count=4)
                if batch == own.batch:
                    continue
                for grant in grants:
                    for attempt in (number + 1, own.attempt):
                        other = types.Attempt(batch=batch, attempt=attempt, grant=grant)
                        assert_denied(partial(insider.push, other, skipped=True), "PS305")
            assert job.told(f"{insider.name} sends attempt")
            insider.leave()
        status = job.finish()
        assert status.refused > 0


def test_another_worker_cannot_be_impersonated(certs: Path, tmp_path: Path, mine: Path) -> None:
    """Not by its name in a made-up session, by its grant, or by its session over a connection with
    another certificate."""
    for path, pem in zip(
        ("worker.key", "worker.crt"), forge(certs, f"pserver://{JOB}/worker"), strict=True
    ):
        (mine / path).write_bytes(pem)
    with (
        cluster(certs, tmp_path) as job,
        Insider(job) as victim,
        Insider(job) as insider,
        Insider(job, certs=mine) as elsewhere,
    ):
        job.train_to(8)
        attempt = victim.join().lease().train.batches[0]
        insider.join()
        body = types.Session(worker=victim.name, certificate="worker", nonce=bytes(16))
        for token in (
            b"",
            bytes(64) + body.SerializeToString(),
            insider.session[:64] + victim.session[64:],
            insider.session[:64] + body.SerializeToString(),
        ):
            fence = insider.fence(session=token)
            assert_denied(partial(insider.push, attempt, skipped=True, fence=fence), "PS309")
        assert_denied(lambda: insider.push(attempt, skipped=True), "PS305")
        elsewhere.session = victim.session
        elsewhere.see_shards(b"")
        error = refusal(lambda: elsewhere.push(attempt, skipped=True))
        assert isinstance(error, StaleGeneration)
        assert "calls with 'forged'" in str(error)
        assert job.told("the session is not one that this job's coordinator opened")
        victim.leave()
        insider.leave()
        job.finish()


def test_a_grant_is_good_for_one_gradient(certs: Path, tmp_path: Path) -> None:
    """Its owner cannot take back, replace or repeat what it has pushed."""
    with cluster(certs, tmp_path) as job, Insider(job) as insider:
        job.train_to(8)
        attempt = insider.join().lease().train.batches[0]
        results = [insider.push(attempt, shard) for shard in range(2)]
        assert [r.outcome for r in results] == ["applied"] * 2
        for shard in range(2):
            again = insider.push(attempt, shard, skipped=True)
            assert (again.outcome, again.skipped) == ("already_applied", False)
            assert insider.push(attempt, shard).outcome == "already_applied"
        insider.lease((insider.report(attempt, [r.receipt for r in results]),))
        insider.leave()
        status = job.finish()
        assert {w.worker: w.batches for w in status.workers}[insider.name] == 1


def test_a_grant_ends_with_its_session_and_its_generation(certs: Path, tmp_path: Path) -> None:
    with cluster(certs, tmp_path) as job, Insider(job) as insider:
        job.train_to(8)
        attempt = insider.join().lease().train.batches[0]
        insider.leave()
        # Shards hear of it on their command streams.
        job.served.wait_until(lambda: not job.served.job_run.departures.waiting_for())
        assert isinstance(refusal(lambda: insider.push(attempt)), StaleGeneration)
        job.replace_shard(1)
        old, old_session = insider.generation, insider.session
        insider.join()
        assert insider.generation > old
        assert_denied(lambda: insider.push(attempt), "PS305")
        fence = insider.fence(session=old_session)
        assert_denied(lambda: insider.push(attempt, fence=fence), "PS305")
        fence = insider.fence(generation=old)
        assert isinstance(refusal(lambda: insider.push(attempt, fence=fence)), StaleGeneration)
        insider.leave()
        job.finish()


# -- initialization -------------------------------------------------------------------------------


def test_only_the_worker_that_was_told_so_initializes_shards(certs: Path, tmp_path: Path) -> None:
    with cluster(certs, tmp_path) as job, Insider(job) as first, Insider(job) as insider:
        told = first.join().lease()
        assert told.HasField("initialize")
        insider.join()
        poison = {
            arena.name: np.full(arena.length, 7, arena.dtype) for arena in insider.plan.arenas
        }
        for grant in (b"", bytes(16), told.initialize.grant):
            for shard in range(2):
                fence = insider.fence(shard)
                initialize = insider.shards[shard].initialize
                assert_denied(partial(initialize, fence, poison, grant), "PS305")
        insider.client.report_work(
            pb.ReportWorkRequest(
                session=insider.session,
                generation=insider.generation,
                initialized=pb.InitializeDone(),
            )
        )
        assert job.status().phase == "initializing"
        assert job.told(f"{insider.name} sends first values")
        insider.leave()
        first.leave()
        job.start_worker()
        job.finish()


# -- reports --------------------------------------------------------------------------------------


@pytest.mark.parametrize("by", ["lease", "heartbeat"])
@pytest.mark.parametrize("proof", ["none", "made up", "of one shard"])
def test_a_worker_that_reports_what_it_did_not_push_is_named_and_dismissed(
    certs: Path, tmp_path: Path, by: str, proof: str
) -> None:
    with cluster(certs, tmp_path) as job, Insider(job) as insider:
        job.train_to(8)
        attempt = insider.join().lease().train.batches[0]
        receipts = [] if proof == "none" else [bytes(16)] * 2
        if proof == "of one shard":
            receipts = [insider.push(attempt, 0).receipt] * 2
        report = insider.report(attempt, receipts)
        if by == "lease":
            assert_denied(lambda: insider.lease((report,)), "PS308")
        else:
            beat = pb.HeartbeatWorkerRequest(
                session=insider.session, generation=insider.generation, done=[report]
            )
            assert_denied(lambda: insider.client.heartbeat_worker(beat), "PS308")
        states = {worker.worker: worker.state for worker in job.status().workers}
        assert states[insider.name] == "left"
        assert any(
            f"{insider.name} reports attempt {attempt.attempt}" in warning
            for warning in job.status().warnings
        )
        assert isinstance(refusal(insider.lease), StaleGeneration)
        assert_denied(insider.register, "PS307")
        job.finish()


def test_reports_of_what_another_worker_pushed_do_not_count(certs: Path, tmp_path: Path) -> None:
    """Receipts are for the worker that pushed; so an insider that sees them has no use for them."""
    with cluster(certs, tmp_path) as job, Insider(job) as victim, Insider(job) as insider:
        job.train_to(8)
        attempt = victim.join().lease().train.batches[0]
        receipts = [victim.push(attempt, shard).receipt for shard in range(2)]
        insider.join()
        assert_denied(lambda: insider.lease((insider.report(attempt, receipts),)), "PS308")
        victim.lease((victim.report(attempt, receipts),))
        victim.leave()
        status = job.finish()
        assert {w.worker: w.batches for w in status.workers}[victim.name] == 1


@pytest.mark.parametrize("lie", ["too stale", "skipped"])
def test_a_report_does_not_undo_what_was_pushed(certs: Path, tmp_path: Path, lie: str) -> None:
    """Shards remember the batch, and receipts say how it came."""
    with cluster(certs, tmp_path) as job, Insider(job) as insider:
        job.train_to(8)
        attempt = insider.join().lease().train.batches[0]
        receipts = [insider.push(attempt, shard).receipt for shard in range(2)]
        report = insider.report(attempt, receipts)
        report.too_stale, report.skipped = lie == "too stale", lie == "skipped"
        insider.lease((report,))
        insider.leave()
        job.finish()


def test_results_of_an_evaluation_count_for_its_holder_alone(certs: Path, tmp_path: Path) -> None:
    with cluster(certs, tmp_path, eval_records=8) as job, Insider(job) as insider:
        job.gate.evaluations = True
        job.gate.opened.set()
        job.start_worker()
        assert job.gate.evaluating.wait(30)
        insider.join()
        evaluation = job.served.job_run.training.orders.evaluations.waiting_for()
        name = evaluation.partition(" to do evaluation ")[2].partition(" ")[0]
        work = pb.EvaluateDone(evaluation=name, task=0, records=8, states=mean_states(8e9, 8))
        request = pb.ReportWorkRequest(
            session=insider.session, generation=insider.generation, evaluated=work
        )
        insider.client.report_work(request)
        merged = pb.ReportWorkRequest(
            session=insider.session,
            generation=insider.generation,
            merged=pb.MergeDone(evaluation=name, results={"loss": 1e9}),
        )
        assert isinstance(refusal(lambda: insider.client.report_work(merged)), InvalidArgument)
        assert any(
            (entry["event"], entry.get("worker")) == ("not counted", insider.name)
            for entry in job.logs
        )
        insider.leave()
        job.gate.evaluate.set()
        status = job.finish()
        assert [e.results["loss"] for e in status.evaluations if e.evaluation == name] == [1.0]


# -- membership -----------------------------------------------------------------------------------


def test_another_worker_cannot_be_sent_away(certs: Path, tmp_path: Path) -> None:
    with cluster(certs, tmp_path) as job, Insider(job) as insider:
        job.train_to(8)
        insider.join()
        victim = job.status().workers[0]
        body = types.Session(worker=victim.worker, certificate="worker", nonce=bytes(16))
        for token in (b"", victim.worker.encode(), bytes(64) + body.SerializeToString()):
            leave = pb.LeaveWorkerRequest(session=token, reason="gone", fatal=True)
            insider.client.leave_worker(leave)
        taken = insider.register(incarnation=victim.incarnation, secret=bytes(32))
        assert taken.worker not in (victim.worker, insider.name)
        states = {worker.worker: worker.state for worker in job.status().workers}
        assert states[victim.worker] == "active"
        assert job.status().phase == "training"
        insider.leave()
        insider.client.leave_worker(pb.LeaveWorkerRequest(session=taken.session))
        job.finish()


def test_an_operator_ends_a_session(certs: Path, tmp_path: Path) -> None:
    """Of a worker that holds batches and does nothing: others get them."""
    with cluster(certs, tmp_path) as job, Insider(job) as insider:
        job.train_to(8)
        attempt = insider.join().lease().train.batches[0]
        with Insider(job, Role.OPERATOR) as operator:
            operator.client.revoke_worker(insider.name, 0, "it dawdles", bar=True)
        job.served.wait_until(lambda: not job.served.job_run.departures.waiting_for())
        assert isinstance(refusal(lambda: insider.push(attempt)), StaleGeneration)
        assert isinstance(refusal(insider.lease), StaleGeneration)
        assert_denied(insider.register, "PS307")
        # Another process of the same certificate: only revoking that keeps it out.
        assert insider.register(secret=bytes(32)).worker
        assert job.told("it dawdles")
        job.finish()


# -- other roles ----------------------------------------------------------------------------------


@pytest.mark.parametrize("role", [Role.WORKER, Role.READER, Role.SHARD, Role.OPERATOR])
def test_a_role_calls_what_is_its_own_alone(certs: Path, tmp_path: Path, role: Role) -> None:
    """All other calls are refused before they are read."""
    pair = (certs / f"{role}.key").read_bytes(), (certs / f"{role}.crt").read_bytes()
    with cluster(certs, tmp_path) as job:
        job.train_to(8)
        shard = job.served.job_run.members.places.shards[0].address
        for address, server, rpcs in (
            (job.served.address, Role.COORDINATOR, COORDINATOR),
            (shard, Role.SHARD, SHARD),
        ):
            target = Target(address, server, rpcs, lambda: "")
            with target.channel((certs / "ca.crt").read_bytes(), pair) as channel:
                for rpc in rpcs:
                    if role in PERMISSIONS[rpc.name]:
                        continue
                    answer = rpc.call(channel)
                    assert (answer.code.name, answer.told) == ("PERMISSION_DENIED", True), rpc
                    assert job.told(f"{role.one} may not call {rpc}")
        job.finish()


def test_a_shard_cannot_take_a_place_that_is_taken(certs: Path, tmp_path: Path) -> None:
    with cluster(certs, tmp_path) as job, Insider(job, Role.SHARD) as insider:
        job.train_to(8)
        request = pb.RegisterShardRequest(
            shard=1, incarnation=insider.incarnation, address="127.0.0.1:1", software=SOFTWARE
        )
        assert isinstance(refusal(lambda: insider.client.register_shard(request)), AlreadyExists)
        watch = pb.WatchRequest(shard=1, incarnation=insider.incarnation)
        assert isinstance(refusal(lambda: next(iter(insider.client.watch(watch)))), StaleGeneration)
        job.finish()


def test_a_shard_can_vouch_for_others_but_opens_no_session_and_decides_nothing(
    certs: Path, tmp_path: Path
) -> None:
    """One process with a shard's files takes the place of one that has ended. It learns the key of
    grants and receipts, and tells a worker."""
    with cluster(certs, tmp_path) as job, Insider(job, Role.SHARD) as shard:
        job.train_to(8)
        key = job.take_place(1, shard)
        with Insider(job).join() as insider:
            body = types.Session(worker="worker-0", certificate="worker", nonce=bytes(16))
            token = key * 2 + body.SerializeToString()
            attempt = insider.lease().train.batches[0]
            fence = insider.fence(session=token)
            assert_denied(lambda: insider.push(attempt, skipped=True, fence=fence), "PS309")
            signed = types.SignedDecision(decision=b"", signature=key * 2)
            assert_denied(lambda: insider.pull(None, decision=signed), "PS306")
            other = types.Attempt(batch=types.BatchId(epoch=0, first=124, count=4), attempt=999)
            of = (key, insider.name, insider.generation, from_batch(other.batch), other.attempt)
            assert insider.push(other, grant=grant_of(*of)).outcome == "applied"
            of = (key, insider.name, insider.generation, from_batch(attempt.batch), attempt.attempt)
            receipts = [receipt_of(*of, index, False) for index in range(2)]
            insider.lease((insider.report(attempt, receipts),))
            batches = {w.worker: w.batches for w in job.status().workers}
            assert batches[insider.name] == 1


# -- what remains ---------------------------------------------------------------------------------


def test_a_worker_can_skip_what_is_leased_to_it_and_that_shows(certs: Path, tmp_path: Path) -> None:
    """It reports a gradient; what shards vouch for counts."""
    with cluster(certs, tmp_path) as job, Insider(job) as insider:
        job.train_to(8)
        attempt = insider.join().lease().train.batches[0]
        receipts = [insider.push(attempt, shard, skipped=True).receipt for shard in range(2)]
        insider.lease((insider.report(attempt, receipts),))
        insider.leave()
        job.finish(poisoned=job.options.number(from_batch(attempt.batch)))


def test_a_worker_can_skip_on_one_shard_alone_and_that_shows(certs: Path, tmp_path: Path) -> None:
    """The other one has its gradient; the batch counts as skipped, and once."""
    with cluster(certs, tmp_path) as job, Insider(job) as insider:
        job.train_to(8)
        attempt = insider.join().lease().train.batches[0]
        receipts = [insider.push(attempt, shard, skipped=shard == 1).receipt for shard in range(2)]
        insider.lease((insider.report(attempt, receipts),))
        insider.leave()
        status = job.wait_for_the_end()
        assert (status.phase, status.batches, status.skipped) == ("done", 32, 1)


def test_a_worker_can_poison_with_finite_gradients_for_its_own_leases(
    certs: Path, tmp_path: Path
) -> None:
    with cluster(certs, tmp_path) as job, Insider(job) as insider:
        job.train_to(8)
        attempt = insider.join().lease().train.batches[0]
        insider.gradient_of = lambda array: plain(np.full_like(array, -1e30))
        assert insider.push(attempt).outcome == "applied"
        assert insider.pull(None)[WITNESS].max() > 1e29


def test_a_worker_can_read_all_parameters_and_fail_the_job(certs: Path, tmp_path: Path) -> None:
    with cluster(certs, tmp_path) as job, Insider(job) as insider:
        job.train_to(8)
        insider.join()
        assert insider.pull(None)[WITNESS][:8].tolist() == [1.0] * 8
        insider.client.leave_worker(
            pb.LeaveWorkerRequest(session=insider.session, reason="my data is bad", fatal=True)
        )
        status = job.status()
        assert (status.phase, status.reason) == ("failed", "my data is bad")


@pytest.mark.parametrize("by", ["plaintext", "token"])
def test_members_that_show_no_certificate_can_do_what_every_role_may(
    certs: Path, tmp_path: Path, by: str
) -> None:
    """A worker's session still takes its token, but any caller may end it."""
    server = client = PLAINTEXT
    if by == "token":
        token = tmp_path / "token-file"
        token.touch(0o600)
        token.write_text("0123456789abcdef" * 4)
        server = Security.from_options(Role.COORDINATOR, certs, token)
        client = Security.from_options(Role.WORKER, certs, token)
    run = make_run(tmp_path)
    with serving(run, security=server) as served, CoordinatorClient(served.address, client) as any_:
        request = pb.RegisterWorkerRequest(
            incarnation=1, job_sha256=SHA, software=SOFTWARE, secret=bytes(32)
        )
        worker = any_.register_worker(request).worker
        any_.revoke_worker(worker, 0, "not by an operator", bar=False)
        states = {w.name: w.state for w in served.job_run.members.workers.values()}
        assert states[worker] == "left"
