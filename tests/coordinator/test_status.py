"""What a person sees of a job: its status, its page and its summary."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from coordinator.cli import main
from coordinator.client import CoordinatorClient
from coordinator.guard import WARNED_STEPS
from coordinator.result import as_status
from coordinator.run import Followed, Run
from coordinator.status import EVALUATIONS, write_status
from coordinator.status_cli import watch
from coordinator.status_page import as_json, histogram, render_page
from coordinator.summary import summarize, write_summary
from coordinator.surroundings import Surroundings
from coordinator.work import Report
from psrpc.clock import ManualClock
from psrpc.policy import Policy
from psrpc.v1 import coordinator_pb2 as pb
from psrpc.v1 import types_pb2 as types
from psrpc.version import SOFTWARE
from tests.coordinator import bench
from tests.coordinator.doubles import ShardDouble, WorkerDouble, report
from tests.coordinator.parts import Served, make_run, serving


@dataclass
class Job:
    """A job in training, with two shards and three workers."""

    served: Served
    client: CoordinatorClient
    clock: ManualClock
    shards: list[ShardDouble]
    workers: list[WorkerDouble]

    @property
    def status(self) -> pb.GetJobStatusResponse:
        return self.client.get_job_status()

    def train(self, worker: WorkerDouble, compute_s: float, batches: int) -> None:
        """Does so many batches, and says that it has computed for so long by then."""
        for _ in range(batches):
            lease = worker.lease()
            [attempt] = lease.train.batches
            worker.lease([report(attempt, staleness=1)])
        self.beat(worker, compute=compute_s)

    def beat(self, worker: WorkerDouble, **times: float) -> None:
        self.client.heartbeat_worker(
            pb.HeartbeatWorkerRequest(
                worker=worker.name,
                incarnation=worker.incarnation,
                generation=worker.generation,
                times=pb.WorkerTimes(**times),
            )
        )


@contextmanager
def training(run: Run) -> Iterator[Job]:
    clock = ManualClock()
    with serving(run, clock) as served, CoordinatorClient(served.address) as client:
        shards = [ShardDouble(client, index) for index in range(2)]
        streams = []
        for shard in shards:
            shard.register()
            streams.append(iter(shard.watch()))
        for shard, stream in zip(shards, streams, strict=True):
            shard.begin(stream)
        workers = [WorkerDouble(client, 1000 + n) for n in range(3)]
        for worker in workers:
            worker.register()
        workers[0].lease()
        workers[0].report_work(initialized=pb.InitializeDone())
        for shard, stream in zip(shards, streams, strict=True):
            shard.take(next(stream).snapshot)
        served.wait_until(lambda: client.get_job_status().phase == "training")
        yield Job(served, client, clock, shards, workers)


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
    one.heartbeat(gradient_nbytes=500, memory_nbytes=7000)
    shard = job.status.shards[0]
    assert (shard.gradient_nbytes, shard.memory_nbytes) == (500, 7000)
    assert (shard.updates_per_s, shard.gradient_nbytes_per_s) == (3.0, 200.0)
    assert shard.incarnation == one.incarnation
    # Of a process that was restarted nothing is known yet, and of a silent one nothing any more.
    one.heartbeat(gradient_nbytes=1)
    assert job.status.shards[0].gradient_nbytes_per_s == 0.0
    job.clock.advance(20.0)
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
    # Who is gone is compared with nobody.
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
    coordinator, _ = bench.start(tmp_path, shards=1)
    coordinator.course.training.notes.results = [
        (f"epoch-{epoch}", epoch, {"loss": 1.0}) for epoch in range(EVALUATIONS + 7)
    ]
    found = write_status(coordinator.course).evaluations
    assert [(each.evaluation, each.global_step) for each in found] == [
        (f"epoch-{epoch}", epoch) for epoch in range(7, EVALUATIONS + 7)
    ]


def test_the_status_warns_before_the_guard_stops_the_job(tmp_path: Path) -> None:
    coordinator, worker = bench.start(tmp_path, shards=1, train_records=4000)
    course = coordinator.course
    batches = worker.batches()
    for step in range(20 + 150):
        done = [Report(a.batch, a.number, loss=1.0 if step < 20 else 20.0) for a in batches]
        assert len(done) == 1
        assert write_status(course).warnings[:] == [] or step > WARNED_STEPS
        batches = worker.batches(done)
    [warning] = write_status(course).warnings
    assert warning.startswith("training may be diverging: the loss is ")
    assert "coordinator set mode=sync replicas=N" in warning
    assert course.phase == "training"


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
    job.served.do(job.served.course.tick)
    summary = json.loads(json.dumps(job.served.do(summarize, job.served.course)))
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
    assert summary["workers"] == 1


def test_the_page_of_a_job(job: Job, capsys: pytest.CaptureFixture[str]) -> None:
    job.beat(job.workers[0], compute=3.0, barrier=1.0)
    job.shards[0].heartbeat(staleness_counts=[812, 377, 9, 1], apply_s=1.5)
    assert main(["status", "--coordinator", job.served.address]) == 0
    page = capsys.readouterr().out
    assert page.splitlines()[0] == "tiny  training  async staleness_lr=inverse"
    assert "staleness 0:812 1:377 2:9 3:1  mean 0.00  version skew 0" in page
    rows = {line.split()[0]: line.split() for line in page.splitlines() if line}
    assert {"75", "25", "active"} <= set(rows[job.workers[0].name])
    assert "0:812" in rows["0"]
    assert "last checkpoint: checkpoints/step-00000000" in page


def test_all_fields_as_json_for_a_run_directory(
    job: Job, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "address").write_text(job.served.address + "\n")
    assert main(["status", "--run-dir", str(tmp_path), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert set(document) == {field.name for field in pb.GetJobStatusResponse.DESCRIPTOR.fields}
    assert document["total_steps"] == job.status.total_steps
    assert document["loss"] is None
    assert document["workers"][0]["times"]["compute"] == 0.0


def test_the_place_of_a_job(job: Job, tmp_path: Path) -> None:
    """Its coordinator's clock, version and disk, and how old the newest checkpoint is."""
    status = job.status
    assert (status.software, status.insecure) == (SOFTWARE, False)
    assert status.free_nbytes > 0
    assert Path(status.run_dir).is_dir()
    assert 0 <= status.checkpoint_age_s < 3600
    place = Surroundings(tmp_path / "gone", insecure=True)
    found = place.describe(pb.GetJobStatusResponse(newest_checkpoint="checkpoints/step-1"))
    assert (found.insecure, found.free_nbytes, found.checkpoint_age_s) == (True, -1, -1)
    assert render_page(found).splitlines()[1].startswith("INSECURE: ")


def test_what_is_awaited_and_since_when() -> None:
    status = pb.GetJobStatusResponse(waiting_for="shard 1", waited_s=75.0)
    status.newest_checkpoint, status.checkpoint_age_s = "checkpoints/step-1", 3.0
    page = render_page(status).splitlines()
    assert "waiting for shard 1 (for 1:15)" in page
    assert "last checkpoint: checkpoints/step-1, 3.0 s ago" in page


def test_a_job_is_watched_until_it_ends(job: Job, capsys: pytest.CaptureFixture[str]) -> None:
    def end(_seconds: float) -> None:
        job.workers[0].leave("labels are strings", fatal=True)

    watch(job.client, job.status, as_json=True, pause=end)
    lines = capsys.readouterr().out.splitlines()
    # The coordinator of this test logs here, too.
    said = [json.loads(line) for line in lines if line.startswith("{")]
    assert [one["phase"] for one in said] == ["training", "failed"]
    assert said[-1]["reason"] == "labels are strings"


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["--coordinator", "127.0.0.1:1"], "error PS204: no coordinator answers at 127.0.0.1:1; s"),
        (["--coordinator", "x:y"], "error PS111: address 'x:y' has port 'y'"),
        (
            ["--run-dir", "nowhere"],
            "error PS201: no coordinator runs on nowhere: there is no such directory; say another",
        ),
        (
            ["--run-dir", "/"],
            "error PS201: no coordinator runs on /: no run has begun there (it has no job.json)",
        ),
    ],
)
def test_nobody_is_there(
    arguments: list[str], error: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["status", *arguments]) == 2
    assert capsys.readouterr().err.startswith(error)


@pytest.fixture
def ended(job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """``runs/old``: a run that has ended, with the summary of a real coordinator."""
    monkeypatch.chdir(tmp_path)
    run = Path("runs/old")
    run.mkdir(parents=True)
    (run / "job.json").write_text('{"job": "tiny.py"}')
    job.served.do(lambda: job.served.course.fail("no more data"))
    job.served.do(job.served.course.training.notes.results.append, ("final", 6, {"loss": 0.5}))
    write_summary(run, job.served.do(summarize, job.served.course))
    return run


def test_a_run_that_has_ended_is_shown_as_it_ended(
    ended: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With no word on which run is meant, and where its coordinator was killed at its address."""
    for address in ("", "127.0.0.1:1\n"):
        if address:
            (ended / "address").write_text(address)
        for arguments in ([], ["--run-dir", str(ended)], ["--watch"]):
            assert main(["status", *arguments]) == 0
            first, page = capsys.readouterr().out.split("\n", 1)
            assert first == ("runs/old is not running: the run has ended (failed: no more data)")
            for figure in ("steps", "eval.loss", "0.5000", "checkpoints/step-00000000"):
                assert figure in page
    assert main(["status", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert set(document) == {field.name for field in pb.GetJobStatusResponse.DESCRIPTOR.fields}
    assert (document["phase"], document["reason"]) == ("failed", "no more data")
    assert document["newest_checkpoint"] == "checkpoints/step-00000000"
    assert document["loss"] is None
    assert document["evaluations"] == [
        {"evaluation": "final", "global_step": 6, "results": {"loss": 0.5}}
    ]


def test_a_summary_from_before_a_run_went_on_says_nothing(
    ended: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    later = (ended / "summary.json").stat().st_mtime_ns + 1
    os.utime(ended / "job.json", ns=(later, later))
    assert main(["status"]) == 2
    assert capsys.readouterr().err.startswith(
        "error PS201: no coordinator runs on runs/old: the run has not ended, but its coordinator "
    )
    (ended / "address").write_text("127.0.0.1:1\n")
    assert main(["status"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error PS204: no coordinator runs on runs/old: the run has not ended")
    assert "nothing listens at 127.0.0.1:1" in said


def test_other_commands_say_that_the_run_has_ended(
    ended: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["set", "mode=async"]) == 2
    assert capsys.readouterr().err == (
        "error PS201: no coordinator runs on runs/old: the run has ended (failed: no more data); "
        "its figures are in runs/old/summary.json\n"
    )


def test_a_status_of_what_a_summary_lacks(tmp_path: Path) -> None:
    """As of one that was written for a coordinator that died."""
    found = as_status({"job": "j", "phase": "failed", "reason": "r"}, tmp_path)
    assert (found.job, found.phase, found.reason) == ("j", "failed", "r")
    assert (found.global_step, found.total_steps, len(found.evaluations)) == (0, 0, 0)
    done = {"phase": "done", "global_step": 7, "evaluations": [], "eval": {}, "policy": None}
    assert as_status(done, tmp_path).total_steps == 7
    odd = {"evaluations": [{"evaluation": "final", "global_step": 1, "loss": None}]}
    assert math.isnan(as_status(odd, tmp_path).evaluations[0].results["loss"])


def test_what_holds_for_a_job_with_everything() -> None:
    status = pb.GetJobStatusResponse(
        job="j",
        phase="failed",
        settings="sync replicas=3",
        switching="the change to policy 2",
        policies=[pb.PolicyChange(policy=n, settings=f"p{n}", global_step=n) for n in (1, 2)],
        loss=float("inf"),
        shards=[pb.ShardStatus(state="silent", silent_s=12.0)],
        stragglers=["worker-2 is late"],
        evaluations=[pb.EvaluationResult(evaluation="final", results={"loss": float("nan")})],
        warnings=["w"],
        waiting_for="x",
        reason="r",
    )
    lines = render_page(status).splitlines()
    for line in (
        "under way: the change to policy 2",
        "policy 2 from step 2: p2",
        "straggler: worker-2 is late",
        "evaluation final at step 0: loss nan",
        "last checkpoint: none",
        "waiting for x",
        "warning: w",
        "failed: r",
    ):
        assert line in lines
    assert any("silent for 12.0 s" in line for line in lines)
    document = as_json(status)
    assert document["loss"] is None
    assert document["evaluations"][0]["results"] == {"loss": None}
    json.dumps(document, allow_nan=False)


@pytest.mark.parametrize(
    ("counts", "shown"),
    [
        ([], "-"),
        ([0, 0], "-"),
        ([812, 377, 9, 1], "0:812 1:377 2:9 3:1"),
        ([1] * 9, "0:1 1:1 2:1 3:1 4-7:4 8-15:1"),
        ([0] * 62 + [7, 8], "32-62:7 63+:8"),
    ],
)
def test_histograms_in_words(counts: list[int], shown: str) -> None:
    assert histogram(counts) == shown
