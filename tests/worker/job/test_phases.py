"""The policies that a job asks for, and what it refuses."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from psrpc.core.errors import InvalidJob
from psrpc.core.policy import Policy
from tests.worker.job.test_job import make_job
from worker.job.job import Job
from worker.job.overrides import override_job

SYNC: dict[str, Any] = {"mode": "sync", "replicas": 3}
RULE: dict[str, Any] = SYNC | {"then": "async", "then_after": 2, "epochs": 4}


def test_every_setting_reaches_the_policy() -> None:
    assert make_job(**SYNC, aggregate=2, round_deadline_s=9.0).policy() == Policy(
        mode="sync", replicas=3, aggregate=2, round_deadline_s=9.0
    )
    assert make_job(**SYNC, speculate=True, balance=True).policy() == Policy(
        mode="sync", replicas=3, speculate=True, balance=True
    )
    assert make_job(mode="ssp", staleness=0, staleness_lr="inverse").policy() == Policy(
        mode="ssp", staleness=0, staleness_lr="inverse"
    )
    delayed: dict[str, Any] = {"delay_compensation": "adaptive", "dc_lambda": 1.0, "dc_decay": 0.5}
    assert make_job(max_staleness=4, **delayed).policy() == Policy(max_staleness=4, **delayed)
    assert make_job().then_policy() is None


def test_with_a_rule_each_setting_belongs_to_the_phases_that_it_fits() -> None:
    job = make_job(**RULE, aggregate=2, max_staleness=7, staleness_lr="inverse")
    assert job.policy() == Policy(mode="sync", replicas=3, aggregate=2)
    assert job.then_policy() == Policy(max_staleness=7, staleness_lr="inverse")
    job = make_job(mode="ssp", staleness=2, then="async", then_after=1, epochs=2, dc_lambda=0.1)
    with pytest.raises(InvalidJob, match="dc_lambda is set, but delay_compensation is not"):
        job.policy()


def test_replicas_of_a_job_that_is_run_without_rounds_do_no_harm() -> None:
    assert make_job(replicas=3).policy() == Policy()


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"mode": "sync"}, "mode is 'sync' but replicas is not set"),
        ({"mode": "ssp"}, "mode is 'ssp' but staleness is not set"),
        (SYNC | {"aggregate": 4}, "aggregate is 4, but a round has only 3 micro-batches"),
        (SYNC | {"aggregate": 0}, "aggregate is 0; expected a whole number of at least 1"),
        ({"mode": "ssp", "staleness": -1}, "staleness is -1; expected a whole number of at lea"),
        ({"max_staleness": -1}, "max_staleness is -1; expected a whole number of at least 0"),
        ({"aggregate": 2}, "aggregate is for mode sync, but mode is 'async': only rounds are"),
        ({"staleness": -1}, "staleness is -1; expected a whole number of at least 0"),
        ({"staleness": 4}, "staleness is for mode ssp, but mode is 'async': only ssp has clo"),
        (SYNC | {"max_staleness": 4}, "max_staleness is for mode async, but mode is 'sync'"),
        (RULE | {"staleness": 4}, "but mode is 'sync': only ssp has clocks; in async mode bound"),
        (RULE | {"staleness": 4}, "; nor is it for 'async', which follows"),
        ({"speculate": True}, "speculate is for mode sync, but mode is 'async'"),
        (SYNC | {"round_deadline_s": 0}, "round_deadline_s is 0; expected a number above 0"),
        ({"delay_compensation": "constant", "dc_decay": 0.5}, "dc_decay is for delay_compensat"),
        ({"staleness_lr": "linear"}, "staleness_lr is 'linear'; expected inverse or None"),
        ({"then": "sync", "replicas": 2}, "then is 'sync', but then_after is not set"),
        ({"then_after": 1}, "then_after is 1, but then is not set"),
        ({"then": "sync", "then_after": 1, "epochs": 2}, "mode is 'sync' but replicas is not set"),
        (RULE | {"then": "sync"}, "then is 'sync', and so is mode; the rule would change nothing"),
        (RULE | {"epochs": 2}, "then_after is 2, but the job has 2 epochs: the first phase never"),
        (SYNC | {"prefetch_rows": True}, "prefetch_rows is for mode async or ssp"),
        (SYNC | {"sum_devices": True}, "sum_devices is for mode async, but mode is 'sync'"),
        ({"sum_devices": True, "delay_compensation": "constant"}, "by its own square; leave one"),
        ({"sum_devices": True, "compression": "int8"}, "sum_devices and compression exclude each"),
        ({"sum_devices": 1}, "sum_devices is 1; expected true or false"),
        ({"exact": False}, "exact=False is for mode sync, but mode is 'async'"),
        (SYNC | {"exact": False, "aggregate": 2}, "exact=False and aggregate=2 exclude each other"),
        (SYNC | {"exact": False, "speculate": True}, "and speculate=True exclude each other"),
        (SYNC | {"exact": False, "balance": True}, "with balance none is; leave one of them out"),
        (SYNC | {"exact": False, "compression": "int8"}, "exact=False and compression='int8' excl"),
        ({"prefetch_rows": True, "max_staleness": 0}, "expected max_staleness of 1 or more"),
        ({"warmup_epochs": 5}, "warmup_epochs is 5, but scale_lr is not set"),
        ({"scale_lr": "linear"}, "scale_lr is 'linear', but mode is 'async': only rounds make one"),
        (SYNC | {"balance": True, "local_steps": 2}, "balance and local_steps exclude each other"),
        (SYNC | {"scale_lr": "linear", "local_steps": 2}, "scale_lr and local_steps exclude"),
        (
            {"delay_compensation": "constant", "local_steps": 2},
            "delay_compensation and local_steps exclude each other",
        ),
    ],
)
def test_settings_that_do_not_fit_are_refused_with_the_reason(
    fields: dict[str, Any], says: str
) -> None:
    job = make_job(**fields)
    with pytest.raises(InvalidJob) as raised:
        job.policy()
    assert says in str(raised.value)
    assert "\n" not in str(raised.value)


def test_the_recipe_for_large_batches_fits_a_rule_with_rounds_in_it() -> None:
    job = make_job(**RULE, scale_lr="linear", warmup_epochs=0.5)
    assert job.policy().rounds
    assert make_job(then="sync", replicas=2, then_after=1, epochs=2, scale_lr="linear").policy()


def test_in_another_mode_what_the_file_says_for_its_own_is_left_out() -> None:
    job = make_job(
        **RULE, aggregate=2, max_staleness=7, scale_lr="linear", warmup_epochs=1.0, seed=3
    )
    changed, _ = override_job(job, ["mode=async"])
    assert changed.policy() == Policy(max_staleness=7)
    assert (changed.then_policy(), changed.scale_lr, changed.seed) == (None, None, 3)
    changed, _ = override_job(job, ["mode=ssp", "staleness=1"])
    assert changed.policy() == Policy(mode="ssp", staleness=1)
    # A mode that is the file's own changes nothing.
    assert override_job(job, ["mode=sync"])[0] == job
    # What is said beside it is not left out.
    changed, _ = override_job(job, ["mode=async", "aggregate=2"])
    with pytest.raises(InvalidJob, match="aggregate is for mode sync, but mode is 'async'"):
        changed.policy()
    changed, _ = override_job(job, ["mode=ssp", "staleness=1", "then=sync", "then_after=1"])
    assert changed.then_policy() == Policy(mode="sync", replicas=3, aggregate=2)
    assert changed.scale_lr == "linear"


def test_settings_of_a_policy_are_read_from_text() -> None:
    settings = ["mode=sync", "replicas=4", "speculate=true", "round_deadline_s=2.5"]
    assert override_job(make_job(), settings)[0].policy() == Policy(
        mode="sync", replicas=4, speculate=True, round_deadline_s=2.5
    )
    settings = ["mode=ssp", "staleness=0", "delay_compensation=adaptive", "dc_decay=0.9"]
    assert override_job(make_job(), settings)[0].policy() == Policy(
        mode="ssp", staleness=0, delay_compensation="adaptive", dc_decay=0.9
    )


def test_a_job_has_every_setting_of_a_policy_with_its_default() -> None:
    jobs = {field.name: field.default for field in dataclasses.fields(Job)}
    policies = {field.name: field.default for field in dataclasses.fields(Policy)}
    assert {name: jobs.get(name, "missing") for name in policies} == policies
