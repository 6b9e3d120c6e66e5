"""``coordinator set`` against a coordinator on a port."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from coordinator.cli import set as set_cli
from coordinator.cli.__main__ import main
from coordinator.client.client import CoordinatorClient
from coordinator.core.description import JobDescription
from coordinator.core.work import Wait, Work
from coordinator.job import engine as engine_module
from psrpc.core.commands import Ended
from psrpc.core.errors import InvalidJob, JobFailed, NotReady
from psrpc.ops.threads import THREADS
from psrpc.v1 import coordinator_pb2 as pb
from tests.coordinator.builders import Served, make_run, serving
from tests.coordinator.fakes import ShardDouble, WorkerDouble, report, start_training


class Job:
    """A job of one shard and one worker that trains, and holds a batch."""

    def __init__(self, served: Served, client: CoordinatorClient) -> None:
        self.served = served
        self.client = client
        shards, streams, workers = start_training(client)
        self.shard: ShardDouble = shards[0]
        self.stream: Iterator[pb.WatchResponse] = streams[0]
        self.worker: WorkerDouble = workers[0]
        self.held = self.worker.lease().train.batches

    def finish(self) -> None:
        """The worker does what it holds, and the shard what it is told, until it has begun."""
        self.worker.heartbeat([report(attempt) for attempt in self.held])
        self.shard.holds(1, {0: [(0, 4)]})
        self.shard.take(next(self.stream).snapshot)
        self.shard.begin(self.stream)


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    run = make_run(tmp_path, train_records=16)
    with serving(run) as served, CoordinatorClient(served.address) as client:
        yield Job(served, client)


def test_a_policy_is_set_and_taken_up(job: Job) -> None:
    asked = job.client.set_policy(["mode=ssp", "staleness=4"])
    assert (asked.policy, asked.settings) == (2, "ssp staleness=4")
    assert job.client.set_policy(["mode=ssp", "staleness=4"]) == asked
    with pytest.raises(NotReady, match="policy 2"):
        job.client.set_policy(["mode=ssp", "staleness=5"])
    status = job.client.get_job_status()
    assert (status.policy, status.settings) == (1, "async")
    assert status.switching == "the change to policy 2 (ssp staleness=4): draining"
    job.finish()
    begin = job.shard.told[-1]
    assert (begin.policy, begin.keep, begin.version) == (2, True, 1)
    assert begin.settings == b'{"mode": "ssp", "staleness": 4}'
    status = job.client.get_job_status()
    assert (status.policy, status.settings, status.switching) == (2, "ssp staleness=4", "")
    assert [c.global_step for c in status.policies] == [0, 1]
    assert job.client.set_policy(["staleness=4"]).policy == 2
    lease = job.worker.cluster()
    assert (lease.generation, lease.policy) == (2, 2)
    job.worker.generation, job.worker.policy = 2, 2
    assert job.worker.lease().train.fresh


def test_settings_that_cannot_be_changed_are_refused_with_the_reason(job: Job) -> None:
    with pytest.raises(InvalidJob, match="did you mean 'staleness'"):
        job.client.set_policy(["stalenes=4"])
    job.served.do(job.served.job_run.fail, "no more")
    with pytest.raises(JobFailed, match=r"the job is failed \(no more\)"):
        job.client.set_policy(["mode=ssp", "staleness=4"])


def test_the_command_waits_until_the_policy_stands(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []

    def say(line: str) -> None:
        said.append(line)
        if len(said) == 1:
            job.finish()

    monkeypatch.setattr(set_cli, "announce_change", say)
    monkeypatch.setattr(set_cli, "POLL_S", 0.0)
    assert main(["set", "mode=ssp", "staleness=4", "--coordinator", job.served.address]) == 0
    assert said == [
        "the change to policy 2 (ssp staleness=4): draining",
        "policy 2: ssp staleness=4 from step 1",
    ]


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (
            ["stalenes=4"],
            2,
            "error PS104: stalenes=4: a policy has no stalenes; did you mean 'staleness'?",
        ),
        (["staleness=4"], 2, "error PS105: staleness is for mode ssp, but mode is 'async'"),
        (["epochs=60"], 2, "error PS105: epochs=60: epochs belongs to the job and cannot"),
        (["local_steps=4"], 2, "error PS105: local_steps=4: local_steps says what the batches"),
        (
            ["dense=allreduce"],
            2,
            "error PS105: dense=allreduce: dense belongs to the job and cannot",
        ),
        (["dense=alreduce"], 2, "error PS105: dense=alreduce: there is no such way; did you mean"),
        (["shards=2"], 2, "error PS105: shards=2: shards is an option of the start and cannot"),
        (
            ["dense=shards", "mode=ssp"],
            2,
            "error PS105: dense=shards starts the cluster again, and",
        ),
    ],
)
def test_the_command_refuses_with_the_reason(
    job: Job, capsys: pytest.CaptureFixture[str], arguments: list[str], status: int, said: str
) -> None:
    assert main(["set", *arguments, "--coordinator", job.served.address]) == status
    err = capsys.readouterr().err
    assert err.startswith(said)
    advice = "; or, if workers host the parameters, set slices=2\n"
    assert err.endswith(advice) is (arguments == ["shards=2"])


def test_the_command_finds_the_coordinator_by_its_run_directory(
    job: Job, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "address").write_text(job.served.address + "\n")
    assert main(["set", "mode=async", "--run-dir", str(tmp_path)]) == 0
    assert capsys.readouterr().out.endswith("policy 1: async from step 0\n")
    assert main(["set", "mode=async", "--run-dir", str(tmp_path / "other")]) == 2
    assert "no coordinator runs on" in capsys.readouterr().err


class Answers:
    """A client that gives one status after the other."""

    reached = True
    threads = THREADS

    def __init__(self, *statuses: pb.GetJobStatusResponse) -> None:
        self._statuses = list(statuses)

    def get_job_status(self) -> pb.GetJobStatusResponse:
        return self._statuses.pop(0)


def status(phase: str, switching: str = "", policy: int = 1) -> pb.GetJobStatusResponse:
    return pb.GetJobStatusResponse(
        phase=phase, switching=switching, policy=policy, settings="async"
    )


@pytest.mark.parametrize(
    ("last", "why"),
    [
        (status("done"), "the job is done before it came to policy 2: ssp staleness=4"),
        (status("recovering"), r"no change is under way any more; policy 1 \(async\) stands"),
    ],
)
def test_a_change_that_does_not_come_about(last: pb.GetJobStatusResponse, why: str) -> None:
    asked = pb.SetPolicyResponse(policy=2, settings="ssp staleness=4")
    client: Any = Answers(status("training", "it: draining"), last)
    with pytest.raises(JobFailed, match=why):
        set_cli.await_policy(client, asked, pause=lambda _s: None)


RESTART = pb.SetPolicyResponse(policy=1, restart=["dense=allreduce", "slices=none"])


@pytest.mark.parametrize("missed", [False, True], ids=["its end", "its start"])
def test_the_command_waits_for_the_end_of_the_processes_or_for_the_next_ones(
    missed: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    there = status("recovering" if missed else "restarting")
    there.changed.extend(RESTART.restart)
    there.newest_checkpoint = "checkpoints/step-00000020.g2"
    client: Any = Answers(status("training", "it: saving"), there)
    line = set_cli.await_restart(client, RESTART, pause=lambda _s: None)
    assert line == "dense=allreduce: the cluster starts again from step 20"
    assert capsys.readouterr().out == "it: saving\n"


@pytest.mark.parametrize(
    ("last", "why"),
    [
        (status("failed"), "the job is failed before it came to dense=allreduce"),
        (status("training"), "dense=allreduce does not come about: the job is training, and no"),
    ],
)
def test_processes_that_stay(last: pb.GetJobStatusResponse, why: str) -> None:
    last.changed.append("dense=shards")
    client: Any = Answers(status("training", "it: draining"), last)
    with pytest.raises(JobFailed, match=why):
        set_cli.await_restart(client, RESTART, pause=lambda _s: None)


def test_a_job_that_has_these_processes_stays_as_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(tmp_path, train_records=16)

    async def described(changed: Mapping[str, str]) -> JobDescription:
        assert changed == {"slices": "none"}
        return run.description

    with (
        serving(run, describe=described) as served,
        CoordinatorClient(served.address) as client,
    ):
        Job(served, client)
        assert main(["set", "slices=none", "--coordinator", served.address]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert lines[-1] == "slices=none: the job has that already"
        # The coordinator of this test logs here, too.
        assert next(line for line in lines if line.startswith("slices=none")) == (
            "slices=none: the coordinator describes the job anew with that, which may take as long "
            "as a start; the job trains on meanwhile"
        )
        assert client.get_job_status().switching == ""


def test_a_parked_worker_hears_of_the_change(job: Job) -> None:
    other = WorkerDouble(job.client, 5)
    other.register()
    job.client.set_policy(["mode=ssp", "staleness=4"])
    answers: list[str] = []

    def ask() -> None:
        try:
            other.lease()
        except Exception as error:
            answers.append(type(error).__name__)

    waiting = threading.Thread(target=ask)
    waiting.start()
    job.finish()
    waiting.join(10)
    assert answers == ["StaleGeneration"]


def test_a_parked_call_looks_again_when_there_may_be_work(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Time alone may bring some, such as a second attempt of what another is late with."""
    other = WorkerDouble(job.client, 5)
    other.register()
    job_run = job.served.job_run
    asked: list[float] = []

    def find(*_caller: object) -> Work:
        asked.append(job_run.now())
        if len(asked) < 3:
            return Wait("a worker is late", until=job_run.now() + 0.02)
        return Ended(False, "enough")

    monkeypatch.setattr(job_run.assignments, "find", find)
    monkeypatch.setattr(engine_module, "POLL_S", 600.0)
    assert other.lease().finished.reason == "enough"
    assert len(asked) == 3
