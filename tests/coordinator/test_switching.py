"""A running job comes to follow another policy: whatever dies meanwhile, and in whatever order."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from coordinator.history import Followed
from coordinator.snapshots import ShardFile
from coordinator.store import POLICIES, SINCE
from coordinator.switching import PAUSE_S
from coordinator.work import Begin, Evaluate, Merge, Round, SnapshotOrder, Train, Wait, Work
from psrpc.errors import InvalidJob, JobFailed, NotReady, StaleGeneration
from psrpc.policy import ASYNC, Policy
from tests.coordinator.bench import Coordinator, Shard, Worker, report, start
from tests.coordinator.course_bench import refuse

JOB: dict[str, Any] = {"epochs": 2, "train_records": 16, "total_updates": 8}
SYNC = Policy(mode="sync", replicas=2)
SSP = Policy(mode="ssp", staleness=1)


def job(policy: Policy, **changes: Any) -> dict[str, Any]:
    return {**JOB, **policy.to_json(), **changes}


def work(coordinator: Coordinator, worker: Worker, count: int) -> None:
    """``worker`` does so many batches, and holds none then."""
    while count:
        count -= do(worker, worker.lease())
        coordinator.settle()


def do(worker: Worker, found: Work) -> int:
    """``worker`` does this and asks for nothing more; how many batches it was."""
    engine = worker.coordinator.engine
    if isinstance(found, Round):
        engine.course.commit(worker.name, found.round, report(found.attempt))
        return 1
    assert isinstance(found, Train), found
    reports = worker.train(list(found.batches))
    engine.heartbeat_worker(worker.name, worker.incarnation, worker.generation, reports, "")
    return len(reports)


def ask(coordinator: Coordinator, *settings: str) -> tuple[int, Policy]:
    return coordinator.engine.set_policy(settings)


def held(coordinator: Coordinator) -> list[dict[int, list[tuple[int, int]]]]:
    """What each shard has applied."""
    ordered = sorted(coordinator.shards, key=lambda shard: shard.index)
    return [{e: list(p) for e, p in shard.applied.items() if len(p)} for shard in ordered]


def finish(coordinator: Coordinator, worker: Worker) -> None:
    """Trains to the end; every shard has every batch then."""
    for _ in range(100):
        coordinator.settle()
        if coordinator.course.phase == "done":
            break
        # What it has been leased already it is given again.
        worker.received = 0
        try:
            found = worker.lease()
        except StaleGeneration:
            worker.join()
            continue
        if isinstance(found, Round | Train):
            do(worker, found)
    assert coordinator.course.phase == "done"
    assert held(coordinator) == [{0: [(0, 16)], 1: [(0, 16)]}] * 2


PAIRS = [(ASYNC, SYNC), (SYNC, ASYNC), (ASYNC, SSP), (SYNC, Policy(mode="sync", replicas=3))]


def written(policy: Policy) -> list[str]:
    return [f"{key}={value}" for key, value in policy.to_json().items()]


@pytest.mark.parametrize(("first", "then"), PAIRS, ids=str)
def test_a_change_finishes_what_is_under_way_and_goes_on_from_there(
    tmp_path: Path, first: Policy, then: Policy
) -> None:
    coordinator, worker = start(tmp_path, **job(first))
    work(coordinator, worker, 2)
    under_way = worker.lease()
    assert ask(coordinator, *written(then)) == (2, then)
    other = Worker(coordinator, 2)
    if not first.rounds:
        waits = other.lease()
        assert isinstance(waits, Wait)
        assert f"the change to policy 2 ({then})" in waits.reason
    assert str(coordinator.course.changes) == f"the change to policy 2 ({then}): draining"
    assert coordinator.course.run.policy == 1
    batches = 2 + do(worker, under_way)
    step = batches
    if first.rounds:
        # The round that is under way is decided.
        assert do(other, other.lease()) == 1
        step, batches = 2, 4
    assert isinstance(worker.lease(), Wait)
    assert str(coordinator.course.changes).endswith(": saving")
    coordinator.settle()
    run = coordinator.course.run
    assert run.policies == (Followed(2, then, step, batches),)
    assert (run.policy, run.settings, run.generation, run.since) == (2, then, 2, 2)
    begins = [shard.begins[-1] for shard in coordinator.shards]
    assert begins == [Begin(2, 2, keep=True, settings=then, version=step)] * 2
    assert coordinator.course.standing == (2, step)
    assert coordinator.course.training.span.batches == batches
    assert coordinator.course.newest_checkpoint == f"checkpoints/step-{step:08d}"
    assert str(coordinator.course.changes) == ""
    with pytest.raises(StaleGeneration):
        worker.lease()
    worker.join()
    assert isinstance(worker.lease(), Round) == then.rounds
    finish(coordinator, worker)


def test_what_some_shards_have_is_done_by_all_before_a_change(tmp_path: Path) -> None:
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
    assert str(coordinator.course.changes).endswith(": draining")
    worker = Worker(coordinator, 5)
    again = worker.lease()
    assert isinstance(again, Train)
    assert [a.batch for a in again.batches] == [a.batch for a in lost]
    do(worker, again)
    coordinator.settle()
    assert coordinator.course.run.settings == SYNC
    assert held(coordinator)[0] == held(coordinator)[1]
    assert coordinator.course.standing == (3, 1 + len(lost))
    worker.join()
    finish(coordinator, worker)


def test_a_worker_that_is_lost_while_work_is_finished(tmp_path: Path) -> None:
    coordinator, worker = start(tmp_path, **job(SYNC))
    worker.round()
    ask(coordinator, "mode=async")
    coordinator.engine.leave_worker(worker.name, 1, "gone", fatal=False)
    assert str(coordinator.course.changes).endswith(": draining"), "it may be staged still"
    coordinator.settle()
    # Nobody has it now, and so the round was not begun.
    assert coordinator.course.run.policies == (Followed(2, ASYNC, 0, 0),)
    finish(coordinator, Worker(coordinator, 2))


def test_a_shard_that_falls_while_work_is_finished(tmp_path: Path) -> None:
    coordinator, worker = start(tmp_path, **job(SYNC, checkpoint_every=1))
    work(coordinator, worker, 4)
    worker.round()
    ask(coordinator, "mode=async")
    coordinator.shards[1].kill()
    coordinator.add(1, 21)
    assert coordinator.course.phase == "recovering"
    with pytest.raises(NotReady, match=r"the change to policy 2 \(async\) is under way \(drain"):
        ask(coordinator, "replicas=3")
    assert ask(coordinator, "mode=async") == (2, ASYNC)
    coordinator.settle()
    run = coordinator.course.run
    assert (run.generation, run.policies) == (3, (Followed(2, ASYNC, 2, 4),))
    worker.join()
    finish(coordinator, worker)


def test_a_second_change_waits_for_the_first(tmp_path: Path) -> None:
    coordinator, worker = start(tmp_path, **job(ASYNC))
    batches = worker.batches()
    assert ask(coordinator, "mode=async") == (1, ASYNC), "nothing changes"
    assert str(coordinator.course.changes) == ""
    assert ask(coordinator, *written(SSP)) == (2, SSP)
    assert ask(coordinator, "staleness=1", "mode=ssp") == (2, SSP)
    with pytest.raises(NotReady, match=r"policy 2 \(ssp staleness=1\) is under way"):
        ask(coordinator, "mode=sync", "replicas=2")
    worker.lease(worker.train(batches))
    coordinator.settle()
    assert ask(coordinator, "staleness=1") == (2, SSP), "it stands"
    assert ask(coordinator, "mode=sync", "replicas=2") == (3, SYNC)
    coordinator.settle()
    assert [f.number for f in coordinator.course.run.followed] == [1, 2, 3]


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        (["stalenes=4"], "a policy has no stalenes; did you mean staleness"),
        (["zzz=4"], "a policy has no zzz; known: mode, replicas"),
        (["staleness"], "expected key=value"),
        ([], "no settings"),
        (["staleness=4"], "staleness is for mode ssp, but mode is 'async'"),
        (["mode=ssp"], "mode is 'ssp' but staleness is not set"),
        (["mode=ssp", "staleness=-1"], "staleness is -1; expected a whole number of at least 0"),
        (["mode=sync", "replicas=2", "aggregate=3"], "aggregate is 3, but a round has only 2"),
        (["mode=sync", "replicas=5"], "5 micro-batches .replicas. has 20 records, and train hol"),
        (["local_steps=4"], "local_steps belongs to the job"),
        (["optimizer.learning_rate=1"], "belongs to the job"),
        (["dc_lambda=nan", "delay_compensation=constant"], "dc_lambda is 'nan'; expected a number"),
    ],
)
def test_settings_that_do_not_fit_are_refused_with_the_reason(
    tmp_path: Path, settings: list[str], why: str
) -> None:
    coordinator, _ = start(tmp_path, **job(ASYNC))
    with pytest.raises(InvalidJob, match=why):
        ask(coordinator, *settings)
    assert str(coordinator.course.changes) == ""


def test_what_is_not_named_stays_as_far_as_it_fits(tmp_path: Path) -> None:
    first = Policy(staleness_lr="inverse", max_staleness=3)
    coordinator, _ = start(tmp_path, **job(first))
    _, policy = ask(coordinator, "mode=ssp", "staleness=2")
    assert policy == Policy(mode="ssp", staleness=2, staleness_lr="inverse")
    coordinator.settle()
    _, policy = ask(coordinator, "staleness_lr=none", "delay_compensation=constant")
    assert policy == Policy(mode="ssp", staleness=2, delay_compensation="constant")


def test_what_local_steps_exclude(tmp_path: Path) -> None:
    coordinator, _ = start(tmp_path, **job(ASYNC, local_steps=2))
    with pytest.raises(InvalidJob, match="balance and local_steps exclude each other"):
        ask(coordinator, "mode=sync", "replicas=2", "balance=true")


def test_a_job_that_does_not_train_says_so(tmp_path: Path) -> None:
    coordinator = Coordinator(tmp_path, **job(ASYNC))
    with pytest.raises(NotReady, match="the job is waiting: shards 0, 1 to register"):
        ask(coordinator, *written(SSP))
    for index in range(2):
        coordinator.add(index, 10 + index)
    coordinator.settle()
    worker = Worker(coordinator, 1)
    with pytest.raises(NotReady, match="the job is initializing"):
        ask(coordinator, *written(SSP))
    worker.initialize()
    finish(coordinator, worker)
    with pytest.raises(JobFailed, match="the job is done"):
        ask(coordinator, *written(SSP))


def test_a_job_that_ends_meanwhile_needs_no_change(tmp_path: Path) -> None:
    coordinator, worker = start(tmp_path, **job(ASYNC, epochs=1))
    work(coordinator, worker, 3)
    last = worker.batches()
    ask(coordinator, *written(SYNC))
    worker.lease(worker.train(last))
    coordinator.settle()
    assert coordinator.course.phase == "done"
    assert coordinator.course.run.policy == 1
    assert coordinator.store.get(POLICIES) is None
    assert coordinator.course.training.warnings == [
        "the change to policy 2 (sync replicas=2) does not come about: all batches are done"
    ]


def test_a_job_that_is_stopped_meanwhile(tmp_path: Path) -> None:
    coordinator, worker = start(tmp_path, **job(ASYNC))
    batches = worker.batches()
    ask(coordinator, *written(SYNC))
    coordinator.course.stop()
    worker.lease(worker.train(batches))
    coordinator.settle()
    assert coordinator.course.run.policy == 1
    assert "does not come about: the job is stopping" in coordinator.course.training.warnings[0]


# What dies.


def again(coordinator: Coordinator, shards: list[Shard]) -> None:
    """The coordinator dies and comes again; the shards find it."""
    coordinator.restart()
    for shard in shards:
        shard.connect()
    coordinator.settle()


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
    assert str(coordinator.course.changes).endswith("saving")
    again(coordinator, shards)
    run = coordinator.course.run
    assert (run.policy, run.settings, run.generation) == (1, first, 2)
    assert str(coordinator.course.changes) == ""
    worker.join()
    finish(coordinator, worker)


@pytest.mark.parametrize("begun", [(), (0,), (1,), (0, 1)])
@pytest.mark.parametrize(("first", "then"), PAIRS, ids=str)
def test_a_coordinator_that_dies_after_it_has_stored_the_change(
    tmp_path: Path, first: Policy, then: Policy, begun: tuple[int, ...]
) -> None:
    coordinator, worker = start(tmp_path, **job(first))
    work(coordinator, worker, 2)
    step = coordinator.course.standing[1]
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
    run = coordinator.course.run
    assert (run.policy, run.settings, run.generation) == (2, then, 3)
    begins = [shard.begins[-1] for shard in shards]
    assert {begin.settings for begin in begins} == {then}
    if then.rounds and len(begun) < 2:
        assert {begin.restore for begin in begins} == {f"checkpoints/step-{step:08d}"}
        assert {begin.version for begin in begins} == {step}
    else:
        assert all(begin.keep for begin in begins)
    assert held(coordinator) == before
    assert coordinator.course.standing == (3, step)
    worker.join()
    finish(coordinator, worker)


@pytest.mark.parametrize("when", ["between", "begun"])
@pytest.mark.parametrize(("first", "then"), PAIRS, ids=str)
def test_a_shard_that_dies_after_the_change_was_stored(
    tmp_path: Path, first: Policy, then: Policy, when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    coordinator, worker = start(tmp_path, **job(first))
    work(coordinator, worker, 2)
    step = coordinator.course.standing[1]
    ask(coordinator, *written(then))
    for shard in coordinator.shards:
        shard.obey()
    if when == "between":
        # Its stream ends before the generation can be formed.
        monkeypatch.setattr(coordinator.course.generations.formation, "absent", lambda _shard: None)
        coordinator.course.generations.formation._watching.discard(1)
        coordinator.disk.work()
        assert coordinator.course.run.policy == 2
        assert coordinator.course.run.generation == 1
    else:
        coordinator.disk.work()
        coordinator.shards[0].obey()
    coordinator.shards[1].kill()
    coordinator.add(1, 21)
    coordinator.settle()
    assert coordinator.course.run.policy == 2
    assert coordinator.course.standing == (2 if when == "between" else 3, step)
    assert held(coordinator)[0] == held(coordinator)[1]
    begins = [shard.begins[-1] for shard in coordinator.shards]
    assert [bool(begin.restore) for begin in begins] == [then.rounds, True]
    worker.join()
    finish(coordinator, worker)


def test_a_change_falls_back_behind_itself_when_its_checkpoint_is_damaged(tmp_path: Path) -> None:
    coordinator, worker = start(tmp_path, **job(ASYNC, checkpoint_every=1))
    work(coordinator, worker, 1)
    step = coordinator.course.standing[1]
    work(coordinator, worker, 2)
    ask(coordinator, *written(SYNC))
    coordinator.settle()
    newest = tmp_path / coordinator.course.newest_checkpoint
    (newest / "manifest.json").write_text("{}")
    coordinator.shards[1].kill()
    coordinator.add(1, 21)
    coordinator.settle()
    begin = coordinator.shards[0].begins[-1]
    assert begin.restore < f"checkpoints/{newest.name}"
    assert begin.version is not None
    assert coordinator.course.standing == (3, begin.version)
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
        assert coordinator.course.run.policy == 1
        assert str(coordinator.course.changes).endswith("storing")
        assert "it to be stored" in coordinator.course.waiting_for()
        assert coordinator.course.training.warnings == [
            "policy 2 (sync replicas=2) to be stored: disk I/O error; tried again"
        ]
    coordinator.tick()
    coordinator.settle()
    assert coordinator.course.run.settings == SYNC


def test_a_state_that_cannot_be_saved_is_saved_again(tmp_path: Path) -> None:
    coordinator, worker = start(tmp_path, **job(ASYNC))
    work(coordinator, worker, 2)
    step = coordinator.course.standing[1]
    first = coordinator.shards[0]
    ask(coordinator, *written(SYNC))
    (tmp_path / "checkpoints" / f".tmp-step-{step:08d}").rmdir()
    for shard in list(coordinator.shards):
        engine = coordinator.engine
        order = shard.next()
        assert isinstance(order, SnapshotOrder)
        engine.report_snapshot(
            shard.incarnation, 1, order.name, ShardFile(shard.index, shard.version), "disk full"
        )
    coordinator.settle()
    assert coordinator.course.run.policy == 1
    assert str(coordinator.course.changes).endswith("saving")
    coordinator.tick()
    coordinator.settle()
    assert coordinator.course.run.policy == 1, "not at once"
    coordinator.tick(PAUSE_S)
    coordinator.settle()
    assert coordinator.course.run.settings == SYNC
    assert coordinator.course.newest_checkpoint == f"checkpoints/step-{step:08d}.r1"
    assert first.begins[-1].version == step


# Evaluations.


def test_what_is_kept_to_be_evaluated_is_evaluated_first(tmp_path: Path) -> None:
    coordinator, worker = start(tmp_path, **job(ASYNC, eval_records=8))
    work(coordinator, worker, 4)
    ask(coordinator, *written(SYNC))
    coordinator.settle()
    assert coordinator.course.run.policy == 1
    assert isinstance(worker.lease(), Evaluate)
    coordinator.engine.report_evaluated(worker.caller, "epoch-0", 0, 8, ())
    assert isinstance(worker.lease(), Merge)
    assert coordinator.course.run.policy == 1
    coordinator.engine.report_merged(worker.caller, "epoch-0", {"loss": 0.5})
    coordinator.settle()
    assert coordinator.course.run.policy == 2
    assert coordinator.course.training.results[0][0] == "epoch-0"


# The job's rule.


def rule(policy: Policy, epoch: int = 1) -> dict[str, Any]:
    return {"then": {"policy": policy.to_json(), "epoch": epoch}}


@pytest.mark.parametrize(("first", "then"), PAIRS, ids=str)
def test_a_job_goes_over_by_its_rule(tmp_path: Path, first: Policy, then: Policy) -> None:
    coordinator, worker = start(tmp_path, **job(first, **rule(then)))
    work(coordinator, worker, 4)
    run = coordinator.course.run
    step = 2 if first.rounds else 4
    assert run.policies == (Followed(2, then, step, 4),)
    assert held(coordinator) == [{0: [(0, 16)]}] * 2
    assert coordinator.course.training.warnings == []
    worker.join()
    finish(coordinator, worker)


@pytest.mark.parametrize(("first", "then"), PAIRS, ids=str)
def test_the_rule_is_due_after_a_restart(tmp_path: Path, first: Policy, then: Policy) -> None:
    coordinator, worker = start(tmp_path, **job(first, **rule(then)))
    shards = list(coordinator.shards)
    # The last batch is done and the coordinator dies before it can go over.
    done = 0
    while done < 4:
        done += do(worker, worker.lease())
        for shard in shards:
            shard.obey()
    again(coordinator, shards)
    assert coordinator.course.run.settings == then
    worker.join()
    finish(coordinator, worker)


def test_the_rule_waits_for_batches_that_are_lost_again(tmp_path: Path) -> None:
    coordinator, worker = start(tmp_path, **job(SYNC, **rule(ASYNC)))
    for _ in range(4):
        worker.commit(worker.round())
    assert str(coordinator.course.changes)
    coordinator.shards[1].kill()
    coordinator.add(1, 21)
    coordinator.settle()
    assert coordinator.course.run.policy == 1
    assert str(coordinator.course.changes) == ""
    worker.join()
    work(coordinator, worker, 4)
    assert coordinator.course.run.policies == (Followed(2, ASYNC, 2, 4),)
    worker.join()
    finish(coordinator, worker)


def test_a_change_by_hand_is_stronger_than_the_rule(tmp_path: Path) -> None:
    coordinator, worker = start(tmp_path, **job(SYNC, **rule(ASYNC)))
    work(coordinator, worker, 2)
    ask(coordinator, *written(SSP))
    coordinator.settle()
    assert coordinator.course.training.warnings == [
        "the job's rule (async after epoch 1) is not followed: its policy was changed by hand"
    ]
    shards = list(coordinator.shards)
    again(coordinator, shards)
    worker.join()
    finish(coordinator, worker)
    assert coordinator.course.run.settings == SSP


# Rates.


def test_shards_are_told_how_to_scale_the_learning_rate(tmp_path: Path) -> None:
    changes = job(ASYNC, scale_lr="linear", warmup_epochs=1.5)
    coordinator, _ = start(tmp_path, **changes)
    begin = coordinator.shards[0].begins[-1]
    assert (begin.rate_scale, begin.warmup_updates) == (1.0, 0)
    ask(coordinator, "mode=sync", "replicas=3")
    coordinator.settle()
    begin = coordinator.shards[0].begins[-1]
    assert (begin.rate_scale, begin.warmup_updates) == (3.0, 3)
    ask(coordinator, "aggregate=2")
    coordinator.settle()
    begin = coordinator.shards[0].begins[-1]
    assert (begin.rate_scale, begin.warmup_updates) == (2.0, 3)
