"""``coordinator serve --resume auto``, as supervisors start it: SIGTERM drains it, and the same
command begins a run, goes on with it, or says that it is done."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import structlog

from coordinator.client.client import CoordinatorClient
from coordinator.client.patience import Patience
from coordinator.launch.commands import reserved_address
from coordinator.process import serve
from coordinator.process.options import ServeOptions
from coordinator.records.run_directory import LEDGER, RunDirectory
from coordinator.records.store import Store
from coordinator.records.stored_values import ENDED
from psrpc import SOFTWARE
from psrpc.core.errors import (
    CoordinatorRefuses,
    CoordinatorUnreachable,
    InvalidJob,
    JobDone,
    JobFailed,
    PsError,
)
from psrpc.ops.clock import ManualClock
from psrpc.v1 import coordinator_pb2 as pb
from tests.coordinator.builders import description_json
from tests.coordinator.fakes import ShardDouble, report, start_training
from tests.coordinator.fixtures import describing, options, run_with, train, train_to_step_2


@pytest.fixture(autouse=True)
def described(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The job as the child process describes it; tests may change it."""
    document = description_json(epochs=1)
    describing(monkeypatch, document)
    # Streams that are open at the end are those of doubles.
    monkeypatch.setattr("coordinator.rpc.server.GRACE_S", 0.0)
    return document


def ended(run_dir: Path) -> Any:
    with Store(run_dir / LEDGER) as store:
        return store.get(ENDED)


def auto(run_dir: Path, **changes: Any) -> ServeOptions:
    return options(run_dir, resumption="auto", **changes)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_drained_run_is_saved_and_the_same_command_goes_on(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    described: dict[str, Any],
    number: signal.Signals,
) -> None:
    run_ids = []

    def drain(client: CoordinatorClient) -> None:
        run_ids.append(client.get_job().run_id)
        [shard], [stream], [worker] = start_training(client)
        [under_way] = worker.lease().train.batches
        os.kill(os.getpid(), number)
        while client.get_job_status().phase != "stopping":
            pass
        answer = shard.heartbeat(leaving=True)
        assert (answer.saved, answer.saving) == (False, True), "it is needed until all is saved"
        worker.heartbeat([report(under_way)])
        shard.take(next(stream).snapshot)
        while not shard.heartbeat(leaving=True).saved:
            pass
        # It is not said that the job is over: a shard that stays waits for the next coordinator.
        with pytest.raises(CoordinatorUnreachable):
            list(stream)

    def look(client: CoordinatorClient) -> None:
        run_ids.append(client.get_job().run_id)
        shard = ShardDouble(client, 0)
        shard.register()
        begin = next(iter(shard.watch())).begin
        assert (begin.generation, begin.restore) == (2, "checkpoints/step-00000001")
        os.kill(os.getpid(), signal.SIGTERM)

    run_dir = tmp_path / "run"
    assert run_with(monkeypatch, auto(run_dir), drain) == 75
    assert not (run_dir / "summary.json").exists()
    assert ended(run_dir) is None
    monkeypatch.undo()
    describing(monkeypatch, described)
    assert run_with(monkeypatch, auto(run_dir), look) == 75
    assert run_ids[0] == run_ids[1]
    assert ended(run_dir) is None


def test_a_failed_run_goes_on_from_its_newest_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, described: dict[str, Any]
) -> None:
    """Also where the user's code made it fail: the supervisor counts the starts."""

    def fail(client: CoordinatorClient) -> None:
        _, stream, worker = train_to_step_2(client)
        worker.leave("out of memory", fatal=True)
        list(stream)

    described["checkpoint_every"] = 2
    describing(monkeypatch, described)
    with pytest.raises(JobFailed, match="out of memory"):
        run_with(monkeypatch, auto(tmp_path / "run"), fail)
    monkeypatch.undo()
    describing(monkeypatch, described)
    trained: list[int] = []
    wanted = auto(tmp_path / "run")
    assert run_with(monkeypatch, wanted, lambda c: trained.extend(train(c, False))) == 0
    assert trained == [8]


def test_a_run_that_failed_before_its_first_checkpoint_begins_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, described: dict[str, Any]
) -> None:
    def fail(client: CoordinatorClient) -> None:
        shard = ShardDouble(client, 0)
        shard.register()
        shard.heartbeat(failure="no memory")

    with pytest.raises(JobFailed, match="no memory"):
        run_with(monkeypatch, auto(tmp_path / "run"), fail)
    monkeypatch.undo()
    describing(monkeypatch, {**described, "job_sha256": "cd" * 32})

    def begin(client: CoordinatorClient) -> None:
        assert client.get_job().job_sha256 == "cd" * 32
        shard = ShardDouble(client, 0)
        shard.register()
        assert shard.begin(iter(shard.watch())).fresh
        os.kill(os.getpid(), signal.SIGINT)

    assert run_with(monkeypatch, auto(tmp_path / "run"), begin) == 130
    assert ended(tmp_path / "run")["phase"] == "failed"


def hear(
    wanted: ServeOptions, calls: list[Callable[[CoordinatorClient], object]]
) -> tuple[list[PsError], int]:
    """Errors that members get from a coordinator that serves no run, and its exit status. A signal
    ends it where it would stay longer."""
    heard: list[PsError] = []
    over = threading.Event()

    def ask() -> None:
        with CoordinatorClient(wanted.bind) as client:
            patience = Patience(client, 30, lambda _: None)
            for call in calls:
                try:
                    patience.persist(lambda call=call: call(client))  # type: ignore[misc]
                except PsError as error:
                    heard.append(error)
        if not over.is_set():
            os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        return heard, asyncio.run(serve.serve(wanted))
    finally:
        over.set()
        thread.join(60)


def register(client: CoordinatorClient) -> object:
    return client.register_shard(pb.RegisterShardRequest(incarnation=3, software=SOFTWARE))


def heartbeat(client: CoordinatorClient) -> object:
    return client.heartbeat_shard(pb.HeartbeatShardRequest(incarnation=3))


def watch(client: CoordinatorClient) -> object:
    return list(client.watch(pb.WatchRequest(incarnation=3)))


def test_a_job_that_is_done_is_said_to_be_so_and_shards_and_workers_hear_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = tmp_path / "run"
    assert run_with(monkeypatch, auto(run_dir), train) == 0
    before = {path: path.read_bytes() for path in run_dir.glob("*.json")}
    with reserved_address() as address:
        calls = [CoordinatorClient.get_job, register, heartbeat, watch]
        heard, status = hear(auto(run_dir, bind=address), calls)
    assert status == 0
    assert [type(error) for error in heard] == [JobDone] * 4
    assert str(run_dir) in str(heard[0])
    assert {path: path.read_bytes() for path in run_dir.glob("*.json")} == before


def test_a_done_run_goes_on_where_more_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, described: dict[str, Any]
) -> None:
    run_dir = tmp_path / "run"
    assert run_with(monkeypatch, auto(run_dir), train) == 0
    monkeypatch.undo()
    describing(monkeypatch, {**described, "epochs": 2})

    def look(client: CoordinatorClient) -> None:
        assert client.get_job_status().total_steps == 6
        os.kill(os.getpid(), signal.SIGTERM)

    more = auto(run_dir, overrides=("epochs=2",))
    assert run_with(monkeypatch, more, look) == 75
    assert json.loads((run_dir / "summary.json").read_text())["phase"] == "done"
    assert ended(run_dir) is None


def test_a_refusal_is_heard_by_processes_that_hold_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, described: dict[str, Any]
) -> None:
    """Others may hold what a corrected command goes on with."""
    described["needs_single_shard"] = "global_clipnorm"
    describing(monkeypatch, described)
    heard: list[PsError] = []

    def call(what: Callable[[CoordinatorClient], object]) -> Callable[[CoordinatorClient], object]:
        def once(client: CoordinatorClient) -> object:
            try:
                return what(client)
            except CoordinatorUnreachable as error:
                if "refuses" not in str(error):
                    raise  # it does not listen yet
                heard.append(error)
                return None
            except InvalidJob as error:
                heard.append(error)
                return None

        return once

    def wait(client: CoordinatorClient) -> object:
        waited: list[str] = []
        try:
            return Patience(client, 0.0, waited.append).persist(lambda: heartbeat(client))
        except CoordinatorUnreachable as error:
            heard.append(error)
            return None

    calls = [call(CoordinatorClient.get_job), call(register), call(heartbeat), wait]
    with reserved_address() as address:
        wanted = auto(tmp_path / "run", shards=2, bind=address)
        with pytest.raises(InvalidJob, match="cannot use 2 shards"):
            hear(wanted, calls)
    assert [type(error) for error in heard] == [
        InvalidJob,
        InvalidJob,
        CoordinatorRefuses,
        CoordinatorUnreachable,
    ]
    assert all("refuses to start: " in str(error) for error in heard)
    assert not (tmp_path / "run").exists()


def test_a_run_of_another_job_is_not_gone_on_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, described: dict[str, Any]
) -> None:
    monkeypatch.setattr(serve, "REFUSE_S", 0.0)
    assert run_with(monkeypatch, auto(tmp_path / "run"), train) == 0
    describing(monkeypatch, {**described, "name": "large"})
    with pytest.raises(InvalidJob, match="holds a run of job 'tiny', and this is job 'large'"):
        asyncio.run(serve.serve(auto(tmp_path / "run")))


def test_a_coordinator_before_it_that_is_still_leaving_is_no_refusal(tmp_path: Path) -> None:
    """Started again a little later, it goes on; so do shards and workers that wait for it."""
    with RunDirectory(tmp_path, resume=False), pytest.raises(JobFailed) as held:
        asyncio.run(serve.serve(auto(tmp_path)))
    assert held.value.code == "PS122"


def test_a_run_directory_that_may_not_be_used_is_a_refusal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serve, "REFUSE_S", 0.0)
    monkeypatch.setattr("coordinator.records.run_directory.ensure_directory", forbid)
    with pytest.raises(InvalidJob) as refused:
        asyncio.run(serve.serve(auto(tmp_path / "run")))
    assert refused.value.code == "PS503"


def forbid(path: Path) -> None:
    raise PermissionError(errno.EACCES, "Permission denied", str(path))


@pytest.mark.parametrize(
    ("why", "what"),
    [
        (InvalidJob("this job cannot use 2 shards"), "why there is no run"),
        (JobDone("the run is done"), "that the run is done"),
    ],
)
def test_a_coordinator_that_stays_to_refuse_says_so(why: PsError, what: str) -> None:
    """At once and less and less often: it ends 15 s after it has found out."""
    clock = ManualClock()

    async def pause(seconds: float) -> None:
        clock.advance(seconds)

    with structlog.testing.capture_logs() as logs:
        asyncio.run(serve.stay_to_tell(why, clock, pause))
    awaited = f"shards and workers that ask, to tell them {what} (for 15 s)"
    assert {line["waiting_for"] for line in logs} == {awaited}
    assert logs[0]["why"] == why.coded
    assert [line.get("waited_s") for line in logs] == [None, 3, 6, 12]
