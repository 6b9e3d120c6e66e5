"""A running job comes to follow another policy: what is finished first, and what fits."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from coordinator.core.run import Followed
from coordinator.core.work import EvaluationWork, MergeWork, Round, Wait
from coordinator.records.stored_values import POLICIES
from psrpc.core.commands import Begin
from psrpc.core.errors import InvalidJob, InvalidSetting, JobFailed, NotReady, StaleGeneration
from psrpc.core.policy import ASYNC, Policy
from tests.coordinator.switching_job import PAIRS, SSP, SYNC, ask, do, finish, job, work, written
from tests.coordinator.whole_coordinator import Coordinator, Worker, start
from tests.psrpc.rows import TABLES
from tests.worker.job.test_job import make_job


@pytest.mark.parametrize(("first", "then"), PAIRS, ids=str)
def test_a_change_finishes_what_is_under_way_and_goes_on_from_there(
    tmp_path: Path, first: Policy, then: Policy
) -> None:
    coordinator, worker = start(tmp_path, **job(first))
    work(coordinator, worker, 2)
    other = Worker(coordinator, 2)
    under_way = worker.lease()
    assert ask(coordinator, *written(then)) == (2, then)
    if not first.rounds:
        waits = other.lease()
        assert isinstance(waits, Wait)
        assert f"the change to policy 2 ({then})" in waits.reason
    assert str(coordinator.job_run.changes) == f"the change to policy 2 ({then}): draining"
    assert coordinator.job_run.run.policy == 1
    batches = 2 + do(worker, under_way)
    step = batches
    if first.rounds:
        # The round that is under way is decided.
        assert do(other, other.lease()) == 1
        step, batches = 2, 4
    assert isinstance(worker.lease(), Wait)
    assert str(coordinator.job_run.changes).endswith(": saving")
    coordinator.settle()
    run = coordinator.job_run.run
    assert run.policies == (Followed(2, then, step, batches),)
    assert (run.policy, run.settings, run.generation, run.since) == (2, then, 2, 2)
    begins = [shard.begins[-1] for shard in coordinator.shards]
    assert begins == [Begin(2, 2, keep=True, settings=then, version=step)] * 2
    assert coordinator.job_run.standing == (2, step)
    assert coordinator.job_run.training.span.batches == batches
    assert coordinator.job_run.checkpoints.newest == f"checkpoints/step-{step:08d}"
    assert str(coordinator.job_run.changes) == ""
    with pytest.raises(StaleGeneration):
        worker.lease()
    worker.join()
    assert isinstance(worker.lease(), Round) == then.rounds
    finish(coordinator, worker)


def test_a_second_change_waits_for_the_first(tmp_path: Path) -> None:
    coordinator, worker = start(tmp_path, **job(ASYNC))
    batches = worker.batches()
    assert ask(coordinator, "mode=async") == (1, ASYNC), "nothing changes"
    assert str(coordinator.job_run.changes) == ""
    assert ask(coordinator, *written(SSP)) == (2, SSP)
    assert ask(coordinator, "staleness=1", "mode=ssp") == (2, SSP)
    with pytest.raises(NotReady, match=r"policy 2 \(ssp staleness=1\) is under way"):
        ask(coordinator, "mode=sync", "replicas=2")
    worker.lease(worker.train(batches))
    coordinator.settle()
    assert ask(coordinator, "staleness=1") == (2, SSP), "it stands"
    assert ask(coordinator, "mode=sync", "replicas=2") == (3, SYNC)
    coordinator.settle()
    assert [f.number for f in coordinator.job_run.run.followed] == [1, 2, 3]


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        (["stalenes=4"], "a policy has no stalenes; did you mean 'staleness'"),
        (["zzz=4"], "a policy has no zzz; known: mode, replicas"),
        (["learning_rate=1"], "a policy has no learning_rate; known: mode, replicas"),
        (["staleness"], "expected key=value"),
        ([], "no settings"),
        (["staleness=4"], "staleness is for mode ssp, but mode is 'async'"),
        (["mode=ssp"], "mode is 'ssp' but staleness is not set"),
        (["mode=sync"], "but replicas is not set.* or coordinator set mode=sync replicas=3"),
        (["epochs=60"], "epochs belongs to the job .* stop it and go on with --resume --set epoch"),
        (["mode=ssp", "staleness=-1"], "staleness is -1; expected a whole number of at least 0"),
        (["mode=sync", "replicas=2", "aggregate=3"], "aggregate is 3, but a round has only 2"),
        (["mode=sync", "replicas=5"], "5 micro-batches .replicas. has 20 records, and train hol"),
        (["local_steps=4"], "says what the batches .* a new run with --set local_steps=4"),
        (["optimizer.learning_rate=1"], "belongs to the job"),
        (["exact=false"], "stop it and go on with --resume --set exact=false"),
        (["dense=allreduce"], "stop it and go on with --resume --set dense=allreduce"),
        (["dc_lambda=nan", "delay_compensation=constant"], "dc_lambda is 'nan'; expected a number"),
    ],
)
def test_settings_that_do_not_fit_are_refused_with_the_reason(
    tmp_path: Path, settings: list[str], why: str
) -> None:
    coordinator, _ = start(tmp_path, **job(ASYNC))
    with pytest.raises(InvalidJob, match=why):
        ask(coordinator, *settings)
    assert str(coordinator.job_run.changes) == ""


def test_settings_not_named_stay_as_far_as_they_fit(tmp_path: Path) -> None:
    first = Policy(staleness_lr="inverse", max_staleness=3)
    coordinator, _ = start(tmp_path, **job(first))
    _, policy = ask(coordinator, "mode=ssp", "staleness=2")
    assert policy == Policy(mode="ssp", staleness=2, staleness_lr="inverse")
    coordinator.settle()
    _, policy = ask(coordinator, "staleness_lr=none", "delay_compensation=constant")
    assert policy == Policy(mode="ssp", staleness=2, delay_compensation="constant")


def test_settings_that_local_steps_exclude(tmp_path: Path) -> None:
    coordinator, _ = start(tmp_path, **job(ASYNC, local_steps=2))
    with pytest.raises(InvalidJob, match="balance and local_steps exclude each other"):
        ask(coordinator, "mode=sync", "replicas=2", "balance=true")


def test_a_mode_that_slices_in_workers_exclude(tmp_path: Path) -> None:
    coordinator, _ = start(tmp_path, **job(Policy(mode="sync", replicas=2), dense="allreduce"))
    with pytest.raises(InvalidSetting, match="dense is 'allreduce', which is for mode sync"):
        ask(coordinator, "mode=async")
    assert str(coordinator.job_run.changes) == ""
    assert ask(coordinator, "replicas=3")[0] == 2


def test_settings_that_sums_of_a_round_exclude(tmp_path: Path) -> None:
    coordinator, _ = start(tmp_path, **job(Policy(mode="sync", replicas=2), exact=False))
    with pytest.raises(InvalidSetting, match="exact=False and speculate=True exclude each other"):
        ask(coordinator, "speculate=true")
    assert ask(coordinator, "mode=async")[0] == 2


def test_settings_that_embedding_tables_exclude(tmp_path: Path) -> None:
    tables = [table.to_json() for table in TABLES]
    coordinator, _ = start(tmp_path, **job(ASYNC, tables=tables))
    with pytest.raises(InvalidSetting, match="'constant', but the model has embedding tables"):
        ask(coordinator, "delay_compensation=constant")
    with pytest.raises(InvalidSetting, match="'adaptive', but the model has embedding tables"):
        ask(coordinator, "mode=ssp", "staleness=1", "delay_compensation=adaptive")
    assert str(coordinator.job_run.changes) == ""
    assert ask(coordinator, "staleness_lr=inverse") == (2, Policy(staleness_lr="inverse"))


def test_settings_that_rows_received_ahead_exclude(tmp_path: Path) -> None:
    """In the words that a job is refused with before it begins."""
    with pytest.raises(InvalidSetting) as refused:
        make_job(prefetch_rows=True, max_staleness=0).policy()
    coordinator, _ = start(tmp_path, **job(ASYNC, prefetch_rows=True))
    with pytest.raises(InvalidSetting, match=f"^{re.escape(str(refused.value))}$"):
        ask(coordinator, "max_staleness=0")
    assert str(coordinator.job_run.changes) == ""
    assert ask(coordinator, "max_staleness=1") == (2, Policy(max_staleness=1))


def test_a_job_that_does_not_train_says_so(tmp_path: Path) -> None:
    coordinator = Coordinator(tmp_path, **job(ASYNC))
    with pytest.raises(NotReady, match="waiting: it waits for shards 0, 1 to register; its"):
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
    assert coordinator.job_run.phase == "done"
    assert coordinator.job_run.run.policy == 1
    assert coordinator.store.get(POLICIES) is None
    assert coordinator.job_run.warnings.kept == [
        "the change to policy 2 (sync replicas=2) does not come about: all batches are done"
    ]


def test_a_job_that_is_stopped_meanwhile(tmp_path: Path) -> None:
    coordinator, worker = start(tmp_path, **job(ASYNC))
    batches = worker.batches()
    ask(coordinator, *written(SYNC))
    coordinator.job_run.stop()
    worker.lease(worker.train(batches))
    coordinator.settle()
    assert coordinator.job_run.run.policy == 1
    assert "does not come about: the job is stopping" in coordinator.job_run.warnings.kept[0]


# Evaluations.


def test_a_snapshot_kept_for_evaluation_is_evaluated_first(tmp_path: Path) -> None:
    coordinator, worker = start(tmp_path, **job(ASYNC, eval_records=8))
    work(coordinator, worker, 4)
    ask(coordinator, *written(SYNC))
    coordinator.settle()
    assert coordinator.job_run.run.policy == 1
    assert isinstance(worker.lease(), EvaluationWork)
    coordinator.engine.report_evaluated(worker.caller, "epoch-1", 0, 8, ())
    assert isinstance(worker.lease(), MergeWork)
    assert coordinator.job_run.run.policy == 1
    coordinator.engine.report_merged(worker.caller, "epoch-1", {"loss": 0.5})
    coordinator.settle()
    assert coordinator.job_run.run.policy == 2
    assert coordinator.job_run.training.notes.results[0][0] == "epoch-1"


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
