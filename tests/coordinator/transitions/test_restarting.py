"""``coordinator set dense=...``: a job is described anew and saved, and ends so that its cluster
starts again with other processes."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from coordinator.core.description import JobDescription
from coordinator.core.lifecycle import STOPPED
from coordinator.job.engine import Engine
from coordinator.job.policy_settings import cluster_settings, with_cluster
from coordinator.records.stored_values import CHANGED, ENDED
from psrpc.core.commands import Ended
from psrpc.core.errors import InvalidJob, InvalidSetting, JobFailed, NotReady
from psrpc.core.policy import ASYNC, Policy
from tests.coordinator.builders import describe
from tests.coordinator.switching_job import again, ask, finish, held, job
from tests.coordinator.sync_job import phase, refuse
from tests.coordinator.whole_coordinator import Coordinator, Worker, start

SYNC = Policy(mode="sync", replicas=2)
HOSTED = {"dense": "allreduce"}


def offered(coordinator: Coordinator, policy: Policy = SYNC, **others: Any) -> Engine:
    """The engine of a job that is described with ``others`` and what is asked for."""

    async def described(changed: Mapping[str, str]) -> JobDescription:
        slices = changed.get("slices", "none")
        more = {"slices": None if slices == "none" else int(slices), "dense": changed["dense"]}
        return describe(**job(policy, **(more | others)))

    return Engine(coordinator.job_run, coordinator.store, describe=described)


def restart(engine: Engine, **asked: str) -> Mapping[str, str]:
    return asyncio.run(engine.restart_with(asked))


def test_a_job_finishes_its_round_and_is_saved_before_its_processes_end(tmp_path: Path) -> None:
    coordinator, worker = start(tmp_path, **job(SYNC))
    first = worker.round()
    engine = offered(coordinator)
    assert restart(engine, dense="allreduce") == HOSTED
    assert restart(engine, dense="allreduce") == HOSTED, "it may be repeated"
    assert str(coordinator.job_run.changes) == "the change to dense=allreduce: draining"
    with pytest.raises(NotReady, match="the change to dense=allreduce is under way"):
        ask(coordinator, "replicas=3")
    with pytest.raises(NotReady, match="the change to dense=allreduce is under way"):
        ask(coordinator, "replicas=2")
    with pytest.raises(NotReady, match="the change to dense=allreduce is under way"):
        restart(engine, dense="allreduce", slices="2")
    worker.commit(first)
    worker.commit(worker.round())
    for shard in coordinator.shards:
        shard.obey()
    assert phase(coordinator) == "training", "the checkpoint is not committed yet"
    assert str(coordinator.job_run.changes) == "the change to dense=allreduce: saving"
    coordinator.settle()
    job_run = coordinator.job_run
    assert (job_run.phase, job_run.reason) == ("restarting", "stopped for dense=allreduce")
    assert job_run.checkpoints.newest == "checkpoints/step-00000001"
    assert held(coordinator) == [{0: [(0, 8)]}] * 2
    # To a supervisor of one process it is no failure, and to the next coordinator no end.
    assert [shard.ended for shard in coordinator.shards] == [Ended(False, job_run.reason)] * 2
    assert worker.lease() == Ended(False, job_run.reason)
    assert coordinator.store.get(ENDED) is None
    assert coordinator.store.get(CHANGED) == {"settings": HOSTED, "pending": True}
    assert job_run.warnings.kept == []


@pytest.mark.parametrize("moment", ["leased", "drained"])
def test_a_lost_shard_delays_the_end_and_loses_no_batch(tmp_path: Path, moment: str) -> None:
    coordinator, worker = start(tmp_path, **job(SYNC))
    work = worker.round()
    restart(offered(coordinator), dense="allreduce")
    if moment == "drained":
        worker.commit(work)
        worker.commit(worker.round())
    coordinator.shards[1].kill()
    coordinator.settle()
    assert phase(coordinator) != "restarting"
    coordinator.add(1, 21)
    coordinator.settle()
    assert phase(coordinator) == "restarting"
    newest = coordinator.job_run.checkpoints.newest
    done = coordinator.job_run.training.span.batches
    assert newest == f"checkpoints/step-{done // 2:08d}"
    assert held(coordinator) == [{0: [(0, 4 * done)]} if done else {}] * 2


def test_a_coordinator_that_dies_before_the_end_knows_of_no_change(tmp_path: Path) -> None:
    coordinator, worker = start(tmp_path, **job(SYNC))
    worker.round()
    restart(offered(coordinator), dense="allreduce")
    shards = list(coordinator.shards)
    again(coordinator, shards)
    assert coordinator.store.get(CHANGED) is None
    finish(coordinator, Worker(coordinator, 2))


def test_an_end_that_the_disk_refuses_to_store_is_one_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    coordinator, worker = start(tmp_path, **job(SYNC))
    monkeypatch.setattr(coordinator.store, "put", refuse)
    restart(offered(coordinator), dense="allreduce")
    coordinator.settle()
    assert phase(coordinator) == "restarting"
    assert "cannot be stored: disk I/O error" in coordinator.job_run.warnings.kept[0]
    assert worker.lease() == Ended(False, "stopped for dense=allreduce")


def test_a_stop_outdoes_the_change(tmp_path: Path) -> None:
    coordinator, worker = start(tmp_path, **job(SYNC))
    work = worker.round()
    restart(offered(coordinator), dense="allreduce")
    worker.commit(work)
    work = worker.round()
    coordinator.job_run.stop()
    worker.commit(work)
    coordinator.settle()
    assert (coordinator.job_run.phase, coordinator.job_run.reason) == ("failed", STOPPED)
    assert coordinator.store.get(CHANGED) is None
    assert coordinator.job_run.warnings.kept == [
        "the change to dense=allreduce does not come about: the job is stopping"
    ]


def test_without_a_supervisor_the_command_that_does_it_is_named(tmp_path: Path) -> None:
    coordinator, _ = start(tmp_path, **job(SYNC))
    with pytest.raises(InvalidSetting, match="stop it and go on with --resume --set dense=allr"):
        restart(coordinator.engine, dense="allreduce")
    assert str(coordinator.job_run.changes) == ""


@pytest.mark.parametrize(
    ("policy", "others", "why"),
    [
        (ASYNC, {}, "dense is 'allreduce', which is for mode sync, but mode is 'async'"),
        (SYNC, {"seed": 8, "batch_size": 2}, r"another one .*\(batch_size, seed\): its file or"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_stops(
    tmp_path: Path, policy: Policy, others: dict[str, Any], why: str
) -> None:
    coordinator, _ = start(tmp_path, **job(policy))
    with pytest.raises(InvalidJob, match=why):
        restart(offered(coordinator, policy, **others), dense="allreduce")
    assert (str(coordinator.job_run.changes), phase(coordinator)) == ("", "training")


def test_a_job_that_has_the_settings_goes_on(tmp_path: Path) -> None:
    coordinator, _ = start(tmp_path, **job(SYNC, dense="shards", slices=None))
    assert restart(offered(coordinator), dense="shards") == {}
    assert str(coordinator.job_run.changes) == ""


def test_a_job_that_does_not_train_is_not_described(tmp_path: Path) -> None:
    coordinator = Coordinator(tmp_path, **job(SYNC))
    with pytest.raises(NotReady, match="to register; its processes can be changed then"):
        restart(offered(coordinator), dense="allreduce")
    coordinator.job_run.fail("no more")
    with pytest.raises(JobFailed, match=r"failed \(no more\); its processes cannot be changed"):
        restart(offered(coordinator), dense="allreduce")


def test_one_change_is_checked_at_a_time(tmp_path: Path) -> None:
    coordinator, _ = start(tmp_path, **job(SYNC))
    refused: list[NotReady] = []

    async def described(_changed: Mapping[str, str]) -> JobDescription:
        said = "dense=allreduce: the job is described anew with that"
        assert str(coordinator.job_run.changes) == said
        if not refused:
            with pytest.raises(NotReady) as raised:
                await engine.restart_with({"dense": "allreduce", "slices": "2"})
            refused.append(raised.value)
            raise InvalidJob("no such file")
        return describe(**job(SYNC, dense="allreduce"))

    engine = Engine(coordinator.job_run, coordinator.store, describe=described)
    with pytest.raises(InvalidJob, match="no such file"):
        restart(engine, dense="allreduce")
    assert str(refused[0]) == "dense=allreduce is being checked; try again after that"
    assert str(coordinator.job_run.changes) == ""
    assert restart(engine, dense="allreduce") == HOSTED


def test_a_policy_that_has_changed_while_the_job_was_described_counts(tmp_path: Path) -> None:
    coordinator, _ = start(tmp_path, **job(SYNC))

    async def described(_changed: Mapping[str, str]) -> JobDescription:
        ask(coordinator, "mode=async")
        coordinator.settle()
        assert coordinator.job_run.run.settings == ASYNC
        return describe(**job(SYNC, dense="allreduce"))

    engine = Engine(coordinator.job_run, coordinator.store, describe=described)
    with pytest.raises(InvalidSetting, match="dense is 'allreduce', which is for mode sync"):
        restart(engine, dense="allreduce")
    assert str(coordinator.job_run.changes) == ""


def test_the_way_back_says_no_number_of_slices(tmp_path: Path) -> None:
    coordinator, _ = start(tmp_path, **job(SYNC, dense="allreduce", slices=2))
    back = restart(offered(coordinator), dense="shards")
    assert back == {"dense": "shards", "slices": "none"}
    coordinator.job_run.changes.advance()
    assert coordinator.job_run.reason == "stopped for dense=shards"
    assert with_cluster(back, HOSTED) == {**HOSTED, "slices": "none"}
    assert with_cluster({**HOSTED, "slices": "3"}, {"slices": "2"}) == {**HOSTED, "slices": "2"}


def test_settings_of_processes_come_by_themselves() -> None:
    assert cluster_settings(["mode=ssp", "staleness=4"]) == {}
    assert cluster_settings([" dense = allreduce", "slices=2"]) == {**HOSTED, "slices": "2"}
    with pytest.raises(InvalidSetting, match="dense=allreduce starts the cluster again, and mode"):
        cluster_settings(["dense=allreduce", "mode=sync"])
    assert cluster_settings(["slices=None"]) == {"slices": "None"}
    with pytest.raises(InvalidSetting, match=r"no such way; did you mean 'allreduce'\?$"):
        cluster_settings(["dense=alreduce", "slices=2"])
    with pytest.raises(InvalidSetting, match=r"dense=none: .* expected shards or allreduce$"):
        cluster_settings(["dense=none"])
    for wrong in ("0", "-1", "two"):
        with pytest.raises(InvalidSetting, match=f"^slices={wrong}: expected a whole number"):
            cluster_settings([f"slices={wrong}"])
    # An option of the command can be set by no other one, either.
    with pytest.raises(InvalidSetting, match=r"^shards=0: shards is an option of the start"):
        cluster_settings(["dense=allreduce", "shards=0"])
