"""Processes die during a change of policy: no batch is lost or done twice."""

from __future__ import annotations

from pathlib import Path

import pytest

from coordinator.checkpoints.cadence import REPEAT_S
from coordinator.core.run import Followed
from coordinator.core.work import Train
from coordinator.records.stored_values import SINCE
from psrpc.core.commands import SnapshotOrder
from psrpc.core.errors import NotReady
from psrpc.core.policy import ASYNC, Policy
from psrpc.core.shard_reports import ShardFile, SnapshotReport
from tests.coordinator.switching_job import (
    PAIRS,
    SYNC,
    again,
    ask,
    do,
    finish,
    held,
    job,
    work,
    written,
)
from tests.coordinator.sync_job import refuse
from tests.coordinator.whole_coordinator import Worker, start


def test_batches_on_some_shards_reach_all_before_a_change(tmp_path: Path) -> None:
    coordinator, worker = start(tmp_path, **job(ASYNC))
    [batch] = worker.batches()
    lost = worker.batches(worker.train([batch]))
    coordinator.shards[0].record(lost)
    shards = list(coordinator.shards)
    coordinator.restart()
    for shard in shards:
        shard.connect()
    coordinator.settle()
    ask(coordinator, *written(SYNC))
    assert str(coordinator.job_run.changes).endswith(": draining")
    worker = Worker(coordinator, 5)
    again = worker.lease()
    assert isinstance(again, Train)
    assert [a.batch for a in again.batches] == [a.batch for a in lost]
    do(worker, again)
    coordinator.settle()
    assert coordinator.job_run.run.settings == SYNC
    assert held(coordinator)[0] == held(coordinator)[1]
    assert coordinator.job_run.standing == (3, 1 + len(lost))
    worker.join()
    finish(coordinator, worker)


def test_a_worker_that_is_lost_while_work_is_finished(tmp_path: Path) -> None:
    coordinator, worker = start(tmp_path, **job(SYNC))
    worker.round()
    ask(coordinator, "mode=async")
    coordinator.engine.sessions.leave(worker.name, "gone", fatal=False)
    assert str(coordinator.job_run.changes).endswith(": draining"), "it may be staged still"
    coordinator.settle()
    # No shard has it now, and so the round was not begun.
    assert coordinator.job_run.run.policies == (Followed(2, ASYNC, 0, 0),)
    finish(coordinator, Worker(coordinator, 2))


def test_a_shard_that_falls_while_work_is_finished(tmp_path: Path) -> None:
    coordinator, worker = start(tmp_path, **job(SYNC, checkpoint_every=1))
    work(coordinator, worker, 4)
    worker.round()
    ask(coordinator, "mode=async")
    coordinator.shards[1].kill()
    coordinator.add(1, 21)
    assert coordinator.job_run.phase == "recovering"
    with pytest.raises(NotReady, match=r"the change to policy 2 \(async\) is under way \(drain"):
        ask(coordinator, "replicas=3")
    assert ask(coordinator, "mode=async") == (2, ASYNC)
    coordinator.settle()
    run = coordinator.job_run.run
    assert (run.generation, run.policies) == (3, (Followed(2, ASYNC, 2, 4),))
    worker.join()
    finish(coordinator, worker)


@pytest.mark.parametrize(("first", "then"), PAIRS, ids=str)
def test_a_coordinator_that_dies_before_it_has_stored_the_change_changes_nothing(
    tmp_path: Path, first: Policy, then: Policy
) -> None:
    coordinator, worker = start(tmp_path, **job(first))
    work(coordinator, worker, 2)
    ask(coordinator, *written(then))
    shards = list(coordinator.shards)
    for shard in shards:
        shard.obey()
    assert str(coordinator.job_run.changes).endswith("saving")
    again(coordinator, shards)
    run = coordinator.job_run.run
    assert (run.policy, run.settings, run.generation) == (1, first, 2)
    assert str(coordinator.job_run.changes) == ""
    worker.join()
    finish(coordinator, worker)


@pytest.mark.parametrize("begun", [(), (0,), (1,), (0, 1)])
@pytest.mark.parametrize(("first", "then"), PAIRS, ids=str)
def test_a_coordinator_that_dies_after_it_has_stored_the_change(
    tmp_path: Path, first: Policy, then: Policy, begun: tuple[int, ...]
) -> None:
    coordinator, worker = start(tmp_path, **job(first))
    work(coordinator, worker, 2)
    step = coordinator.job_run.standing[1]
    before = held(coordinator)
    ask(coordinator, *written(then))
    shards = list(coordinator.shards)
    for shard in shards:
        shard.obey()
    coordinator.disk.work()
    assert coordinator.store.get(SINCE) == 2
    for index in begun:
        shards[index].obey()
    again(coordinator, shards)
    run = coordinator.job_run.run
    assert (run.policy, run.settings, run.generation) == (2, then, 3)
    begins = [shard.begins[-1] for shard in shards]
    assert {begin.settings for begin in begins} == {then}
    if then.rounds and len(begun) < 2:
        assert {begin.restore for begin in begins} == {f"checkpoints/step-{step:08d}"}
        assert {begin.version for begin in begins} == {step}
    else:
        assert all(begin.keep for begin in begins)
    assert held(coordinator) == before
    assert coordinator.job_run.standing == (3, step)
    worker.join()
    finish(coordinator, worker)


@pytest.mark.parametrize("when", ["between", "begun"])
@pytest.mark.parametrize(("first", "then"), PAIRS, ids=str)
def test_a_shard_that_dies_after_the_change_was_stored(
    tmp_path: Path, first: Policy, then: Policy, when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    coordinator, worker = start(tmp_path, **job(first))
    work(coordinator, worker, 2)
    step = coordinator.job_run.standing[1]
    ask(coordinator, *written(then))
    for shard in coordinator.shards:
        shard.obey()
    if when == "between":
        # Its stream ends before the generation can be formed.
        monkeypatch.setattr(
            coordinator.job_run.generations.formation, "absent", lambda _shard: None
        )
        coordinator.job_run.generations.formation._watching.discard(1)
        coordinator.disk.work()
        assert coordinator.job_run.run.policy == 2
        assert coordinator.job_run.run.generation == 1
    else:
        coordinator.disk.work()
        coordinator.shards[0].obey()
    coordinator.shards[1].kill()
    coordinator.add(1, 21)
    coordinator.settle()
    assert coordinator.job_run.run.policy == 2
    assert coordinator.job_run.standing == (2 if when == "between" else 3, step)
    assert held(coordinator)[0] == held(coordinator)[1]
    begins = [shard.begins[-1] for shard in coordinator.shards]
    assert [bool(begin.restore) for begin in begins] == [then.rounds, True]
    worker.join()
    finish(coordinator, worker)


def test_a_change_falls_back_behind_itself_when_its_checkpoint_is_damaged(tmp_path: Path) -> None:
    coordinator, worker = start(tmp_path, **job(ASYNC, checkpoint_every=1))
    work(coordinator, worker, 1)
    step = coordinator.job_run.standing[1]
    work(coordinator, worker, 2)
    ask(coordinator, *written(SYNC))
    coordinator.settle()
    newest = tmp_path / coordinator.job_run.checkpoints.newest
    (newest / "manifest.json").write_text("{}")
    coordinator.shards[1].kill()
    coordinator.add(1, 21)
    coordinator.settle()
    begin = coordinator.shards[0].begins[-1]
    assert begin.restore < f"checkpoints/{newest.name}"
    assert begin.version is not None
    assert coordinator.job_run.standing == (3, begin.version)
    assert begin.version >= step
    worker.join()
    finish(coordinator, worker)


def test_a_change_that_cannot_be_stored_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    coordinator, worker = start(tmp_path, **job(ASYNC))
    work(coordinator, worker, 1)
    with monkeypatch.context() as full:
        full.setattr(coordinator.store, "put_all", refuse)
        ask(coordinator, *written(SYNC))
        coordinator.settle()
        coordinator.tick()
        assert coordinator.job_run.run.policy == 1
        assert str(coordinator.job_run.changes).endswith("storing")
        assert "it to be stored" in coordinator.job_run.waiting_for()
        assert coordinator.job_run.warnings.kept == [
            "policy 2 (sync replicas=2) to be stored: disk I/O error; tried again"
        ]
    coordinator.tick()
    coordinator.settle()
    assert coordinator.job_run.run.settings == SYNC


def test_a_state_that_cannot_be_saved_is_saved_again(tmp_path: Path) -> None:
    coordinator, worker = start(tmp_path, **job(ASYNC))
    work(coordinator, worker, 2)
    step = coordinator.job_run.standing[1]
    first = coordinator.shards[0]
    ask(coordinator, *written(SYNC))
    (tmp_path / "checkpoints" / f".tmp-step-{step:08d}").rmdir()
    for shard in list(coordinator.shards):
        engine = coordinator.engine
        order = shard.next()
        assert isinstance(order, SnapshotOrder)
        file = ShardFile(shard.index, shard.version)
        engine.shards.report_snapshot(
            SnapshotReport(shard.incarnation, 1, order.name, file, "disk full")
        )
    coordinator.settle()
    assert coordinator.job_run.run.policy == 1
    assert str(coordinator.job_run.changes).endswith("saving")
    coordinator.tick()
    coordinator.settle()
    assert coordinator.job_run.run.policy == 1, "not at once"
    coordinator.tick(REPEAT_S)
    coordinator.settle()
    assert coordinator.job_run.run.settings == SYNC
    assert coordinator.job_run.checkpoints.newest == f"checkpoints/step-{step:08d}.r1"
    assert first.begins[-1].version == step
