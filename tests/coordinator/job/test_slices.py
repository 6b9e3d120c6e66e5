"""Shards that workers host: who may take a place, and what a worker is told."""

from __future__ import annotations

from pathlib import Path

import pytest

from coordinator.core.figures import WorkerHeartbeat, WorkerRegistration
from coordinator.display.status_page import render_page
from coordinator.membership.shard_places import STARTING_S
from coordinator.process.summary import summarize
from coordinator.rpc.status import write_status
from psrpc import SOFTWARE
from psrpc.core.errors import InvalidArgument
from psrpc.core.policy import Policy
from psrpc.core.shard_reports import ShardRegistration
from tests.coordinator.builders import SHA, TABLE
from tests.coordinator.switching_job import job
from tests.coordinator.whole_coordinator import Coordinator, start

SYNC = Policy(mode="sync", replicas=2)


def hosted(folder: Path) -> Coordinator:
    return Coordinator(folder, 2, **job(SYNC, dense="allreduce"))


def register(coordinator: Coordinator, incarnation: int, *, hosts: bool = True) -> str:
    asked = WorkerRegistration(incarnation, "h", 1, "cpu", SHA, SOFTWARE, hosts=hosts)
    return coordinator.engine.sessions.register(asked).name


def of_kinds(coordinator: Coordinator) -> tuple[int, int | None]:
    """How many shards and how many slices the summary says."""
    summary = summarize(coordinator.job_run)
    return summary["shards"], summary.get("slices")


@pytest.mark.parametrize(
    ("dense", "worker", "says"),
    [
        ("allreduce", 0, "no `pserver serve` belongs to this job; start workers alone"),
        ("shards", 1, "a worker offers to host a shard, and dense is 'shards'"),
    ],
)
def test_a_shard_of_the_other_kind_is_refused(
    tmp_path: Path, dense: str, worker: int, says: str
) -> None:
    coordinator = Coordinator(tmp_path, 2, **job(SYNC, dense=dense))
    shard = ShardRegistration(0, 10, "h:0", "h", 1, SOFTWARE, worker)
    with pytest.raises(InvalidArgument, match=says):
        coordinator.engine.shards.register(shard)
    assert coordinator.job_run.members.places.shards[0].state == "missing"


def test_shards_with_rows_stand_beside_slices_that_workers_host(tmp_path: Path) -> None:
    coordinator = Coordinator(tmp_path, 2, **job(SYNC, dense="allreduce", tables=[TABLE]))
    engine, places = coordinator.engine, coordinator.job_run.members.places
    assert len(places.shards) == 3
    name = register(coordinator, 1)
    assert engine.slices_to_host(name) == [2]
    wrong = [
        (2, 0, "shard 2 among them; start `pserver serve` for shards 0, 1 alone, which have the"),
        (1, 1, "a worker offers to host a shard, and shard 1 is no slice"),
        (3, 0, "this job has 2 shards, so --shard is 0 to 1;"),
    ]
    for index, worker, says in wrong:
        with pytest.raises(InvalidArgument, match=says):
            engine.shards.register(ShardRegistration(index, 9, "h:9", "h", 1, SOFTWARE, worker))
    assert [shard.state for shard in places.shards] == ["missing"] * 3
    for index, worker in ((0, 0), (1, 0), (2, 1)):
        where = f"h:{index}", "h", 1
        engine.shards.register(ShardRegistration(index, 10 + index, *where, SOFTWARE, worker))
    assert engine.slices_to_host(name) == []
    assert [shard.worker for shard in places.shards] == [0, 0, 1]
    status = write_status(coordinator.job_run)
    assert [(shard.slice, shard.worker) for shard in status.shards] == [(False, "")] * 2 + [
        (True, name)
    ]
    assert of_kinds(coordinator) == (2, 1)
    titles = [line.split()[0] for line in render_page(status).split("\n\n")[1:4]]
    assert titles == ["shard", "slice", "worker"]


def test_workers_are_told_which_slices_to_host_until_the_job_ends(tmp_path: Path) -> None:
    coordinator = hosted(tmp_path)
    engine = coordinator.engine
    unable, able = register(coordinator, 1, hosts=False), register(coordinator, 2)
    assert (engine.slices_to_host(unable), engine.slices_to_host(able)) == ([], [0])
    assert engine.slices_to_host("") == []
    (warning,) = coordinator.job_run.warnings.kept
    assert f"{unable} on h cannot host a slice: it has no certificate of a shard" in warning
    engine.shards.register(ShardRegistration(0, 10, "h:0", "h", 7, SOFTWARE, 2))
    assert engine.slices_to_host(able) == []
    page = [line.split() for line in render_page(write_status(coordinator.job_run)).splitlines()]
    assert ["slice", "worker", "state"] in [line[:3] for line in page]
    assert [line[:-3] for line in page if line[:1] in (["0"], ["1"])] == [
        ["0", "h:0", able, "starting", "0", "0.0", "MB"],
        ["1", "-", "missing", "0", "0.0", "MB"],
    ]
    shard = coordinator.job_run.members.places.shards[0]
    assert str(shard) == "shard 0 in the worker with pid 7 on h, at h:0"
    assert coordinator.job_run.waiting_for().startswith("a worker to host slice 1")
    assert of_kinds(coordinator) == (0, 2)
    other = register(coordinator, 3)
    assert engine.slices_to_host(other) == [1]
    coordinator.job_run.fail("enough")
    assert engine.slices_to_host(other) == []


def test_a_lost_slice_gets_a_host_although_it_is_to_refuse_the_worker_that_died_with_it(
    tmp_path: Path,
) -> None:
    coordinator, host = start(tmp_path, **job(SYNC, dense="allreduce"))
    engine, departures = coordinator.engine, coordinator.job_run.departures
    host.round()
    other = register(coordinator, 2)
    for slice_ in list(coordinator.shards):
        slice_.kill()
    engine.sessions.leave(host.name, "gone", fatal=False)
    coordinator.tick(STARTING_S + 0.1)
    engine.heartbeat_worker(other, WorkerHeartbeat(1, []))
    assert departures.waiting_for() == f"shards 0, 1 to refuse {host.name}"
    assert engine.slices_to_host(other) == [0]


def test_a_worker_that_has_left_gets_no_slice(tmp_path: Path) -> None:
    coordinator = hosted(tmp_path)
    engine = coordinator.engine
    gone, stays = register(coordinator, 1), register(coordinator, 2)
    engine.sessions.leave(gone, "gone", fatal=False)
    assert engine.slices_to_host(stays) == [0]


def test_a_job_with_shards_gives_no_worker_a_slice(tmp_path: Path) -> None:
    coordinator, _ = start(tmp_path, **job(SYNC))
    name = register(coordinator, 2)
    assert coordinator.engine.slices_to_host(name) == []
    assert of_kinds(coordinator) == (2, None)
    assert not coordinator.job_run.warnings.kept
