"""Output of `coordinator status`, for a run that goes on and for one that has ended."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from coordinator.cli.__main__ import main
from coordinator.cli.status import await_start, watch
from coordinator.display.status_page import render_page, status_as_json, status_histogram
from coordinator.process.result import as_status
from coordinator.process.summary import summarize, write_summary
from coordinator.records.run_directory import Starting
from coordinator.rpc.status import Surroundings
from psrpc import SOFTWARE
from psrpc.v1 import coordinator_pb2 as pb
from tests.coordinator.builders import make_run
from tests.coordinator.fixtures import Job, training


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    with training(make_run(tmp_path, shards=2, train_records=4000, staleness_lr="inverse")) as job:
        yield job


def test_watch_waits_for_a_run_that_is_being_started(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    starting, waited = Starting(tmp_path), []

    def pause(seconds: float) -> None:
        waited.append(seconds)
        if len(waited) == 3:
            starting.release()

    starting.hold()
    await_start(tmp_path, pause)
    assert len(waited) == 3
    said = f"waiting for the coordinator of {tmp_path}, which is being started\n"
    assert capsys.readouterr().err == said
    await_start(tmp_path, pause)
    assert (len(waited), capsys.readouterr().err) == (3, "")


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


def test_tensors_that_fell_back_to_calls_are_shown(job: Job) -> None:
    worker = job.workers[0]
    calls, data = pb.Transport.KIND_CALLS, pb.Transport.KIND_DATA_CONNECTION
    transports = [
        pb.Transport(shard=0, kind=calls, why="no route\x1b[2J"),
        pb.Transport(shard=1, kind=data),
        pb.Transport(shard=7, kind=calls, why="there is no such shard"),
    ]
    job.client.heartbeat_worker(
        pb.HeartbeatWorkerRequest(session=worker.session, transports=transports)
    )
    status = job.status
    told = {w.worker: [(t.shard, t.kind, t.why) for t in w.transports] for w in status.workers}
    assert told[worker.name] == [(0, calls, "no route\ufffd[2J"), (1, data, "")]
    [of_json] = [w for w in status_as_json(status)["workers"] if w["worker"] == worker.name]
    assert [each["kind"] for each in of_json["transports"]] == ["calls", "data_connection"]
    slow = [line for line in render_page(status).splitlines() if line.startswith("slow transport")]
    [line] = slow
    assert line.startswith(
        f"slow transport: tensors of {worker.name} and shard 0 go with the calls: no route"
    )
    job.beat(worker)
    assert "slow transport" not in render_page(job.status)


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


def test_a_run_that_is_restored_is_at_no_step_before_that_is_known() -> None:
    status = pb.GetJobStatusResponse(
        phase="recovering",
        total_steps=1200,
        epochs=2,
        loss=math.nan,
        newest_checkpoint="checkpoints/step-00000500",
        generation=2,
    )
    assert "\ngoing on from step-00000500 or later  0.0 batches/s" in render_page(status)
    status.restored = "step-00000400.g1"
    assert "\nrestoring from step-00000400.g1  0.0 batches/s" in render_page(status)
    status.phase, status.global_step, status.epoch = "training", 400, 1
    page = render_page(status)
    assert "\nstep 400/1200 (33 %)  epoch 1/2  " in page
    assert "  generation 2  from checkpoint step-00000400.g1 (step 400)\n" in page


def test_no_terminal_obeys_what_a_coordinator_says() -> None:
    page = render_page(pb.GetJobStatusResponse(job="a\x1b[2Jb", reason="\x1b]0;owned\x07"))
    assert page.startswith("a\ufffd[2Jb  ")
    assert "\ufffd]0;owned\ufffd" in page
    assert "\x1b" not in page


def test_waits_are_shown_with_their_duration() -> None:
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
        (
            ["--coordinator", "127.0.0.1:1"],
            "error PS204: no coordinator answers: nothing listens at 127.0.0.1:1; check the port, "
            "and that it was started there and bound to an address that this machine reaches "
            "(--bind), or choose one with --coordinator HOST:PORT or --run-dir DIR\n",
        ),
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
def test_no_coordinator_answers(
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
    job.train(job.workers[0], compute_s=1.0, batches=1)
    job.served.do(lambda: job.served.job_run.fail("no more data"))
    job.served.do(job.served.job_run.training.notes.results.append, ("final", 6, {"loss": 0.5}))
    write_summary(run, job.served.do(summarize, job.served.job_run))
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
            for figure in ("steps", "eval.loss", "0.5000", "evaluated at step", "step-00000000"):
                assert figure in page
    assert main(["status", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert set(document) == {field.name for field in pb.GetJobStatusResponse.DESCRIPTOR.fields}
    assert (document["phase"], document["reason"]) == ("failed", "no more data")
    assert document["newest_checkpoint"] == "checkpoints/step-00000000"
    assert (document["loss"], document["global_step"]) == (1.0, 1)
    assert (document["epoch"], document["epochs"]) == (1, 2)
    assert document["total_steps"] == 2000
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
        "its figures are in runs/old/summary.json, and `coordinator export` writes to files what "
        "it has trained\n"
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


def test_json_says_how_often_batches_counted_once_that_is_known(tmp_path: Path) -> None:
    counted = {
        "batches": 5,
        "counted": 4,
        "skipped": 1,
        "twice": 0,
        "missing_batches": ["epoch 0 records 10..20"],
        "skipped_batches": ["epoch 0 records 0..10"],
    }
    assert (
        status_as_json(as_status({"job": "j", "counted": counted}, tmp_path))["counted"] == counted
    )
    assert status_as_json(as_status({"job": "j", "counted": None}, tmp_path))["counted"] is None
    assert status_as_json(pb.GetJobStatusResponse(job="j"))["counted"] is None


def test_a_job_with_every_setting() -> None:
    status = pb.GetJobStatusResponse(
        job="j",
        phase="failed",
        mode="sync",
        settings="sync replicas=3",
        batches=6,
        switching="the change to policy 2",
        changed=["dense=allreduce", "slices=2"],
        policies=[pb.PolicyChange(policy=n, settings=f"p{n}", global_step=n) for n in (1, 2)],
        loss=float("inf"),
        shards=[
            pb.ShardStatus(state="silent", silent_s=12.0, table_rows=70, table_nbytes=2_500_000)
        ],
        stragglers=["worker-2 is late"],
        evaluations=[pb.EvaluationResult(evaluation="final", results={"loss": float("nan")})],
        warnings=["w"],
        waiting_for="x",
        reason="r",
    )
    lines = render_page(status).splitlines()
    for line in (
        "under way: the change to policy 2",
        "set while it ran: dense=allreduce slices=2",
        "policy 2 from step 2: p2",
        "straggler: worker-2 is late",
        "evaluation final at step 0: loss nan",
        "last checkpoint: none",
        "waiting for x",
        "warning: w",
        "failed: r",
    ):
        assert line in lines
    assert any("  0.0 micro-batches/s  " in line and "  6 micro-batches" in line for line in lines)
    assert any("silent for 12.0 s" in line for line in lines)
    assert any("0.0 MB, 70 rows 2.5 MB" in line for line in lines)
    document = status_as_json(status)
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
    assert status_histogram(counts) == shown


def test_an_enum_of_a_later_version_is_its_number_in_json() -> None:
    assert status_as_json(pb.Transport(shard=1, kind=9))["kind"] == "9"  # type: ignore[arg-type]
    assert status_as_json(pb.Transport())["kind"] == "unspecified"
