"""The worker's protocol: every path by hand."""

from __future__ import annotations

import pytest

from psrpc.core.errors import (
    InvalidArgument,
    InvalidJob,
    JobFailed,
    NotReady,
    OutcomeUnknown,
    RoundPassed,
    StaleGeneration,
    TableFull,
)
from psrpc.v1 import coordinator_pb2 as pb
from psrpc.v1 import types_pb2 as types
from tests.pserver.shards import signed
from tests.worker.protocol.builders import Driver, attempt, batch, task, work
from tests.worker.scripted_coordinator import FINISHED
from worker.protocol import actions as does
from worker.protocol.actions import (
    Action,
    BeginCommit,
    Commit,
    Committed,
    Compute,
    Computed,
    Done,
    Evaluate,
    Expect,
    Initialize,
    Join,
    Lease,
    LeaseAhead,
    Leave,
    Merge,
    Pull,
    Push,
    Pushed,
    PushPull,
    Register,
    Rejoin,
    ReportWork,
    Settle,
    TakeBack,
    TakeCommit,
    TakeLease,
)
from worker.protocol.done import DoneBatch, Stopped


def test_a_task_is_run_in_order_and_the_next_is_asked_for_at_its_half() -> None:
    worker = Driver()
    worker.joins(task(0, 1, 2, 3))
    worker.expects(Pull(batch=batch(0)))
    worker.expects(Expect((batch(0), batch(1), batch(2), batch(3))))
    worker.applies(0, following=1)
    worker.applies(1, following=2)
    worker.expects(LeaseAhead())
    worker.applies(2, following=3)
    worker.applies(3)
    worker.expects(TakeLease(), task(4))
    # One batch is half done before it begins; parameters came with the last push.
    worker.expects(LeaseAhead())
    worker.applies(4)
    worker.expects(TakeLease(), FINISHED)
    worker.leaves(Leave("the job is done"), Stopped)


def test_a_task_with_a_clock_is_pulled_for_only_when_others_have_begun_to_wait() -> None:
    worker = Driver()
    clock, later = types.WorkerClock(entry=3, steps=7), types.WorkerClock(entry=5, steps=9)
    worker.joins(task(0, clock=clock))
    worker.expects(Pull(batch=batch(0), clock=clock))
    worker.expects(Expect((batch(0),)))
    worker.expects(LeaseAhead())
    worker.applies(0, clock=clock)
    worker.expects(TakeLease(), task(1, 2, clock=clock))
    worker.applies(1, following=2, clock=clock)
    worker.expects(LeaseAhead())
    worker.applies(2, clock=clock)
    worker.expects(TakeLease(), task(3, clock=later))
    worker.expects(Pull(batch=batch(3), clock=later))
    worker.expects(LeaseAhead())
    worker.applies(3, clock=later)
    worker.expects(TakeLease(), FINISHED)
    worker.leaves(Leave("the job is done"), Stopped)


def test_a_batch_that_is_not_finite_is_pushed_as_skipped() -> None:
    worker = Driver()
    worker.joins(task(0))
    worker.expects(Pull(batch=batch(0)))
    worker.expects(Expect((batch(0),)))
    worker.expects(LeaseAhead())
    worker.expects(Compute(batch(0)), Computed(7.0, False))
    worker.expects(PushPull(batch(0), 1, skip=True), Pushed())
    worker.expects(Settle())
    assert worker.action == Done(DoneBatch(batch(0), 1, 7.0, skipped=True))


def test_shards_that_had_a_batch_have_not_used_its_gradient_unless_asked_again() -> None:
    worker = Driver()
    worker.joins(task(0))
    worker.expects(Pull(batch=batch(0)))
    worker.expects(Expect((batch(0),)))
    worker.expects(LeaseAhead())
    worker.expects(Compute(batch(0)), Computed(0.5, True))
    pushed = Pushed(had=(0, 2), asked_again=frozenset({1, 2}))
    worker.expects(PushPull(batch(0), 1), pushed)
    assert worker.action == Settle(unused=(0,))


def test_a_refused_batch_is_reported_and_its_gradient_settled_by_shard() -> None:
    worker = Driver()
    worker.joins(task(0))
    worker.expects(Pull(batch=batch(0)))
    worker.expects(Expect((batch(0),)))
    worker.expects(LeaseAhead())
    worker.expects(Compute(batch(0)), Computed(0.5, True))
    # Shard 0 had it from an attempt before, shard 1 uses it, shards 2 and 3 never will.
    pushed = Pushed(9, had=(0,), asked_again=frozenset({3}), too_stale=(2, 3))
    worker.expects(PushPull(batch(0), 1), pushed)
    worker.expects(Settle(unused=(0, 2, 3)))
    worker.expects(Done(DoneBatch(batch(0), 1, 0.5, 9, too_stale=True)))
    # The answer to the push carried the newest parameters.
    worker.expects(TakeLease(), task(1))
    worker.expects(LeaseAhead())
    worker.applies(1)


def test_a_task_that_is_to_be_fresh_begins_with_a_pull() -> None:
    worker = Driver()
    fresh = pb.Lease(train=pb.TrainTask(batches=[attempt(1), attempt(2)], fresh=True))
    worker.joins(task(0))
    worker.expects(Pull(batch=batch(0)))
    worker.expects(Expect((batch(0),)))
    worker.expects(LeaseAhead())
    worker.applies(0)
    worker.expects(TakeLease(), fresh)
    worker.expects(Pull(batch=batch(1)))
    worker.applies(1, following=2)
    worker.expects(LeaseAhead())
    worker.applies(2)
    worker.expects(TakeLease(), task(3))
    assert worker.action == LeaseAhead()


def test_a_backup_worker_pulls_the_newest_and_says_how_old_its_gradient_was() -> None:
    decision = signed(types.Decision(generation=1, round=6, attempts=[attempt(0)]))
    newest = pb.RoundWork(round=7, attempt=attempt(1), decision=decision, newest=True)
    again = pb.RoundWork(round=7, attempt=attempt(5), decision=decision, newest=True)
    worker = Driver()
    worker.joins(pb.Lease(round=newest))
    worker.expects(Expect((batch(1),), instead=True))
    worker.expects(Pull(None, decision, batch(1)))
    worker.expects(Compute(batch(1)), Computed(0.5, True))
    worker.expects(Push(batch(1), 2), Pushed(2))
    worker.expects(Settle())
    worker.expects(Commit(7, DoneBatch(batch(1), 2, 0.5, 2)), Committed(pb.Lease(round=again)))
    worker.expects(Expect((batch(5),), instead=True))
    # What it has will do.
    assert worker.action == Compute(batch(5))


def test_parameters_of_a_round_are_pulled_once_and_the_next_batch_is_guessed() -> None:
    decision = signed(types.Decision(generation=1, round=0, attempts=[attempt(0)]))
    worker = Driver()
    worker.joins(work(0, 0))
    worker.expects(Expect((batch(0),), instead=True))
    worker.expects(Pull(0, batch=batch(0)))
    worker.expects(Compute(batch(0)), Computed(0.5, True))
    worker.expects(Push(batch(0), 1), Pushed())
    worker.expects(Settle())
    worker.expects(Commit(0, DoneBatch(batch(0), 1, 0.5)), Committed(work(0, 1)))
    worker.expects(Expect((batch(1),), instead=True))
    # Round 0 is here already.
    worker.expects(Compute(batch(1)), Computed(0.5, True))
    worker.expects(Push(batch(1), 2), Pushed())
    worker.expects(Settle())
    worker.expects(Commit(0, DoneBatch(batch(1), 2, 0.5)), Committed(work(1, 2, decision)))
    worker.expects(Expect((batch(2),), instead=True))
    worker.expects(Pull(1, decision, batch(2)))
    worker.expects(Compute(batch(2)), Computed(0.5, True))
    # The guess was right, so another is made.
    worker.expects(Expect((batch(3),), instead=True))
    worker.expects(Push(batch(2), 3), Pushed())
    worker.expects(Settle())
    worker.expects(Commit(1, DoneBatch(batch(2), 3, 0.5)), Committed(work(1, 3, decision)))
    # It is expected already.
    assert worker.action == Compute(batch(3))


@pytest.mark.parametrize("pulled", [True, False])
def test_parameters_that_came_during_a_commit_are_not_pulled_again(pulled: bool) -> None:
    decision = signed(types.Decision(generation=1, round=0, attempts=[attempt(0)]))
    worker = Driver()
    worker.joins(pb.Lease(round=pb.RoundWork(round=0, attempt=attempt(0), pull_next=True)))
    worker.expects(Expect((batch(0),), instead=True))
    worker.expects(Pull(0, batch=batch(0)))
    worker.expects(Compute(batch(0)), Computed(0.5, True))
    worker.expects(Push(batch(0), 1), Pushed())
    worker.expects(Settle())
    commit = Commit(0, DoneBatch(batch(0), 1, 0.5), pull_next=True)
    worker.expects(commit, Committed(work(1, 1, decision), pulled))
    worker.expects(Expect((batch(1),), instead=True))
    if not pulled:
        worker.expects(Pull(1, decision, batch(1)))
    assert worker.action == Compute(batch(1))


COMMIT = DoneBatch(batch(0), 1, 0.5)


def leased_ahead() -> Driver:
    """A worker that commits batch 0, and has been leased batch 1 of the same round ahead."""
    worker = Driver()
    ahead = pb.RoundWork(round=0, attempt=attempt(0), ahead=attempt(1))
    worker.joins(pb.Lease(round=ahead))
    worker.expects(Expect((batch(0),), instead=True))
    worker.expects(Pull(0, batch=batch(0)))
    worker.expects(Compute(batch(0)), Computed(0.5, True))
    worker.expects(Expect((batch(1),), instead=True))
    worker.expects(Push(batch(0), 1), Pushed())
    worker.expects(Settle())
    worker.expects(BeginCommit(0, COMMIT))
    return worker


def test_a_micro_batch_that_is_leased_ahead_is_computed_during_the_commit() -> None:
    worker = leased_ahead()
    worker.expects(Compute(batch(1)), Computed(0.25, True))
    following = pb.RoundWork(round=0, attempt=attempt(1), pull_next=True)
    worker.expects(TakeCommit(), pb.Lease(round=following))
    worker.expects(Push(batch(1), 2), Pushed())
    worker.expects(Settle())
    assert worker.action == Commit(0, DoneBatch(batch(1), 2, 0.25), pull_next=True)


@pytest.mark.parametrize("other", [work(0, 2), work(1, 1), task(1)], ids=str)
def test_a_gradient_computed_ahead_and_not_leased_is_taken_back(other: pb.Lease) -> None:
    worker = leased_ahead()
    worker.expects(Compute(batch(1)), Computed(0.25, True))
    worker.expects(TakeCommit(), other)
    worker.expects(TakeBack())
    assert not isinstance(worker.action, Push)


def test_a_round_that_passes_before_its_rows_have_come_is_known_from_the_commit() -> None:
    worker = leased_ahead()
    worker.fails(Compute(batch(1)), RoundPassed("round 1"))
    worker.expects(TakeBack())
    worker.expects(TakeCommit(), work(1, 2))
    worker.expects(Expect((batch(2),), instead=True))
    assert worker.action == Pull(1, batch=batch(2))


@pytest.mark.parametrize("outcome", [work(0, 1), OutcomeUnknown("no answer")], ids=str)
def test_a_worker_that_must_leave_while_it_computes_ahead_has_its_commit_answered_first(
    outcome: pb.Lease | OutcomeUnknown,
) -> None:
    worker = leased_ahead()
    worker.fails(Compute(batch(1)), InvalidJob("no such column"))
    if isinstance(outcome, OutcomeUnknown):
        worker.fails(TakeCommit(), outcome)
    else:
        worker.expects(TakeCommit(), outcome)
    worker.leaves(Leave(InvalidJob("no such column").coded, fatal=True), InvalidJob)


def test_a_round_that_a_shard_has_applied_takes_the_gradient_back() -> None:
    worker = Driver()
    worker.joins(work(0, 0))
    worker.expects(Expect((batch(0),), instead=True))
    worker.expects(Pull(0, batch=batch(0)))
    worker.expects(Compute(batch(0)), Computed(0.5, True))
    worker.expects(Push(batch(0), 1), Pushed(had=(1,), asked_again=frozenset({1})))
    worker.expects(TakeBack())
    assert worker.action == Commit(0, DoneBatch(batch(0), 1, 0.5))


@pytest.mark.parametrize("late", ["pull", "compute", "push"])
def test_a_round_that_has_passed_is_left_to_others(late: str) -> None:
    worker = Driver()
    worker.joins(work(3, 0))
    worker.expects(Expect((batch(0),), instead=True))
    if late == "pull":
        worker.fails(Pull(3, batch=batch(0)), RoundPassed("round 4"))
    elif late == "compute":
        worker.expects(Pull(3, batch=batch(0)))
        # Rows of tables had to be received first.
        worker.fails(Compute(batch(0)), RoundPassed("round 4"))
    else:
        worker.expects(Pull(3, batch=batch(0)))
        worker.expects(Compute(batch(0)), Computed(0.5, True))
        worker.fails(Push(batch(0), 1), RoundPassed("round 4"))
    worker.expects(TakeBack())
    worker.expects(Lease(), work(4, 1))
    worker.expects(Expect((batch(1),), instead=True))
    assert worker.action == Pull(4, batch=batch(1))


def test_work_other_than_batches_is_reported() -> None:
    evaluation, merge = pb.EvaluateTask(evaluation="e", task=1), pb.MergeEvaluation(evaluation="e")
    worker = Driver()
    worker.joins(pb.Lease(initialize=pb.InitializeWork()))
    worker.expects(Initialize(), pb.InitializeDone())
    worker.expects(ReportWork(pb.InitializeDone()))
    worker.expects(Lease(), pb.Lease(evaluate=evaluation))
    worker.expects(Evaluate(evaluation), pb.EvaluateDone(task=1))
    worker.expects(ReportWork(pb.EvaluateDone(task=1)))
    worker.expects(Lease(), pb.Lease(merge=merge))
    worker.expects(Merge(merge), pb.MergeDone(evaluation="e"))
    worker.expects(ReportWork(pb.MergeDone(evaluation="e")))
    worker.expects(Lease(), pb.Lease(wait=pb.Wait(reason="a checkpoint")))
    worker.expects(Lease(after="a checkpoint"), task(0))
    assert worker.action == Pull(batch=batch(0))


def test_an_evaluation_that_others_have_done_is_left_to_them() -> None:
    """A worker that was cut off for a while comes too late for the snapshot."""
    evaluation = pb.EvaluateTask(evaluation="e", task=1, snapshot="step-1")
    worker = Driver()
    worker.joins(pb.Lease(evaluate=evaluation))
    worker.fails(Evaluate(evaluation), RoundPassed("no snapshot 'step-1' is kept"))
    worker.expects(Lease(after="work other than an evaluation that is over"), task(0))
    assert worker.action == Pull(batch=batch(0))


@pytest.mark.parametrize("where", [Register, Join, Lease, Pull, PushPull, Done, TakeLease])
def test_a_newer_generation_makes_the_worker_join_anew(where: type[Action]) -> None:
    worker = Driver()
    answers: dict[type[Action], object] = {
        Lease: task(0),
        Compute: Computed(0.5, True),
        PushPull: Pushed(),
    }
    while not isinstance(worker.action, where):
        worker.expects(worker.action, answers.get(type(worker.action)))
    worker.fails(worker.action, StaleGeneration("generation 2 has begun"))
    worker.expects(Rejoin("generation 2 has begun"))
    worker.joins(task(5))
    worker.expects(Pull(batch=batch(5)))
    assert worker.action == Expect((batch(5),))


def test_the_parameters_of_a_round_are_not_those_of_the_round_in_another_generation() -> None:
    worker = Driver()
    worker.joins(work(3, 0))
    worker.expects(Expect((batch(0),), instead=True))
    worker.expects(Pull(3, batch=batch(0)))
    worker.fails(Compute(batch(0)), StaleGeneration("generation 2"))
    worker.expects(Rejoin("generation 2"))
    worker.joins(work(3, 0))
    worker.expects(Expect((batch(0),), instead=True))
    assert worker.action == Pull(3, batch=batch(0))


def test_a_worker_that_has_to_join_anew_while_it_does_so_begins_again() -> None:
    worker = Driver()
    worker.joins(task(0))
    worker.fails(Pull(batch=batch(0)), StaleGeneration("generation 2"))
    worker.fails(Rejoin("generation 2"), StaleGeneration("generation 3"))
    worker.expects(Rejoin("generation 3"))
    worker.fails(Register(), StaleGeneration("generation 4"))
    worker.expects(Rejoin("generation 4"))
    worker.joins(FINISHED)
    worker.leaves(Leave("the job is done"), Stopped)


@pytest.mark.parametrize(
    ("error", "fatal"),
    [
        (InvalidJob("train raised"), True),
        (TableFull("table 't' is full"), True),
        (JobFailed("the loss diverged"), False),
        (OutcomeUnknown("shard 1"), False),
        (InvalidArgument("arena 3"), False),
        (Stopped("told to stop"), False),
    ],
)
def test_the_reason_of_a_workers_end_reaches_the_coordinator(error: Exception, fatal: bool) -> None:
    worker = Driver()
    worker.joins(task(0))
    worker.fails(Pull(batch=batch(0)), error)
    said = (
        getattr(error, "coded", "") if fatal else str(error)
    )  # the job's reason to fail keeps its code
    worker.leaves(Leave(said, fatal), type(error))


@pytest.mark.parametrize("sync", [False, True])
def test_a_push_whose_outcome_is_not_known_is_not_said_to_be_done(sync: bool) -> None:
    worker = Driver()
    worker.joins(work(3, 0) if sync else task(0))
    answers: dict[type[Action], object] = {Compute: Computed(0.5, True)}
    while not isinstance(worker.action, Push | PushPull):
        worker.expects(worker.action, answers.get(type(worker.action)))
    worker.fails(worker.action, OutcomeUnknown("shard 1"))
    worker.leaves(Leave("shard 1"), OutcomeUnknown)


def test_the_end_of_a_failed_job_and_a_lease_of_nothing() -> None:
    worker = Driver()
    worker.joins(pb.Lease(finished=pb.Shutdown(failed=True, reason="it diverged")))
    worker.leaves(Leave("it diverged"), JobFailed)
    worker = Driver()
    worker.joins(pb.Lease())
    reason = "the coordinator leased nothing; is it of this version?"
    worker.leaves(Leave(reason), NotReady)


def test_every_action_can_be_told_apart() -> None:
    """They are looked up by class; one that is not an action would never be done."""
    named = {cls for cls in vars(does).values() if isinstance(cls, type)}
    ours = {cls for cls in named if cls.__module__ == does.__name__}
    assert {cls for cls in ours if not issubclass(cls, Action)} == {Computed, Committed, Pushed}
