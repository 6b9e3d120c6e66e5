"""Content of a job's status and summary."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from coordinator.client.client import CoordinatorClient
from coordinator.core.figures import Position
from coordinator.core.run import Followed
from coordinator.core.work import Report
from coordinator.display.status_page import render_page, status_as_json
from coordinator.doctor.checks import _routes
from coordinator.process.result import as_status
from coordinator.process.summary import summarize
from coordinator.rpc.messages import read_position
from coordinator.rpc.status import EVALUATIONS, write_status
from coordinator.schedule.guard import WARNED_STEPS
from psrpc.core.errors import ShardUnreachable
from psrpc.core.policy import Policy
from psrpc.v1 import coordinator_pb2 as pb
from psrpc.v1 import types_pb2 as types
from tests.coordinator import whole_coordinator
from tests.coordinator.builders import make_run, serving
from tests.coordinator.fakes import report
from tests.coordinator.fixtures import Job, training


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    with training(make_run(tmp_path, shards=2, train_records=4000, staleness_lr="inverse")) as job:
        yield job


def test_staleness_is_counted_over_shards_and_per_worker(job: Job) -> None:
    one, two = (worker.name for worker in job.workers[:2])
    assert list(job.status.staleness_counts) == []
    job.shards[0].heartbeat(
        staleness_counts=[3, 2],
        workers=[
            types.WorkerStaleness(worker=one, counts=[3]),
            types.WorkerStaleness(worker=two, counts=[0, 2]),
        ],
        too_stale=2,
        uncompensated=1,
        apply_s=0.5,
    )
    job.shards[1].heartbeat(
        staleness_counts=[0, 4, 1], workers=[types.WorkerStaleness(worker=two, counts=[0, 4, 1])]
    )
    status = job.status
    assert list(status.staleness_counts) == [3, 6, 1]
    assert [list(worker.staleness_counts) for worker in status.workers] == [[3], [0, 6, 1], []]
    shard = status.shards[0]
    assert list(shard.staleness_counts) == [3, 2]
    assert (shard.too_stale, shard.uncompensated, shard.apply_s) == (2, 1, 0.5)
    # The counts of a process that was restarted begin anew, and so does the sum.
    job.shards[0].heartbeat(staleness_counts=[1])
    assert list(job.status.staleness_counts) == [1, 4, 1]


def test_the_load_of_a_shard_is_that_of_its_last_second(job: Job) -> None:
    one = job.shards[0]
    one.version = 4
    one.heartbeat(gradient_nbytes=100, memory_nbytes=5000)
    job.clock.advance(2.0)
    one.version = 10
    one.heartbeat(gradient_nbytes=500, memory_nbytes=7000, table_rows=12, table_nbytes=900)
    shard = job.status.shards[0]
    assert (shard.gradient_nbytes, shard.memory_nbytes) == (500, 7000)
    assert (shard.table_rows, shard.table_nbytes) == (12, 900)
    assert (shard.updates_per_s, shard.gradient_nbytes_per_s) == (3.0, 200.0)
    assert shard.incarnation == one.incarnation
    # Of a process that was restarted nothing is known yet, and of a silent one nothing any more.
    one.heartbeat(gradient_nbytes=1)
    assert job.status.shards[0].gradient_nbytes_per_s == 0.0
    job.clock.advance(20.0)
    assert job.status.shards[0].updates_per_s == 0.0


def test_the_load_of_a_shard_does_not_jump_with_its_signs_of_life(job: Job) -> None:
    one = job.shards[0]
    one.version = 5
    one.heartbeat()
    # Some come together, and the figures of some are a little older than their arrival.
    for seconds, updates in [(1.0, 25), (0.9, 2), (0.1, 23), (1.0, 50), (2.0, 50)] * 20:
        job.clock.advance(seconds)
        one.version += updates
        one.heartbeat(gradient_nbytes=one.version * 100)
        seen = job.status.shards[0]
    assert seen.updates_per_s == pytest.approx(30.0, rel=0.1)
    assert seen.gradient_nbytes_per_s == pytest.approx(3000.0, rel=0.1)
    job.clock.advance(0.1)
    one.heartbeat(gradient_nbytes=one.version * 100)
    assert job.status.shards[0].updates_per_s == pytest.approx(30.0, rel=0.1)
    # The growth of a process that counts anew is not known.
    job.clock.advance(1.0)
    one.version += 10_000
    one.heartbeat(gradient_nbytes=0)
    assert job.status.shards[0].updates_per_s == 0.0


def test_version_skew_is_of_one_moment(job: Job) -> None:
    one, two = job.shards
    for seconds, shard, version in (
        (0.0, one, 100),
        (0.5, two, 140),
        (0.5, one, 200),
        (0.5, two, 246),
        (0.2, one, 210),
    ):
        job.clock.advance(seconds)
        shard.version = version
        shard.heartbeat()
        skew = job.status.version_skew
        # Nothing is known before all have told twice.
        assert skew == 0 or version in (246, 210)
        if version == 246:
            # A second after the first word, shard 1 was half the way from 140 to 246.
            assert skew == 200 - 193
    # Now it is 1.5 s, and shard 0 was at 200 + 10 * 0.5 / 0.7 then.
    assert skew == 246 - 207


def test_times_are_passed_on_and_nonsense_is_none(job: Job) -> None:
    job.beat(job.workers[1], data=1.0, compute=2.0, barrier=3.0, network=4.0, apply=5.0)
    assert job.status.workers[1].times == pb.WorkerTimes(
        data=1.0, compute=2.0, barrier=3.0, network=4.0, apply=5.0
    )
    job.beat(job.workers[1], data=float("nan"), compute=-1.0, network=float("inf"))
    assert job.status.workers[1].times == pb.WorkerTimes()


def test_a_worker_tells_which_shards_it_cannot_reach_and_how_far_it_has_come(job: Job) -> None:
    worker = job.workers[1]

    def beat(**said: Any) -> None:
        job.client.heartbeat_worker(
            pb.HeartbeatWorkerRequest(session=worker.session, generation=1, **said)
        )

    # Nothing but shards of the job, and no time that is none.
    told = [pb.UnreachableShard(shard=1, for_s=float("nan")), pb.UnreachableShard(shard=2)]
    beat(unreachable=told)
    status = job.status
    assert [one.shard for one in status.workers[1].unreachable] == [1]
    [line] = status.stuck
    assert line.startswith(f"{worker.name} on here cannot reach shard 1 at")
    assert line in render_page(status)
    step = _routes(status)
    assert isinstance(step.error, ShardUnreachable)
    assert (step.error.code, str(step.error)) == ("PS214", line)
    beat()
    assert not job.status.stuck
    computing = pb.WorkerPosition(
        phase=pb.WorkerPosition.PHASE_COMPUTING, position=3, median_step_s=1.5
    )
    assert read_position(computing) == Position("computing", 3, 1.5)
    assert read_position(pb.WorkerPosition(phase=99, median_step_s=-1.0)) == Position()  # type: ignore[arg-type]


def test_a_straggler_is_named_with_its_ratio_to_the_median(job: Job) -> None:
    for turn in range(1, 6):
        job.clock.advance(2.0)
        for worker, seconds in zip(job.workers, (0.1, 0.1, 0.49), strict=True):
            job.train(worker, compute_s=seconds * turn, batches=1)
    status = job.status
    assert [worker.slowness for worker in status.workers] == [
        pytest.approx(1.0),
        pytest.approx(1.0),
        pytest.approx(4.9),
    ]
    assert list(status.stragglers) == [
        f"{job.workers[2].name} takes 4.9 times as long per example as the median"
    ]
    assert status.workers[2].examples_per_s == pytest.approx(2.0, rel=0.3)
    # Lost workers are not compared.
    job.workers[2].leave()
    assert list(job.status.stragglers) == []


def test_policies_are_listed_from_the_first_on(tmp_path: Path) -> None:
    run = make_run(tmp_path, shards=2, mode="sync", replicas=3)
    second = Followed(2, Policy(mode="ssp", staleness=4), step=7, batches=21)
    with (
        serving(replace(run, policies=(second,))) as served,
        CoordinatorClient(served.address) as client,
    ):
        status = client.get_job_status()
    assert (status.policy, status.settings, status.mode) == (2, "ssp staleness=4", "ssp")
    assert list(status.policies) == [
        pb.PolicyChange(policy=1, settings="sync replicas=3", global_step=0),
        pb.PolicyChange(policy=2, settings="ssp staleness=4", global_step=7),
    ]


def test_a_status_has_room_for_any_number_of_epochs(tmp_path: Path) -> None:
    coordinator, _ = whole_coordinator.start(tmp_path, shards=1)
    coordinator.job_run.training.notes.results = [
        (f"epoch-{epoch}", epoch, {"loss": 1.0}) for epoch in range(EVALUATIONS + 7)
    ]
    found = write_status(coordinator.job_run).evaluations
    assert [(each.evaluation, each.global_step) for each in found] == [
        (f"epoch-{epoch}", epoch) for epoch in range(7, EVALUATIONS + 7)
    ]


def test_the_status_warns_before_the_guard_stops_the_job(tmp_path: Path) -> None:
    coordinator, worker = whole_coordinator.start(tmp_path, shards=1, train_records=4000)
    job_run = coordinator.job_run
    batches = worker.batches()
    for step in range(20 + 150):
        done = [Report(a.batch, a.number, 1.0 if step < 20 else 20.0, staleness=1) for a in batches]
        assert len(done) == 1
        assert write_status(job_run).warnings[:] == [] or step > WARNED_STEPS
        batches = worker.batches(done)
    [warning] = write_status(job_run).warnings
    assert warning.startswith("training may be diverging: the loss is ")
    assert "coordinator set mode=sync replicas=N" in warning
    assert job_run.phase == "training"


def test_the_summary_has_all_that_the_status_has(job: Job) -> None:
    job.workers[1].lease()
    job.train(job.workers[0], compute_s=0.5, batches=2)
    job.clock.advance(2.0)
    job.train(job.workers[0], compute_s=1.0, batches=2)
    for version, shard in enumerate(job.shards):
        shard.version = 3 * version
        shard.heartbeat()
        shard.heartbeat(
            staleness_counts=[0, 4],
            workers=[types.WorkerStaleness(worker=job.workers[0].name, counts=[0, 4])],
            uncompensated=1,
            apply_s=0.25,
        )
    job.served.do(job.served.job_run.tick)
    summary = json.loads(json.dumps(job.served.do(summarize, job.served.job_run)))
    policy = {
        "policy": 1,
        "settings": {"mode": "async", "staleness_lr": "inverse"},
        "words": "async staleness_lr=inverse",
        "global_step": 0,
    }
    assert (summary["policy"], summary["policies"]) == (policy, [policy])
    assert summary["staleness_counts"] == [0, 8]
    assert summary["version_skew_max"] == 3
    counts = ("too_stale", "speculative", "superseded", "late", "overdue", "uncompensated")
    assert [summary[name] for name in counts] == [0, 0, 0, 0, 0, 2]
    assert summary["by_shard"][1] == {
        "shard": 1,
        "staleness_counts": [0, 4],
        "too_stale": 0,
        "uncompensated": 1,
        "apply_s": 0.25,
    }
    assert list(summary["by_worker"]) == [worker.name for worker in job.workers]
    mine = summary["by_worker"][job.workers[0].name]
    assert (mine["batches"], mine["examples"], mine["examples_per_s"]) == (4, 16, 8.0)
    assert mine["staleness_counts"] == [0, 8]
    assert mine["times_s"]["compute"] == 1.0
    assert (summary["workers"], summary["growing_tables"]) == (1, [])


@pytest.mark.parametrize("exact", [True, False])
def test_rounds_with_sums_are_told_where_there_may_be_some(tmp_path: Path, exact: bool) -> None:
    sync: dict[str, Any] = {"mode": "sync", "replicas": 4, "exact": exact}
    with training(make_run(tmp_path, shards=2, train_records=80, **sync)) as job:
        job.served.job_run.training.tally.summed = 3
        page = render_page(job.status).splitlines()
        assert ("exact=False: sums in 3 of 0 rounds" in page) is not exact
        document, summary = status_as_json(job.status), job.served.do(summarize, job.served.job_run)
    assert document["summed"] == summary.get("summed") == (None if exact else 3)
    assert as_status(summary, tmp_path).HasField("summed") is not exact


def test_epochs_count_from_1_in_status_and_summary(tmp_path: Path) -> None:
    """After two of two epochs it is epoch 2, as in progress lines and names of evaluations."""
    with training(make_run(tmp_path, shards=2, train_records=20, batch_size=10, epochs=2)) as job:
        worker, seen = job.workers[1], []
        lease = worker.lease()
        for _ in range(4):
            seen.append(job.status.epoch)
            lease = worker.lease([report(lease.train.batches[0])])
        assert seen == [1, 1, 2, 2]
        assert job.status.epoch == 2
        assert job.served.do(summarize, job.served.job_run)["epoch"] == 2
    (tmp_path / "again").mkdir()
    served = make_run(tmp_path / "again", shards=2)
    with serving(served) as waiting, CoordinatorClient(waiting.address) as client:
        assert client.get_job_status().epoch == 0
