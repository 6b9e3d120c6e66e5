"""A coordinator finds in its run directory nothing, a run that goes on, or one to resume."""

from __future__ import annotations

import sqlite3
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from coordinator.checkpoints.choice import Chosen
from coordinator.core.run import Followed, RestoredCheckpoint, Run
from coordinator.process.changed_settings import kept_settings
from coordinator.process.options import ServeOptions
from coordinator.process.resume_checks import check_ledger
from coordinator.process.settling import settings_said, settle
from coordinator.records.ledger_file import DamagedLedger
from coordinator.records.run_directory import LEDGER, RunDirectory
from coordinator.records.store import Store
from coordinator.records.stored_values import CHANGED, ENDED, GENERATION, POLICIES, SINCE
from psrpc.core.errors import AlreadyExists, CheckpointError, InvalidJob, InvalidSetting
from psrpc.core.policy import ASYNC, Policy
from psrpc.options.settings import Resumption
from tests.coordinator.builders import describe


def settled(
    path: Path, *, shards: int = 1, resume: bool = False, **options: Any
) -> tuple[Run, dict[str, Any]]:
    """The run, and what is stored of it."""
    changes, kept = options.pop("changes", {}), options.pop("kept", None)
    description = describe(**changes)
    resumption: Resumption = "always" if resume else "never"
    wanted = ServeOptions(Path("tiny.py"), shards, run_dir=path, resumption=resumption, **options)
    plan = description.plan(shards)
    with RunDirectory(path, wanted.resume) as directory, Store(path / LEDGER) as opened:
        run = settle(wanted, description, plan, directory, opened, kept=kept)
        keys = ("identity", ENDED, GENERATION)
        return run, {key: opened.get(key) for key in keys}


def put(path: Path, key: str, value: Any) -> None:
    with Store(path / LEDGER) as store:
        store.put(key, value)


def test_a_new_run_is_given_a_name_a_token_and_no_generation(tmp_path: Path) -> None:
    run, stored = settled(tmp_path / "run", overrides=("epochs=2",), replicas=3)
    assert (run.generation, run.since, run.restored) == (0, 0, None)
    assert run.overrides == ("epochs=2", "replicas=3")
    assert stored["identity"]["run_id"] == run.run_id
    assert stored["identity"]["overrides"] == {"epochs": "2"}
    assert (tmp_path / "run" / "token").read_text() == run.token


def test_shards_that_hold_nothing_are_a_warning(tmp_path: Path) -> None:
    assert settled(tmp_path / "enough", shards=4)[0].remarks == ()
    crowded, _ = settled(tmp_path / "crowded", shards=9)
    assert crowded.remarks == (
        "4 of 9 shards hold no parameters: the model is too small for so many; say fewer, such as "
        "--shards 5",
    )
    # Beside slices a shard may have rows, and a slice has none.
    zero = {"class_name": "constant", "config": {"value": 0.0}}
    sgd = {"class_name": "SGD", "config": {"learning_rate": 0.1}}
    table = {"name": "t", "width": 2, "vocabulary": None, "initializer": zero, "optimizer": sgd}
    changes = {"dense": "allreduce", "slices": 9, "tables": [table]}
    beside, _ = settled(tmp_path / "beside", shards=2, changes=changes)
    assert beside.remarks == (
        "4 of 9 slices hold no parameters: the model is too small for so many; say fewer, such as "
        "slices=5",
    )


def test_a_run_that_has_not_ended_is_the_same_run(tmp_path: Path) -> None:
    first, _ = settled(tmp_path)
    put(tmp_path, GENERATION, 4)
    put(tmp_path, SINCE, 2)
    again, _ = settled(tmp_path, overrides=("checkpoint_every=7", "keep_checkpoints=2"))
    assert (again.run_id, again.token) == (first.run_id, first.token)
    assert (again.generation, again.since) == (4, 2)


@pytest.mark.parametrize(
    ("difference", "what"),
    [
        ({"shards": 2}, r"its shards is 1, this one's 2"),
        ({"overrides": ("optimizer.learning_rate=1",)}, "its overrides is"),
        ({"changes": {"job_sha256": "cd" * 32}}, "its job_sha256 is 'abab"),
        (
            {"changes": {"mode": "sync", "replicas": 2}},
            "its policy is async, this one's sync replicas=2",
        ),
        ({"changes": {"data_fingerprint": "other"}}, "its data is 'f00d'"),
    ],
)
def test_another_job_is_refused(tmp_path: Path, difference: dict[str, Any], what: str) -> None:
    settled(tmp_path)
    with pytest.raises(InvalidJob, match=f"not ended, of another job: {what}"):
        settled(tmp_path, **difference)


def test_a_run_that_has_ended_has_to_be_resumed(tmp_path: Path) -> None:
    settled(tmp_path)
    put(tmp_path, ENDED, {"phase": "failed", "reason": "diverged"})
    with Store(tmp_path / LEDGER) as store:
        store.put_checkpoint("step-00000004", 1, 4)
    with pytest.raises(AlreadyExists, match=r"has ended \(failed\); say --resume"):
        check_ledger(tmp_path, resume=False)
    with pytest.raises(AlreadyExists, match=r"has ended \(failed\); say --resume"):
        settled(tmp_path)
    with pytest.raises(CheckpointError, match=r"cannot resume: .* another --run-dir"):
        settled(tmp_path, resume=True)


def test_a_run_that_was_stopped_before_anything_was_saved_begins_anew(tmp_path: Path) -> None:
    """By the same command, or by one with what was wrong put right."""
    first, _ = settled(tmp_path)
    put(tmp_path, ENDED, {"phase": "failed", "reason": "stopped"})
    check_ledger(tmp_path, resume=False)
    with pytest.raises(CheckpointError) as raised:
        settled(tmp_path, resume=True)
    assert str(raised.value) == (
        f"cannot resume: the run of {tmp_path} has saved nothing, and nothing of it was trained; "
        f"--run-dir {tmp_path} without --resume begins it anew"
    )
    with pytest.raises(InvalidJob, match="holds a run of job"):
        settled(tmp_path, changes={"name": "another"})
    again, stored = settled(tmp_path, changes={"job_sha256": "cd" * 32})
    assert again.restored is None
    assert again.token != first.token
    assert stored[ENDED] is None


def test_a_run_that_is_done_does_not_begin_anew(tmp_path: Path) -> None:
    settled(tmp_path)
    put(tmp_path, ENDED, {"phase": "done", "reason": ""})
    with pytest.raises(AlreadyExists, match=r"has ended \(done\); say --resume"):
        settled(tmp_path)


def test_shards_of_another_job_are_not_let_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the job as it was, shards that are there still keep what they hold; with another
    learning rate or plan they must not."""
    first, _ = settled(tmp_path)
    chosen = Chosen(RestoredCheckpoint("step-00000004", 4), first.run_id, 1, (), batches=4)
    monkeypatch.setattr("coordinator.process.settling.check_checkpoint", lambda *_: chosen)
    assert settled(tmp_path, resume=True)[0].token == first.token
    changed, _ = settled(tmp_path, resume=True, overrides=("optimizer.learning_rate=1",))
    assert changed.run_id == first.run_id
    assert changed.token != first.token
    put(tmp_path, ENDED, {"phase": "done", "reason": ""})
    over, stored = settled(tmp_path, resume=True, overrides=("optimizer.learning_rate=1",))
    assert over.token != changed.token
    assert stored[ENDED] is None


def test_a_run_goes_on_when_the_disk_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, _ = settled(tmp_path)

    def refuse(*_: object) -> None:
        raise sqlite3.OperationalError("database or disk is full")

    monkeypatch.setattr(Store, "put_all", refuse)
    monkeypatch.setattr(Path, "write_text", refuse)
    assert settled(tmp_path)[0].token == first.token


SYNC: dict[str, Any] = {"mode": "sync", "replicas": 2}


def resumed(
    path: Path, monkeypatch: pytest.MonkeyPatch, overrides: tuple[str, ...] = (), **changes: Any
) -> Run:
    """The run goes on from a checkpoint of step 7 that has 5 batches."""
    chosen = Chosen(RestoredCheckpoint("step-00000007", 7), "r", 1, (), batches=5)
    monkeypatch.setattr("coordinator.process.settling.check_checkpoint", lambda *_: chosen)
    return settled(path, resume=True, overrides=overrides, changes=changes)[0]


def test_a_run_that_is_resumed_with_another_policy_comes_to_follow_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settled(tmp_path)
    put(tmp_path, GENERATION, 4)
    run = resumed(tmp_path, monkeypatch, **SYNC)
    sync = Policy(mode="sync", replicas=2)
    assert (run.policies, run.since) == ((Followed(2, sync, 7, 5),), 5)
    assert run.followed[0] == Followed(1, ASYNC)
    # It is stored, and stands from now on.
    assert resumed(tmp_path, monkeypatch, **SYNC).policies == run.policies
    assert settled(tmp_path, changes=SYNC)[0].policies == run.policies
    assert resumed(tmp_path, monkeypatch).followed == (
        *run.followed,
        Followed(3, ASYNC, 7, 5),
    )


def test_the_policy_that_was_followed_last_stands_when_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settled(tmp_path)
    ssp = Followed(2, Policy(mode="ssp", staleness=4), 7, 5)
    put(tmp_path, POLICIES, [ssp.to_json()])
    assert settled(tmp_path)[0].policies == (ssp,)
    assert resumed(tmp_path, monkeypatch).policies == (ssp,)
    # What is asked for stands already.
    again = resumed(tmp_path, monkeypatch, mode="ssp", staleness=4)
    assert (again.policies, again.since) == ((ssp,), 0)


def test_a_run_that_is_async_by_now_is_not_resumed_with_slices_in_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settled(tmp_path, changes=SYNC)
    put(tmp_path, POLICIES, [Followed(2, ASYNC, 7, 5).to_json()])
    assert resumed(tmp_path, monkeypatch, **SYNC).settings == ASYNC
    with pytest.raises(InvalidSetting, match="dense is 'allreduce', which is for mode sync"):
        resumed(tmp_path, monkeypatch, **SYNC, dense="allreduce")


def test_a_resumed_run_names_what_differs_from_its_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = ("epochs=1", "optimizer.learning_rate=0.05", "checkpoint_every=9")
    settled(tmp_path, overrides=said, changes=SYNC)
    assert resumed(tmp_path, monkeypatch, said, **SYNC).remarks == ()
    assert resumed(tmp_path, monkeypatch, ("epochs=2",)).remarks == (
        "the run was started with --set optimizer.learning_rate=0.05, which is not said now: what "
        "the job file says holds",
        "the run was started with --set checkpoint_every=9, which is not said now: what the job "
        "file says holds",
        "the run goes on as async; it was sync replicas=2",
    )
    # Since the last start it is said no more, and was changed while the run went on.
    ssp = Followed(3, Policy(mode="ssp", staleness=4), 7, 5)
    put(tmp_path, POLICIES, [ssp.to_json()])
    assert resumed(tmp_path, monkeypatch, ("epochs=2",)).remarks == (
        "the run goes on as ssp staleness=4, which it was changed to while it ran, and not as "
        "async; `coordinator set` changes it back",
    )
    assert settled(tmp_path, overrides=("epochs=2",))[0].remarks == ()


# Settings that `coordinator set` has changed.

HOSTED = {"dense": "allreduce"}


def started(
    path: Path, monkeypatch: pytest.MonkeyPatch, *said: str, resume: bool = False
) -> tuple[Run, Any]:
    """The run as `coordinator serve` settles it, with what the run keeps; and what is stored of
    that. A checkpoint is there."""
    chosen = Chosen(RestoredCheckpoint("step-00000007", 7), "r", 1, (), batches=5)
    monkeypatch.setattr("coordinator.process.settling.check_checkpoint", lambda *_: chosen)
    asked = ServeOptions(Path("tiny.py"), run_dir=path, overrides=said)
    kept = kept_settings(path, settings_said(asked))
    overrides = (*said, *kept.overrides)
    dense = settings_said(replace(asked, overrides=overrides)).get("dense", "shards")
    changes = {**SYNC, "dense": dense}
    run, _ = settled(path, resume=resume, overrides=overrides, kept=kept, changes=changes)
    with Store(path / LEDGER) as store:
        return run, store.get(CHANGED)


def change(path: Path, **settings: str) -> None:
    put(path, CHANGED, {"settings": settings, "pending": True})


def test_a_run_that_was_saved_for_other_processes_goes_on_with_them_by_the_same_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, stored = started(tmp_path, monkeypatch)
    assert (first.changed, stored) == ({}, None)
    change(tmp_path, **HOSTED)
    run, stored = started(tmp_path, monkeypatch)
    assert (run.description.dense, run.changed, run.overrides) == (
        "allreduce",
        HOSTED,
        ("dense=allreduce",),
    )
    assert stored == {"settings": HOSTED, "pending": False}
    # Processes of before hold what they held under another plan.
    assert run.token != first.token
    assert run.remarks == ()
    # A coordinator that dies then comes again by the same command, too, to the same processes.
    after, _ = started(tmp_path, monkeypatch)
    assert (after.token, after.changed) == (run.token, HOSTED)


def test_changed_settings_outlive_a_resume_that_does_not_say_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started(tmp_path, monkeypatch, "dense=shards")
    change(tmp_path, **HOSTED)
    started(tmp_path, monkeypatch, "dense=shards")
    for said in ((), ("epochs=9",)):
        run, _ = started(tmp_path, monkeypatch, *said, resume=True)
        assert run.description.dense == "allreduce"
        assert run.remarks[-1] == (
            "the run goes on with dense=allreduce, which it was changed to while it ran; "
            "`coordinator set` changes it back"
        )


def test_a_start_that_says_otherwise_than_the_one_before_outdoes_changed_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started(tmp_path, monkeypatch)
    change(tmp_path, **HOSTED, slices="2")
    started(tmp_path, monkeypatch)
    run, stored = started(tmp_path, monkeypatch, "dense=shards", resume=True)
    assert (run.description.dense, run.changed, stored) == ("shards", {}, None)
    # One that is still to be taken up, too.
    change(tmp_path, **HOSTED)
    run, stored = started(tmp_path, monkeypatch, "dense=shards")
    assert (run.description.dense, run.changed) == ("allreduce", HOSTED), "it says nothing new"
    change(tmp_path, **HOSTED)
    run, stored = started(tmp_path, monkeypatch, "slices=1", "dense=shards", resume=True)
    assert (run.description.dense, run.changed, stored) == (
        "allreduce",
        HOSTED,
        {"settings": HOSTED, "pending": False},
    ), "slices were not changed"


def test_a_damaged_ledger_says_so_before_the_job_is_described(tmp_path: Path) -> None:
    settled(tmp_path)
    put(tmp_path, CHANGED, {"settings": 3, "pending": True})
    with pytest.raises(DamagedLedger):
        kept_settings(tmp_path, {})
    assert kept_settings(tmp_path / "none", {}).settings == {}
