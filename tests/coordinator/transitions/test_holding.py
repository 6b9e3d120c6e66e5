"""An attended job holds, says so once all is saved, and goes on as its attendant says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from coordinator.checkpoints.choice import Chosen
from coordinator.core.run import RestoredCheckpoint, global_step
from coordinator.core.work import Train, Wait
from coordinator.transitions.holding import HoldEnd, JobHold
from psrpc.core.errors import CheckpointError, InvalidArgument, JobFailed, NotReady
from psrpc.core.policy import ASYNC, Policy
from tests.coordinator.switching_job import SSP, SYNC, again, held, work
from tests.coordinator.whole_coordinator import Coordinator, Worker, start
from tests.coordinator.working_loop import LOSSES, Loop

POLICIES = [ASYNC, SYNC, SSP]
JOB: dict[str, Any] = {"epochs": 2, "train_records": 16, "total_updates": 8}


def attend(tmp_path: Path, policy: Policy = ASYNC, **changes: Any) -> tuple[Coordinator, Worker]:
    """A job of two epochs of four batches, which holds before the first."""
    coordinator, worker = start(tmp_path, attended=True, **{**JOB, **policy.to_json(), **changes})
    coordinator.settle()
    return coordinator, worker


def hold_of(coordinator: Coordinator, after: int = -1) -> JobHold:
    coordinator.settle()
    hold = coordinator.job_run.holding.look(after)
    assert hold is not None, coordinator.job_run.waiting_for()
    return hold


def end(coordinator: Coordinator, until: int, **more: Any) -> HoldEnd:
    """Ends the present hold."""
    ended = HoldEnd(hold_of(coordinator).at, until, **more)
    assert coordinator.job_run.holding.end(ended)
    return ended


def replace_a_lost_shard(coordinator: Coordinator) -> None:
    """Kills one of two shards, and lets another process take its place once that was noticed."""
    lost, kept = coordinator.shards
    lost.kill()
    coordinator.tick(60.0)
    coordinator.add(lost.index, 20)
    kept.beat()


@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_a_job_holds_before_its_first_step_and_at_each_limit(
    tmp_path: Path, policy: Policy
) -> None:
    coordinator, worker = attend(tmp_path, policy)
    assert hold_of(coordinator) == JobHold(0, 0, 0, "checkpoints/step-00000000", {})
    waits = worker.lease()
    assert isinstance(waits, Wait)
    assert waits.reason == "its attendant (held at batch 0; it called 0.0 s ago)"
    end(coordinator, 2)
    work(coordinator, worker, 2)
    assert isinstance(worker.lease(), Wait)
    hold = hold_of(coordinator, after=0)
    step = 1 if policy.rounds else 2
    assert hold == JobHold(2, step, 0, f"checkpoints/step-{step:08d}", {})
    end(coordinator, 8)
    work(coordinator, worker, 6)
    assert held(coordinator) == [{0: [(0, 16)], 1: [(0, 16)]}] * 2


def test_a_job_without_its_attendant_says_so(tmp_path: Path) -> None:
    coordinator, _ = attend(tmp_path)
    expected = "its attendant (held at batch 0; it has not called yet)"
    assert coordinator.job_run.waiting_for() == expected
    assert coordinator.job_run.held_up() == expected


def test_a_hold_is_reported_once_its_checkpoint_is_committed(tmp_path: Path) -> None:
    coordinator, worker = attend(tmp_path)
    end(coordinator, 1)
    [attempt] = worker.batches()
    worker.lease(worker.train([attempt]))
    for shard in coordinator.shards:
        shard.obey()
    assert coordinator.disk.queue, "all shards have written, and nothing is committed"
    assert coordinator.job_run.holding.look(0) is None
    assert coordinator.job_run.waiting_for() == "a checkpoint to be committed"
    coordinator.disk.work()
    assert hold_of(coordinator, 0).checkpoint == "checkpoints/step-00000001"


def test_a_limit_of_rounds_is_rounded_up_to_a_whole_round(tmp_path: Path) -> None:
    coordinator, worker = attend(tmp_path, SYNC)
    end(coordinator, 1)
    work(coordinator, worker, 2)
    assert hold_of(coordinator, 0).at == 2


@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_an_epoch_that_ends_at_a_hold_is_evaluated_first(tmp_path: Path, policy: Policy) -> None:
    coordinator, worker = attend(tmp_path, policy, eval_records=4)
    loop = Loop(coordinator, worker)
    holding = coordinator.job_run.holding
    end(coordinator, 4)
    work(coordinator, worker, 4)
    assert holding.look(0) is None
    assert coordinator.job_run.waiting_for().startswith("epoch 1 to be evaluated")
    loop.run(lambda: holding.look(0) is not None)
    assert hold_of(coordinator).evaluation == {"loss": LOSSES[0]}
    assert hold_of(coordinator).epoch == 1
    end(coordinator, 8)
    loop.run(lambda: holding.look(4) is not None)
    assert (hold_of(coordinator).at, coordinator.job_run.phase) == (8, "finishing")
    assert hold_of(coordinator).evaluation == {"loss": LOSSES[1]}
    for _ in range(3):
        loop.turn()
    assert coordinator.job_run.phase == "finishing", "it waits for its attendant"
    end(coordinator, 9)
    loop.run()


def test_an_epoch_that_ends_within_a_segment_is_evaluated_without_a_hold(tmp_path: Path) -> None:
    coordinator, worker = attend(tmp_path, eval_records=4)
    end(coordinator, 9)
    Loop(coordinator, worker).run()
    rows = coordinator.job_run.training.epochs.history.rows
    assert [row.evaluation for row in rows] == [{"loss": loss} for loss in LOSSES[:2]]


def test_the_end_of_a_hold_may_be_repeated_and_not_be_changed(tmp_path: Path) -> None:
    coordinator, _ = attend(tmp_path)
    holding = coordinator.job_run.holding
    ended = end(coordinator, 4)
    assert holding.end(ended)
    with pytest.raises(InvalidArgument, match=r"hold at batch 0 was ended with .*until=4"):
        holding.end(HoldEnd(0, 5))
    with pytest.raises(NotReady, match="does not hold at batch 4 now; it is training"):
        holding.end(HoldEnd(4, 5))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (HoldEnd(1, 4), "holds at batch 0, and not at 1"),
        (HoldEnd(0, 0), "until is 0; expected more than 0 batches"),
        (HoldEnd(0, 1, -0.5), "rate is -0.5; expected a factor of at least 0"),
        (HoldEnd(0, 1, float("nan")), "rate is nan"),
        (HoldEnd(0, 1, None, "other"), "restore is 'other'; expected .* 'step-00000000.'"),
    ],
)
def test_an_end_that_cannot_be_is_refused_and_the_hold_goes_on(
    tmp_path: Path, wrong: HoldEnd, message: str
) -> None:
    coordinator, _ = attend(tmp_path)
    with pytest.raises(InvalidArgument, match=message):
        coordinator.job_run.holding.end(wrong)
    assert hold_of(coordinator).at == 0


def test_a_job_that_is_not_attended_has_no_hold_to_end(tmp_path: Path) -> None:
    coordinator, _ = start(tmp_path)
    with pytest.raises(InvalidArgument, match="does not hold; start it with --attended"):
        coordinator.job_run.holding.end(HoldEnd(0, 1))
    with pytest.raises(InvalidArgument, match="does not hold; start it with --attended"):
        coordinator.job_run.holding.look(-1)


@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_a_rate_is_a_factor_of_the_jobs_own(tmp_path: Path, policy: Policy) -> None:
    coordinator, worker = attend(tmp_path, policy)
    scales = []
    for until, rate in ((2, 0.5), (4, 0.0), (6, None), (8, 1.0)):
        end(coordinator, until, rate=rate)
        coordinator.settle()
        worker.join()
        work(coordinator, worker, 2)
        scales.append(coordinator.shards[0].begins[-1].rate_scale)
    assert scales == [0.5, 0.0, 0.0, 1.0]
    assert coordinator.job_run.run.policy == 4
    assert held(coordinator) == [{0: [(0, 16)], 1: [(0, 16)]}] * 2


@pytest.mark.parametrize("policy", [ASYNC, SYNC], ids=str)
def test_a_coordinator_that_is_started_again_holds_where_it_stands(
    tmp_path: Path, policy: Policy
) -> None:
    coordinator, worker = attend(tmp_path, policy)
    ended = end(coordinator, 6)
    work(coordinator, worker, 2)
    shards = list(coordinator.shards)
    again(coordinator, shards)
    with pytest.raises(InvalidArgument, match="holds at batch 2, and not at 0"):
        coordinator.job_run.holding.end(ended)
    # Whatever the attendant has ended before.
    assert hold_of(coordinator, after=2).at == 2
    end(coordinator, 6)
    worker.join()
    work(coordinator, worker, 4)
    assert hold_of(coordinator, after=2).at == 6


def test_a_hold_comes_again_once_a_lost_shard_is_replaced(tmp_path: Path) -> None:
    coordinator, worker = attend(tmp_path, SYNC)
    end(coordinator, 4)
    work(coordinator, worker, 4)
    hold = hold_of(coordinator, after=0)
    replace_a_lost_shard(coordinator)
    assert coordinator.job_run.phase == "recovering"
    coordinator.settle()
    assert coordinator.job_run.run.generation == 2
    assert hold_of(coordinator, after=0) == hold


@pytest.mark.parametrize("policy", [ASYNC, SYNC], ids=str)
def test_a_hold_keeps_its_checkpoint_whichever_generations_begin(
    tmp_path: Path, policy: Policy
) -> None:
    """Otherwise that of a later generation were newer than a copy of it."""
    coordinator, worker = attend(tmp_path, policy)
    end(coordinator, 4)
    work(coordinator, worker, 4)
    hold = hold_of(coordinator, after=0)
    replace_a_lost_shard(coordinator)
    coordinator.settle()
    coordinator.engine.set_policy(["mode=ssp", "staleness=2"])
    coordinator.settle()
    # By time, too, none is written of the same state.
    coordinator.tick(3600.0)
    coordinator.settle()
    assert (coordinator.job_run.run.generation, coordinator.job_run.run.policy) == (3, 2)
    assert hold_of(coordinator, after=0) == hold
    assert coordinator.job_run.checkpoints.newest == hold.checkpoint


@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_few_of_many_rates_are_kept_and_all_steps_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, policy: Policy
) -> None:
    monkeypatch.setattr("coordinator.core.run.MOST_POLICIES", 2)
    coordinator, worker = attend(tmp_path, policy)
    for until, rate in ((2, 0.5), (4, 0.25), (6, 0.5), (8, 0.125)):
        end(coordinator, until, rate=rate)
        coordinator.settle()
        worker.join()
        work(coordinator, worker, 2)
    followed = coordinator.job_run.run.followed
    assert [(one.number, one.rate) for one in followed] == [(1, 1.0), (4, 0.5), (5, 0.125)]
    per_epoch = coordinator.job_run.run.description.per_epoch
    taken = 2 if policy.rounds else 1
    assert [global_step(followed, done, per_epoch) for done in (2, 4, 6, 8)] == [
        done // taken for done in (2, 4, 6, 8)
    ]
    assert held(coordinator) == [{0: [(0, 16)], 1: [(0, 16)]}] * 2


def test_a_hold_ends_with_a_rate_once_another_change_of_the_policy_is_over(tmp_path: Path) -> None:
    coordinator, worker = attend(tmp_path)
    hold_of(coordinator)
    coordinator.job_run.training.orders.evaluations.add("epoch-1", "kept", 0)
    coordinator.engine.set_policy(["mode=ssp", "staleness=2"])
    assert coordinator.job_run.holding.end(HoldEnd(0, 2, rate=0.5))
    coordinator.job_run.training.orders.evaluations.drop("kept")
    coordinator.tick()
    coordinator.settle()
    followed = coordinator.job_run.run.followed
    assert [(one.number, one.settings.mode, one.rate) for one in followed] == [
        (1, "async", 1.0),
        (2, "ssp", 1.0),
        (3, "ssp", 0.5),
    ]
    worker.join()
    work(coordinator, worker, 2)
    assert hold_of(coordinator, after=0).at == 2


def test_a_hold_may_be_ended_while_a_lost_shard_is_replaced(tmp_path: Path) -> None:
    coordinator, worker = attend(tmp_path, SYNC)
    end(coordinator, 4)
    work(coordinator, worker, 4)
    hold_of(coordinator, after=0)
    replace_a_lost_shard(coordinator)
    assert coordinator.job_run.holding.end(HoldEnd(4, 8, rate=0.5))
    coordinator.settle()
    assert coordinator.job_run.run.followed[-1].rate == 0.5
    worker.join()
    work(coordinator, worker, 4)
    assert hold_of(coordinator, after=4).at == 8


class Restoring:
    """A job that holds at batch 4, whose disk takes any name for a changed copy."""

    def __init__(self, tmp_path: Path, policy: Policy) -> None:
        self.coordinator, self.worker = attend(tmp_path, policy)
        end(self.coordinator, 4)
        work(self.coordinator, self.worker, 4)
        self.hold = hold_of(self.coordinator, after=0)
        self.name = self.hold.checkpoint.rpartition("/")[2] + ".set"
        directory = tmp_path / self.hold.checkpoint
        directory.with_name(self.name).mkdir()
        for file in directory.glob("shard-*"):
            (directory.with_name(self.name) / file.name).write_bytes(file.read_bytes())
        self.found: Chosen | str = Chosen(
            RestoredCheckpoint(self.name, self.hold.global_step), "r1", 1, ()
        )
        disk: Any = self.coordinator.disk

        def check_copy(name: str, of: str, done: Any) -> None:
            assert (name, f"checkpoints/{of}") == (self.name, self.hold.checkpoint)
            disk.start("a check", lambda: self.found, done)

        disk.check_copy = check_copy

    def end(self, rate: float | None = None) -> HoldEnd:
        ended = HoldEnd(4, 8, rate, self.name)
        assert not self.coordinator.job_run.holding.end(ended), "the disk is asked first"
        self.coordinator.disk.work()
        return ended


@pytest.mark.parametrize("rate", [None, 0.5])
@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_all_shards_restore_a_changed_checkpoint_and_go_on_from_it(
    tmp_path: Path, policy: Policy, rate: float | None
) -> None:
    job = Restoring(tmp_path, policy)
    coordinator = job.coordinator
    ended = job.end(rate)
    assert coordinator.job_run.holding.end(ended), "accepted by now"
    coordinator.settle()
    begins = [shard.begins[-1] for shard in coordinator.shards]
    assert [begin.restore for begin in begins] == [f"checkpoints/{job.name}"] * 2
    assert {begin.rate_scale for begin in begins} == {rate or 1.0}
    assert coordinator.store.newest_checkpoint() == (job.name, 1, job.hold.global_step)
    assert coordinator.job_run.checkpoints.newest == f"checkpoints/{job.name}"
    assert coordinator.job_run.warnings.kept == []
    job.worker.join()
    work(coordinator, job.worker, 4)
    assert held(coordinator) == [{0: [(0, 16)], 1: [(0, 16)]}] * 2


@pytest.mark.parametrize("policy", [ASYNC, SYNC], ids=str)
def test_a_shard_that_is_lost_while_others_restore_restores_the_same(
    tmp_path: Path, policy: Policy
) -> None:
    job = Restoring(tmp_path, policy)
    coordinator = job.coordinator
    job.end()
    lost, kept = coordinator.shards
    kept.obey()
    lost.kill()
    coordinator.tick(60.0)
    kept.beat()
    again_there = coordinator.add(lost.index, 30)
    coordinator.settle()
    for shard in (kept, again_there):
        assert shard.begins[-1].restore == f"checkpoints/{job.name}", shard.index
    assert coordinator.job_run.phase == "training"


def test_a_checkpoint_that_is_no_changed_copy_is_refused_and_the_hold_goes_on(
    tmp_path: Path,
) -> None:
    job = Restoring(tmp_path, SYNC)
    job.found = "it has another plan"
    ended = job.end()
    with pytest.raises(CheckpointError, match="it has another plan"):
        job.coordinator.job_run.holding.end(ended)
    assert hold_of(job.coordinator) == job.hold
    end(job.coordinator, 8)


@pytest.mark.parametrize("policy", [ASYNC, SYNC], ids=str)
def test_a_checkpoint_that_a_shard_cannot_restore_ends_the_job(
    tmp_path: Path, policy: Policy
) -> None:
    job = Restoring(tmp_path, policy)
    coordinator = job.coordinator
    coordinator.shards[1].error = "its file is torn"
    ended = job.end()
    coordinator.settle()
    job_run = coordinator.job_run
    assert (job_run.phase, job_run.reason) == (
        "failed",
        f"shard 1 cannot restore checkpoints/{job.name}: its file is torn",
    )
    assert not job_run.everyone_knows
    assert job_run.holding.look(4) is None
    assert job_run.holding.told
    with pytest.raises(JobFailed, match="its file is torn"):
        job_run.holding.end(HoldEnd(ended.at, 7))


def test_versions_that_are_not_the_holds_end_the_job(tmp_path: Path) -> None:
    job = Restoring(tmp_path, SYNC)
    job.found = Chosen(RestoredCheckpoint(job.name, 7), "r1", 1, ())
    job.end()
    job.coordinator.settle()
    job_run = job.coordinator.job_run
    assert job_run.phase == "failed"
    assert "have restored versions [2]" in job_run.reason


def test_a_job_that_is_stopped_at_a_hold_holds_no_more(tmp_path: Path) -> None:
    coordinator, _ = attend(tmp_path)
    hold_of(coordinator)
    coordinator.job_run.stop()
    assert coordinator.job_run.phase == "failed", "there was nothing to finish, and all is saved"
    assert coordinator.job_run.holding.look(-1) is None
    with pytest.raises(JobFailed, match="stopped by a signal"):
        coordinator.job_run.holding.end(HoldEnd(0, 1))


def test_a_job_that_stops_does_not_hold(tmp_path: Path) -> None:
    coordinator, worker = attend(tmp_path)
    end(coordinator, 1)
    work(coordinator, worker, 1)
    hold_of(coordinator, after=0)
    # As with a checkpoint that the disk has refused until now.
    coordinator.job_run.phase = "stopping"
    assert coordinator.job_run.holding.look(0) is None
    with pytest.raises(NotReady, match="does not hold at batch 1 now; it is stopping"):
        coordinator.job_run.holding.end(HoldEnd(1, 2))


def test_an_attended_job_that_is_stopped_says_so_to_its_attendant(tmp_path: Path) -> None:
    coordinator, worker = attend(tmp_path)
    end(coordinator, 8)
    found = worker.lease()
    assert isinstance(found, Train)
    coordinator.job_run.stop()
    coordinator.settle()
    coordinator.tick(10.0)
    coordinator.settle()
    assert coordinator.job_run.phase == "failed"
    assert not coordinator.job_run.holding.told
    assert coordinator.job_run.holding.look(0) is None
    assert coordinator.job_run.holding.told
