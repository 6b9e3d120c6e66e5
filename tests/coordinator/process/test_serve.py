"""``coordinator serve`` from its options to its summary, with doubles for the other processes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import sqlite3
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast
from urllib.request import urlopen

import pytest
import structlog

from coordinator.cli import __main__ as cli
from coordinator.client.client import CoordinatorClient
from coordinator.core.description import JobDescription
from coordinator.job.job_run import JobRun
from coordinator.launch.commands import reserved_address
from coordinator.process import serve
from coordinator.process.describing import DescribeFailed, describe_patiently
from coordinator.process.options import ServeOptions
from coordinator.process.settling import overrides_for_workers
from coordinator.process.signals import JobSignals
from psrpc.core.errors import (
    AlreadyExists,
    CheckpointError,
    InvalidArgument,
    InvalidJob,
    InvalidSetting,
    JobFailed,
    PortInUse,
)
from psrpc.files.run_paths import read_ending
from tests.coordinator.builders import description_json
from tests.coordinator.fakes import ShardDouble, WorkerDouble, report, start_training
from tests.coordinator.fixtures import describing, options, run_with, train, train_to_step_2
from tests.faults.disks import mounted_disk


@pytest.fixture
def described(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The job as the child process describes it; tests may change it."""
    document = description_json(epochs=1)

    describing(monkeypatch, document)
    return document


def test_a_job_runs_to_its_end_and_is_summed_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, described: dict[str, Any]
) -> None:
    def look_and_train(client: CoordinatorClient) -> None:
        client.get_job_status()
        with urlopen(f"http://{metrics}/metrics", timeout=10) as answer:
            scraped.append(answer.read().decode())
        train(client)

    scraped: list[str] = []
    with reserved_address() as metrics:
        wanted = options(tmp_path / "run", metrics=metrics)
        assert run_with(monkeypatch, wanted, look_and_train) == 0
    assert 'coordinator_phase{phase="waiting"} 1.0\n' in scraped[0]
    assert 'coordinator_info{name="tiny"' in scraped[0]
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    expected = {
        "job": "tiny",
        "phase": "done",
        "mode": "async",
        "shards": 1,
        "workers": 1,
        "global_step": 3,
        "batches": 3,
        "examples": 10,
        "checkpoint": "checkpoints/step-00000003",
        "refused": 0,
        "skipped": 0,
        "failed": 0,
        "eval": {},
    }
    assert {key: summary[key] for key in expected} == expected
    assert summary["train_s"] > 0
    assert not (tmp_path / "run" / "address").exists()
    # Without a dashboard, too: the history is there for a later one.
    history = json.loads((tmp_path / "run" / "dashboard.json").read_text())
    assert "tiny: done" in [event["text"] for event in history["events"]]
    assert json.loads((tmp_path / "run" / "job.json").read_text())["job"] == "tiny.py"


def test_a_job_that_sets_its_learning_rate_is_not_attended(
    tmp_path: Path, described: dict[str, Any]
) -> None:
    described["reduce_lr"] = {
        "metric": "loss",
        "lower": True,
        "factor": 0.5,
        "patience": 1,
        "min_delta": 0.0,
        "cooldown": 0,
        "min_lr": 0.0,
    }
    described["eval_records"] = 4
    wanted = options(tmp_path / "run", attended=True)
    with pytest.raises(InvalidSetting, match="--set reduce_lr=none, or leave out --attended"):
        asyncio.run(serve.serve(wanted))


def test_resume_goes_on_in_a_new_generation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, described: dict[str, Any]
) -> None:
    def stop_early(client: CoordinatorClient) -> None:
        _, stream, worker = train_to_step_2(client)
        worker.leave("out of memory", fatal=True)
        assert [command.shutdown.reason for command in stream] == ["out of memory"]

    described["checkpoint_every"] = 2
    run_dir = tmp_path / "run"
    with pytest.raises(JobFailed, match="out of memory"):
        run_with(monkeypatch, options(run_dir), stop_early)
    failed = json.loads((run_dir / "summary.json").read_text())
    assert (failed["phase"], failed["reason"]) == ("failed", "out of memory")

    monkeypatch.undo()
    describing(monkeypatch, described)
    (run_dir / "checkpoints" / ".tmp-step-00000009").mkdir()
    trained: list[int] = []
    code = run_with(
        monkeypatch,
        options(run_dir, resumption="always"),
        lambda c: trained.extend(train(c, False)),
    )
    assert (code, trained) == (0, [8])
    assert not list((run_dir / "checkpoints").glob(".*"))
    summary = json.loads((run_dir / "summary.json").read_text())
    assert (summary["run_id"], summary["generation"]) == (failed["run_id"], 2)
    assert (summary["global_step"], summary["batches"], summary["examples"]) == (3, 3, 10)
    with pytest.raises(AlreadyExists, match="--resume"):
        asyncio.run(serve.serve(options(run_dir)))


def test_a_run_that_was_done_and_is_only_served_stays_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, described: dict[str, Any]
) -> None:
    def stop(client: CoordinatorClient) -> None:
        client.get_job_status()
        os.kill(os.getpid(), signal.SIGINT)

    run_dir = tmp_path / "run"
    assert run_with(monkeypatch, options(run_dir), train) == 0
    before = json.loads((run_dir / "summary.json").read_text())
    monkeypatch.undo()
    describing(monkeypatch, {**described, "epochs": 1000})
    assert run_with(monkeypatch, options(run_dir, resumption="always"), stop) == 130
    assert (before["phase"], before["batches"]) == ("done", 3)
    assert json.loads((run_dir / "summary.json").read_text()) == before
    assert read_ending(run_dir) == before, "newer than the last start"


class Killed(BaseException):
    """Kills the coordinator."""


def test_a_run_that_has_not_ended_goes_on_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, described: dict[str, Any]
) -> None:
    """The coordinator dies; one of the same job takes over its shard and its worker, which keep
    what they have."""
    described["checkpoint_every"] = 2
    run_dir = tmp_path / "run"
    tick, killed = JobRun.tick, threading.Event()

    def die(job_run: JobRun) -> None:
        if killed.is_set():
            raise Killed
        tick(job_run)

    def kill(client: CoordinatorClient) -> None:
        train_to_step_2(client)
        killed.set()

    with monkeypatch.context() as dying:
        dying.setattr(JobRun, "tick", die)
        dying.setattr(serve, "TICK_S", 0.01)
        with pytest.raises(Killed):
            run_with(dying, options(run_dir), kill)
    identity = (run_dir / "token").read_text()

    with pytest.raises(InvalidJob, match=r"of another job: its overrides is \{\}, this one's"):
        asyncio.run(serve.serve(options(run_dir, overrides=("epochs=2",))))
    with pytest.raises(InvalidJob, match="another job: its shards is 1, this one's 2"):
        asyncio.run(serve.serve(options(run_dir, shards=2)))

    def go_on(client: CoordinatorClient) -> None:
        shard = ShardDouble(client, 0)
        shard.generation = 1
        shard.holds(2, {0: [(0, 8)]})
        assert shard.heartbeat().unknown
        assert shard.register().token == identity
        stream = iter(shard.watch())
        status = client.get_job_status()
        assert (status.phase, status.generation, status.global_step) == ("recovering", 2, 0)
        assert shard.begin(stream).keep
        worker = WorkerDouble(client, 1000)
        worker.name = "worker-0"
        assert worker.heartbeat().unknown
        assert worker.register() == "worker-0"
        worker.generation = worker.cluster().generation
        [last] = worker.lease().train.batches
        assert last.batch.first == 8
        worker.heartbeat([report(last)])
        shard.take(next(stream).snapshot)
        assert not next(stream).shutdown.failed
        list(stream)
        worker.leave()

    more = options(run_dir, overrides=("checkpoint_every=2",))
    assert run_with(monkeypatch, more, go_on) == 0
    summary = json.loads((run_dir / "summary.json").read_text())
    assert (summary["generation"], summary["global_step"], summary["batches"]) == (2, 3, 3)
    assert summary["checkpoint"] == "checkpoints/step-00000003.g2"
    with pytest.raises(AlreadyExists, match=r"has ended \(done\); say --resume"):
        asyncio.run(serve.serve(options(run_dir)))


def test_a_signal_before_training_ends_the_job_for_everyone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, described: dict[str, Any]
) -> None:
    said: list[str] = []

    def others(client: CoordinatorClient) -> None:
        worker = WorkerDouble(client, 5)
        worker.register()
        os.kill(os.getpid(), signal.SIGINT)
        said.append(worker.wait_for_end().reason)
        worker.leave()

    assert run_with(monkeypatch, options(tmp_path / "run"), others) == 130
    assert said == ["stopped by a signal"]
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["phase"] == "failed"


@pytest.mark.parametrize("turns", range(5))
def test_a_signal_in_the_moment_after_the_job_is_described_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, described: dict[str, Any], turns: int
) -> None:
    describe = describe_patiently

    async def describe_and_signal(options: ServeOptions) -> JobDescription:
        description = await describe(options)
        os.kill(os.getpid(), signal.SIGINT)
        for _ in range(turns):  # of the loop, which sees a signal one or two turns later
            await asyncio.sleep(0)
        return description

    monkeypatch.setattr(serve, "describe_patiently", describe_and_signal)
    assert asyncio.run(serve.serve(options(tmp_path / "run"))) == 130


def test_a_signal_that_comes_before_a_job_run_goes_to_it() -> None:
    class Course:
        def __init__(self) -> None:
            self.heard: list[str] = []

        def stop(self) -> None:
            self.heard.append("stop")

        def drain(self) -> None:
            self.heard.append("drain")

        def end_early(self) -> None:
            self.heard.append("end early")

    async def work() -> int:
        return 1

    async def serving() -> None:
        for number, heard in ((signal.SIGINT, "stop"), (signal.SIGTERM, "drain")):
            signals, job_run = JobSignals(), Course()
            assert await signals.unless_stopped(work()) == 1
            signals._signalled(number)
            assert await signals.unless_stopped(work()) is None, "what comes next is not begun"
            signals.pass_on_to(cast("Any", job_run))
            assert job_run.heard == [heard]
            assert await signals.unless_stopped(work()) == 1, "it is with the job run"
            signals._end_early()
            assert job_run.heard == [heard, "end early"]

    asyncio.run(serving())


def test_a_signal_in_training_saves_what_is_done_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, described: dict[str, Any]
) -> None:
    described["epochs"] = 2

    def others(client: CoordinatorClient) -> None:
        [shard], [stream], [worker] = start_training(client)
        [under_way] = worker.lease().train.batches
        os.kill(os.getpid(), signal.SIGINT)
        for _ in range(1000):
            if client.get_job_status().phase == "stopping":
                break
        worker.heartbeat([report(under_way)])
        assert not shard.heartbeat(leaving=True).saved
        order = next(stream).snapshot
        assert order.name == "step-00000001"
        shard.take(order)
        assert next(stream).shutdown.reason == "stopped by a signal"
        list(stream)
        worker.leave()

    assert run_with(monkeypatch, options(tmp_path / "run"), others) == 130
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["reason"], summary["global_step"]) == ("stopped by a signal", 1)
    assert summary["checkpoint"] == "checkpoints/step-00000001"
    assert summary["resume"] == f"--resume --run-dir {tmp_path / 'run'}"


def test_a_bad_job_leaves_no_run_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, described: dict[str, Any]
) -> None:
    described["needs_single_shard"] = "global_clipnorm"
    with pytest.raises(InvalidJob, match="cannot use 2 shards"):
        asyncio.run(serve.serve(options(tmp_path / "run", shards=2)))
    monkeypatch.setattr(
        "coordinator.process.describing.describe_command",
        lambda *_: [sys.executable, "-c", "raise SystemExit('no')"],
    )
    with pytest.raises(DescribeFailed, match="no"):
        asyncio.run(serve.serve(options(tmp_path / "run")))
    assert not (tmp_path / "run").exists()


@pytest.mark.usefixtures("described")
def test_a_ledger_that_is_none_is_said(tmp_path: Path) -> None:
    (tmp_path / "ledger.sqlite").write_text("no database, and long enough to be seen as such" * 9)
    for resumption in ("always", "never"):
        with pytest.raises(CheckpointError, match="is damaged: file is not a database") as raised:
            asyncio.run(serve.serve(options(tmp_path, resumption=resumption)))
        assert raised.value.code == "PS406"
        assert "put an empty file in its place and say --resume" in str(raised.value)


@pytest.mark.parametrize(
    "damage",
    [
        "UPDATE checkpoints SET generation = -1",
        "INSERT INTO evaluations VALUES ('epoch-1', 1, 3, '[]')",
        "UPDATE incarnations SET incarnation = 'x'",
        "UPDATE history SET row = '[]'",
    ],
)
def test_a_damaged_ledger_leaves_a_run_that_is_done_as_it_is(
    damage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, described: dict[str, Any]
) -> None:
    """It is found before anything is changed, so the run is still known to have ended; another
    start would come to the same."""
    run_dir = tmp_path / "run"
    assert run_with(monkeypatch, options(run_dir), train) == 0
    with contextlib.closing(sqlite3.connect(run_dir / "ledger.sqlite")) as ledger:
        ledger.execute(damage)
        ledger.commit()
    kept = {name: (run_dir / name).read_bytes() for name in ("summary.json", "job.json")}
    job = ["up", "tiny.py", "--run-dir", str(run_dir), "--resume"]
    monkeypatch.chdir(tmp_path)
    Path("tiny.py").touch()
    monkeypatch.setattr("coordinator.launch.supervisor.Supervisor.run", None)
    assert cli.main(job) == 2
    with pytest.raises(CheckpointError, match="is damaged"):
        asyncio.run(serve.serve(options(run_dir, resumption="always")))
    assert kept == {name: (run_dir / name).read_bytes() for name in kept}
    assert read_ending(run_dir)["phase"] == "done"


def test_that_there_is_no_run_to_resume_is_found_before_the_job_is_described(
    tmp_path: Path,
) -> None:
    with pytest.raises(InvalidJob, match="holds no run"):
        asyncio.run(serve.serve(options(tmp_path, resumption="always")))


def test_a_port_in_use_is_found_before_the_job_is_described(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(PortInUse, match=f"port {port} is in use.*another --bind"):
            asyncio.run(serve.serve(options(tmp_path, bind=f"127.0.0.1:{port}")))


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"shards": -1}, "--shards is -1"),
        ({"replicas": 0}, "--replicas is 0"),
        ({"bind": "host:many"}, "port 'many'"),
    ],
)
def test_options_are_checked(tmp_path: Path, changes: dict[str, Any], what: str) -> None:
    with pytest.raises(InvalidArgument, match=what):
        options(tmp_path, **changes)


def test_replicas_reach_the_workers_as_an_override(tmp_path: Path) -> None:
    wanted = options(tmp_path, overrides=("epochs=1",), replicas=3)
    assert overrides_for_workers(wanted) == ("epochs=1", "replicas=3")
    assert overrides_for_workers(options(tmp_path)) == ()


@pytest.fixture
def own_logs(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Undoes what a command does to this process."""
    monkeypatch.setenv("GRPC_VERBOSITY", "NONE")
    yield
    structlog.reset_defaults()


@pytest.mark.usefixtures("own_logs")
def test_the_command_says_what_is_wrong_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["serve", "--job", "x.py", "--shards", "-1"]) == 2
    assert capsys.readouterr().err == (
        "error PS110: --shards is -1; expected a whole number of at least 0\n"
    )


@pytest.mark.parametrize("arguments", [["--help"], ["serve", "--help"], ["--version"]])
def test_help_is_there(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        cli.main(arguments)
    assert left.value.code == 0
    assert capsys.readouterr().out


@pytest.mark.usefixtures("described")
def test_a_full_disk_says_what_a_run_takes(tmp_path: Path) -> None:
    with (
        mounted_disk(tmp_path / "disk", megabytes=1) as disk,
        pytest.raises(JobFailed) as full,
    ):
        asyncio.run(serve.serve(options(disk / "run")))
    assert full.value.coded == (
        "PS502: the run directory cannot be used: No space left on device; a run takes 2.1 MB for "
        "its ledger and at least 0.0 MB for each checkpoint; make room, or choose another --run-dir"
    )
