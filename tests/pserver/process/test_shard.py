"""A shard's life with its coordinator, in this process."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from pserver.client.client import ShardClient
from pserver.engine.commands import ShardCommands
from pserver.process.config import ServeConfig
from pserver.process.ending import Ending
from pserver.process.shard import serve
from pserver.updates.numpy_engine import NumpyEngine
from psrpc.checkpoint.checkpoint import Manifest, ManifestFile, commit
from psrpc.checkpoint.load import load_variables
from psrpc.core.batch import BatchId
from psrpc.core.errors import (
    AlreadyExists,
    CoordinatorRefuses,
    CoordinatorUnreachable,
    InvalidJob,
    JobFailed,
    PortInUse,
    RemoteFailure,
    ResourceExhausted,
)
from psrpc.v1 import coordinator_pb2 as pb
from psrpc.v1 import types_pb2 as types
from tests.pserver.fake_coordinator import WAIT_S, FakeCoordinator, begin_at, running
from tests.pserver.shards import (
    INITIAL,
    ONE_TRY,
    SGD,
    counting,
    fence_of,
    leased,
    part,
    plan_of,
    whole,
)

PLAN = plan_of()


@pytest.fixture
def coordinator(tmp_path: Path) -> Iterator[FakeCoordinator]:
    with running(FakeCoordinator(tmp_path, PLAN)) as fake:
        yield fake


@contextmanager
def shard(fake: FakeCoordinator, ending: Ending | None = None) -> Iterator[Future[None]]:
    """Shard 0 of ``fake``, in a thread; ended on leaving the block if it has not yet."""
    ending = ending or Ending()
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(serve, ServeConfig(0, fake.address, connect_timeout_s=5), ending)
        try:
            yield future
        finally:
            ending.end()
            future.exception(WAIT_S)


@contextmanager
def worker(fake: FakeCoordinator) -> Iterator[ShardClient]:
    """A client of the shard that has just registered and is ready."""
    registered = fake.registered.get(timeout=WAIT_S)
    fake.ready.get(timeout=WAIT_S)
    with ShardClient(registered.address, registered.incarnation, PLAN, 0, retry=ONE_TRY) as client:
        yield client


def test_a_shard_registers_serves_and_leaves_with_its_job(coordinator: FakeCoordinator) -> None:
    with shard(coordinator) as future, worker(coordinator) as client:
        fence = fence_of(client)
        client.initialize(fence, counting(PLAN), INITIAL)
        client.push(fence, leased("worker-1", BatchId(0, 0, 5), 1, 0, part(PLAN, whole(PLAN, 1.0))))
        while (beat := coordinator.heartbeats.get(timeout=WAIT_S)).version != 1:
            pass
        assert (beat.applied, list(beat.staleness_counts), beat.waiting_for) == (1, [1], "")
        coordinator.commands.put(pb.WatchResponse(shutdown=pb.Shutdown()))
        assert future.exception(WAIT_S) is None


def test_a_shard_that_gives_up_says_why_the_coordinator_refused_to_start(
    coordinator: FakeCoordinator,
) -> None:
    with ThreadPoolExecutor(1) as pool:
        config = ServeConfig(0, coordinator.address, connect_timeout_s=0)
        future = pool.submit(serve, config, Ending())
        coordinator.ready.get(timeout=WAIT_S)
        coordinator.failures.append(CoordinatorRefuses("it refuses to start: PS124: another job"))
        coordinator.silent = True
        why = "gives up. When it answered last: it refuses to start: PS124: another job"
        with pytest.raises(CoordinatorUnreachable, match=why):
            future.result(WAIT_S)


def test_a_failed_job_ends_the_shard_with_its_reason(coordinator: FakeCoordinator) -> None:
    with shard(coordinator) as future:
        coordinator.commands.put(
            pb.WatchResponse(shutdown=pb.Shutdown(failed=True, reason="loss diverged"))
        )
        with pytest.raises(JobFailed, match=r"^loss diverged$"):
            future.result(WAIT_S)


def test_a_broken_command_stream_is_opened_again(
    coordinator: FakeCoordinator,
) -> None:
    with shard(coordinator) as future:
        coordinator.watches.get(timeout=WAIT_S)
        coordinator.commands.put(None)
        coordinator.watches.get(timeout=WAIT_S)
        coordinator.commands.put(pb.WatchResponse(shutdown=pb.Shutdown()))
        assert future.exception(WAIT_S) is None


def test_a_stream_that_lagged_behind_is_opened_again(
    coordinator: FakeCoordinator,
) -> None:
    with shard(coordinator) as future:
        coordinator.watches.get(timeout=WAIT_S)
        coordinator.commands.put(ResourceExhausted("shard 0 lags 64 commands behind"))
        coordinator.watches.get(timeout=WAIT_S)
        coordinator.commands.put(pb.WatchResponse(shutdown=pb.Shutdown()))
        assert future.exception(WAIT_S) is None


def test_an_update_that_fails_is_told_and_ends_the_shard(
    coordinator: FakeCoordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    def apply(_self: NumpyEngine, _gradients: object, _rate_scale: float) -> None:
        raise MemoryError("no more")

    monkeypatch.setattr(NumpyEngine, "apply", apply)
    with shard(coordinator) as future, worker(coordinator) as client:
        fence = fence_of(client)
        client.initialize(fence, counting(PLAN), INITIAL)
        with pytest.raises(RemoteFailure):
            client.push(
                fence, leased("worker-1", BatchId(0, 0, 5), 1, 0, part(PLAN, whole(PLAN, 1.0)))
            )
        while not (beat := coordinator.heartbeats.get(timeout=WAIT_S)).failure:
            pass
        assert beat.failure == "MemoryError in the update of the parameters: no more"
        with pytest.raises(JobFailed, match="MemoryError in the update"):
            future.result(WAIT_S)


def test_a_command_that_fails_is_told_and_ends_the_shard(
    coordinator: FakeCoordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    def release(_self: ShardCommands, _name: str) -> None:
        raise RuntimeError("not foreseen")

    monkeypatch.setattr(ShardCommands, "release_snapshot", release)
    with shard(coordinator) as future, worker(coordinator):
        coordinator.commands.put(pb.WatchResponse(release_snapshot="step-1"))
        while not (beat := coordinator.heartbeats.get(timeout=WAIT_S)).failure:
            pass
        assert beat.failure == "RuntimeError in a command: not foreseen"
        with pytest.raises(JobFailed, match="not foreseen"):
            future.result(WAIT_S)


@pytest.mark.parametrize(
    "broken",
    ["pserver.snapshots.writer.write_shard_file", "pserver.engine.parameters.Parameters.snapshot"],
)
def test_a_snapshot_that_fails_in_an_unforeseen_way_is_reported(
    coordinator: FakeCoordinator, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise MemoryError("no more")

    monkeypatch.setattr(broken, fail)
    with shard(coordinator), worker(coordinator) as client:
        client.initialize(fence_of(client), counting(PLAN), INITIAL)
        coordinator.commands.put(order("step-1"))
        assert coordinator.snapshots.get(timeout=WAIT_S).error == "MemoryError('no more')"


def order(name: str, *, write: bool = True, keep: bool = False) -> pb.WatchResponse:
    return pb.WatchResponse(
        snapshot=types.SnapshotOrder(
            name=name, write=write, keep=keep, directory="checkpoints/.tmp", global_step=1
        )
    )


def test_snapshots_are_written_reported_kept_and_released(
    coordinator: FakeCoordinator, tmp_path: Path
) -> None:
    directory = tmp_path / "checkpoints" / ".tmp"
    directory.mkdir(parents=True)
    with shard(coordinator), worker(coordinator) as client:
        fence = fence_of(client)
        client.initialize(fence, counting(PLAN), INITIAL)
        coordinator.commands.put(order("step-1", keep=True))
        report = coordinator.snapshots.get(timeout=WAIT_S)
        assert (report.name, report.version, report.error) == ("step-1", 0, "")
        assert (directory / report.file).stat().st_size == report.nbytes

        client.push(fence, leased("worker-1", BatchId(0, 0, 5), 1, 0, part(PLAN, whole(PLAN, 1.0))))
        kept = whole(PLAN)
        assert client.pull(fence, "step-1", kept).version == 0
        for name, array in counting(PLAN).items():
            np.testing.assert_array_equal(kept[name], array)

        coordinator.commands.put(order("step-1", keep=True))
        assert coordinator.snapshots.get(timeout=WAIT_S) == report, "repeated, not taken again"

        coordinator.commands.put(pb.WatchResponse(release_snapshot="step-1"))
        coordinator.commands.put(order("step-2", write=False))
        report = coordinator.snapshots.get(timeout=WAIT_S)
        assert (report.name, report.version, report.file) == ("step-2", 1, "")
        with pytest.raises(Exception, match="no snapshot 'step-1' is kept"):
            client.pull(fence, "step-1", kept)


def test_a_snapshot_that_cannot_be_written_is_reported_with_the_reason(
    coordinator: FakeCoordinator, tmp_path: Path
) -> None:
    with shard(coordinator), worker(coordinator) as client:
        client.initialize(fence_of(client), counting(PLAN), INITIAL)
        coordinator.commands.put(order("step-1"))
        report = coordinator.snapshots.get(timeout=WAIT_S)
        assert "No such file or directory" in report.error
        outside = order("step-2")
        outside.snapshot.directory = "../elsewhere"
        coordinator.commands.put(outside)
        assert "expected a plain file name" in coordinator.snapshots.get(timeout=WAIT_S).error


def test_a_restored_shard_has_its_values_and_its_applied_set(
    coordinator: FakeCoordinator, tmp_path: Path
) -> None:
    directory = tmp_path / "checkpoints" / ".tmp"
    directory.mkdir(parents=True)
    with shard(coordinator), worker(coordinator) as client:
        fence = fence_of(client)
        client.initialize(fence, counting(PLAN), INITIAL)
        client.push(fence, leased("worker-1", BatchId(0, 0, 5), 1, 0, part(PLAN, whole(PLAN, 1.0))))
        client.push(fence, leased("worker-1", BatchId(0, 5, 5), 1, 0, None))
        coordinator.commands.put(order("step-1"))
        report = coordinator.snapshots.get(timeout=WAIT_S)
    manifest = Manifest(
        "run-1", "step-1", 1, 1, 1, "async", 0, PLAN, SGD, "numpy", 0, 5, "data", "job", "00",
        (ManifestFile(0, report.file, report.nbytes, report.sha256, report.version),),
    )  # fmt: skip
    commit(directory, tmp_path / "checkpoints" / "step-1", manifest)

    coordinator.begin = begin_at(2, restore="checkpoints/step-1")
    with shard(coordinator):
        registered = coordinator.registered.get(timeout=WAIT_S)
        ready = coordinator.ready.get(timeout=WAIT_S)
        assert (ready.version, ready.initialized, ready.generation) == (1, True, 2)
        assert [(i.start, i.stop) for i in ready.applied[0].applied] == [(0, 10)]
        assert [(i.start, i.stop) for i in ready.applied[0].skipped] == [(5, 10)]
        with ShardClient(registered.address, registered.incarnation, PLAN, 0) as client:
            fence = fence_of(client, 2)
            ones = part(PLAN, whole(PLAN, 1.0))
            again = leased("worker-1", BatchId(0, 0, 5), 1, 0, ones, generation=2)
            assert client.push(fence, again).outcome == "already_applied"
            into = whole(PLAN)
            client.pull(fence, None, into)
            loaded = load_variables(tmp_path / "checkpoints" / "step-1")
            assert into["float32.trainable"].tolist() == [
                *loaded["dense/kernel"].ravel(),
                *loaded["dense/bias"],
            ]


def test_a_taken_index_is_said(
    coordinator: FakeCoordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pserver.process.coordination.PLACE_S", 0.0)
    coordinator.taken = True
    with shard(coordinator) as future, pytest.raises(AlreadyExists, match="shard 0 is held"):
        future.result(WAIT_S)


@pytest.mark.parametrize("token", ["", "another"])
def test_another_run_directory_is_said(
    coordinator: FakeCoordinator, tmp_path: Path, token: str
) -> None:
    if token:
        (tmp_path / "token").write_text(token)
    else:
        (tmp_path / "token").unlink()
    with shard(coordinator) as future, pytest.raises(InvalidJob, match="--run-dir") as caught:
        future.result(WAIT_S)
    assert str(tmp_path / "token") in str(caught.value)


def test_a_port_in_use_is_said(coordinator: FakeCoordinator) -> None:
    config = ServeConfig(0, coordinator.address, bind=coordinator.address)
    with pytest.raises(PortInUse, match="in use"):
        serve(config, Ending())


def test_a_coordinator_that_does_not_come_is_given_up(tmp_path: Path) -> None:
    with running(FakeCoordinator(tmp_path, PLAN)) as fake:
        pass
    with pytest.raises(CoordinatorUnreachable, match=fake.address):
        serve(ServeConfig(0, fake.address, connect_timeout_s=0), Ending())


def test_a_coordinator_that_falls_silent_is_given_up(coordinator: FakeCoordinator) -> None:
    config = ServeConfig(0, coordinator.address, connect_timeout_s=0)
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(serve, config, Ending())
        coordinator.heartbeats.get(timeout=WAIT_S)
        coordinator.silent = True
        with pytest.raises(CoordinatorUnreachable, match="has been silent"):
            future.result(WAIT_S)


def test_a_coordinator_that_does_nothing_but_fail_is_given_up(coordinator: FakeCoordinator) -> None:
    config = ServeConfig(0, coordinator.address, connect_timeout_s=0)
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(serve, config, Ending())
        coordinator.heartbeats.get(timeout=WAIT_S)
        coordinator.failures.extend([RemoteFailure("an unforeseen error")] * 100)
        with pytest.raises(CoordinatorUnreachable, match=r"has failed \(an unforeseen error\)"):
            future.result(WAIT_S)
