"""Simulated clusters keep every promise; and the simulator sees when one is broken."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from random import Random
from typing import get_args

import pytest

from coordinator.core.work import Wait, Work
from coordinator.job.engine import POLL_S, Caller, Engine
from pserver.core.applied import AppliedSet
from psrpc.core.batch import BatchId
from psrpc.core.policy import SETTINGS, Policy
from psrpc.core.tables import Eviction
from psrpc.files.durable import make_directory
from psrpc.v1 import coordinator_pb2 as pb
from tests.sim.cluster import TOGETHER, Cluster
from tests.sim.coordinator import Coordinator
from tests.sim.disk import Disk, File, View
from tests.sim.faults import PLANNED, RATES, Faults
from tests.sim.options import draw
from tests.sim.run import (
    Verdict,
    run_attended,
    run_hosted,
    run_options,
    run_seed,
    run_summed,
    silenced,
)
from tests.sim.schedule import Process, Schedule
from tests.sim.store import StoreFile
from tests.sim.table_witness import Recent
from tests.sim.worker import Worker

SEEDS = 260
"""Sixty of them find each planted bug, in one case the last ones; ``make sim`` runs as many as one
likes."""

FAST, CHUNK = 50, 105
ATTENDED = 90
"""The first 25 find every planted bug that takes an attendant."""

DRAWN = 300

RUN = Path("/run")


verdict_of = cache(run_seed)
"""Several tests look at the same seeds."""


@pytest.fixture(autouse=True)
def _silent() -> Iterator[None]:
    with silenced():
        yield


@pytest.mark.parametrize("first", range(0, FAST, 5))
def test_clusters_with_faults(first: int) -> None:
    _all_hold(range(first, first + 5))


@pytest.mark.slow
@pytest.mark.parametrize("first", range(FAST, SEEDS, CHUNK))
def test_many_clusters_with_faults(first: int) -> None:
    _all_hold(range(first, first + CHUNK))


def _all_hold(seeds: range) -> None:
    fired: Counter[str] = Counter()
    for seed in seeds:
        verdict = verdict_of(seed)
        assert not verdict.failure, str(verdict)
        fired += verdict.fired
    assert fired


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, FAST, 10))
def test_clusters_whose_epochs_wait_for_evaluations(first: int) -> None:
    for seed in range(first, first + 10):
        verdict = run_options(seed, replace(draw(Random(seed)), paced=True, eval_records=5000))
        assert not verdict.failure, str(verdict)


@pytest.mark.parametrize("first", range(0, 6, 2))
def test_attended_clusters(first: int) -> None:
    _hold(range(first, first + 2))


@pytest.mark.slow
@pytest.mark.parametrize("first", range(6, ATTENDED, 42))
def test_many_attended_clusters(first: int) -> None:
    _hold(range(first, first + 42))


def _hold(seeds: range) -> None:
    ended = 0
    for seed in seeds:
        verdict = run_attended(seed)
        assert not verdict.failure, f"attended: {verdict}"
        ended += verdict.counts["holds ended"]
    assert ended


@pytest.mark.parametrize("first", range(0, 6, 2))
def test_clusters_whose_workers_host_the_parameters(first: int) -> None:
    _all_hosted_hold(range(first, first + 2))


@pytest.mark.slow
@pytest.mark.parametrize("first", range(6, 106, 50))
def test_many_clusters_whose_workers_host_the_parameters(first: int) -> None:
    """Slices go through all that there is."""
    seen = _all_hosted_hold(range(first, first + 50))
    assert {what for what in HOSTED if not seen[what]} == set()


@pytest.mark.parametrize("first", range(0, 4, 2))
def test_clusters_whose_workers_sum_gradients_of_a_round(first: int) -> None:
    _counted(run_summed, range(first, first + 2))


@pytest.mark.slow
def test_many_clusters_whose_workers_sum_gradients_of_a_round() -> None:
    """Sums are pushed while all kinds of things go wrong, to shards and to slices."""
    seen = _counted(run_summed, range(4, 44))
    wanted = ("sums pushed", "worker restarts", "shards restored", "slices hosted", "changes made")
    assert {what for what in wanted if not seen[what]} == set()


def _counted(run: Callable[[int], Verdict], seeds: range) -> Counter[str]:
    """Runs all of ``seeds``, none of which fails; returns what they have led to."""
    seen: Counter[str] = Counter()
    for seed in seeds:
        verdict = run(seed)
        assert not verdict.failure, str(verdict)
        seen += verdict.counts
    return seen


HOSTED = (
    "worker restarts",
    "shards restored",
    "rounds decided ahead",
    "coordinators drained",
    "moves to shards",
    "moves to workers",
    "holds ended",
)


def _all_hosted_hold(seeds: range) -> Counter[str]:
    seen = _counted(run_hosted, seeds)
    assert seen["slices hosted"]
    assert seen["calls of own slices"]
    return seen


@pytest.mark.slow
@pytest.mark.parametrize("kind", [*RATES, *PLANNED])
def test_every_kind_of_fault_happens(kind: str) -> None:
    """Alone, as often as it ever is."""
    for seed in range(100):
        options = draw(Random(seed))
        rates = {kind: RATES[kind][1]} if kind in RATES else {}
        planned = {kind: 3} if kind in PLANNED else {}
        options = replace(options, batch_s=0.5, rates=rates, planned=planned, far={})
        verdict = run_options(seed, options)
        assert not verdict.failure, str(verdict)
        assert verdict.fired.keys() <= {kind, "writes lost"}
        if verdict.fired[kind]:
            return
    pytest.fail(f"{kind} did not happen")


def test_seeds_are_of_every_policy() -> None:
    options = [draw(Random(seed)) for seed in range(DRAWN)]
    policies = [policy for one in options for policy in one.policies]
    assert {policy.mode for policy in policies} == {"async", "sync", "ssp"}
    assert set(SETTINGS) - {name for policy in policies for name in policy.changed()} == {
        "mode",
        "dc_lambda",
        "dc_decay",
    }
    for count in (
        sum(one.then is not None for one in options),
        sum(bool(one.changes) for one in options),
        sum(one.local_steps > 1 for one in options),
        sum(one.known for one in options),
        sum(one.tables > 0 for one in options),
        sum(one.tables > 0 and one.policy.rounds for one in options),
        sum(one.prefetch for one in options),
    ):
        assert count > DRAWN / 20


@pytest.mark.slow
@pytest.mark.parametrize("ruled", [False, True])
def test_policies_change_while_things_go_wrong(ruled: bool) -> None:
    """By the job's rule, and by an operator's command."""
    changed: Counter[str] = Counter()
    for seed in range(100):
        options = draw(Random(seed))
        if (options.then is not None) == ruled and len(options.policies) > 1:
            verdict = verdict_of(seed)
            assert not verdict.failure, str(verdict)
            if verdict.fired:
                changed += verdict.counts
        if changed["changes made"] >= 5:
            return
    pytest.fail("policies did not change")


@pytest.mark.slow
def test_workers_compute_ahead_while_things_go_wrong() -> None:
    seen: Counter[str] = Counter()
    for seed in range(100):
        if draw(Random(seed)).policy.rounds:
            verdict = verdict_of(seed)
            assert not verdict.failure, str(verdict)
            if verdict.fired:
                seen += verdict.counts
        if seen["computed ahead"] >= 10 and seen["worker restarts"]:
            return
    pytest.fail(f"workers did not compute ahead: {seen}")


TABLES = (
    "rows pulled with a push",
    "rows pulled alone",
    "rows prefetched",
    "rows written whole",
    "rows continued",
    "rows restored",
    "rows evicted",
    "shard restarts",
)


@pytest.mark.slow
def test_tables_go_through_all_that_there_is() -> None:
    """Rows take every way, and come back from every kind of part."""
    seen: Counter[str] = Counter()
    for seed in range(200):
        if draw(Random(seed)).tables:
            verdict = verdict_of(seed)
            assert not verdict.failure, str(verdict)
            seen += verdict.counts
        if all(seen[what] >= 3 for what in TABLES):
            return
    pytest.fail(f"rows have not seen everything: {seen}")


@pytest.mark.slow
@pytest.mark.parametrize("eviction", get_args(Eviction))
def test_evicted_rows_are_the_same_after_a_restore(eviction: Eviction) -> None:
    """Also of more candidates than a shard counts."""
    seen: Counter[str] = Counter()
    for seed in range(100):
        options = replace(
            draw(Random(seed)),
            # A record in each round, and each id comes twice.
            policy=Policy(mode="sync", replicas=1),
            then=None,
            changes=(),
            tables=4,
            recent=Recent(recurring=10, min_count=2, eviction=eviction),
            shards=1,
            workers=1,
            batches=10,
            epochs=2,
            batch_size=1,
            local_steps=1,
            records=10,
            skipped=(),
            checkpoint_every=3,
            batch_s=1.0,
            rates={},
            planned={"crash of some": 2},
            far={},
            early=False,
            faults_s=20.0,
        )
        verdict = run_options(seed, options)
        assert not verdict.failure, str(verdict)
        if verdict.counts["rows restored"]:
            seen += verdict.counts
        if seen["rows restored"] >= 3 and seen["candidates dropped"] >= 3:
            return
    pytest.fail(f"candidates were not dropped after a restore: {seen}")


@pytest.mark.slow
def test_checkpoints_that_share_parts_rot_together() -> None:
    """And a job goes on from one that does not."""
    seen: Counter[str] = Counter()
    for seed in range(100):
        drawn = draw(Random(seed))
        options = replace(
            drawn,
            policy=replace(drawn.policy, delay_compensation=None),
            then=None,
            changes=(),
            tables=2,
            # One shard and many checkpoints: parts of rows are many of the files.
            shards=1,
            workers=1,
            batches=10,
            epochs=2,
            batch_size=1,
            local_steps=1,
            records=10,
            skipped=(),
            checkpoint_every=1,
            keep_checkpoints=5,
            batch_s=1.0,
            rates={},
            planned={"rot": 4, "crash of some": 2},
            far={},
            early=False,
            faults_s=20.0,
        )
        verdict = run_options(seed, options)
        assert not verdict.failure, str(verdict)
        seen += verdict.counts
        if seen[TOGETHER] >= 3 and seen["fall-backs"] >= 3:
            return
    pytest.fail(f"parts did not rot: {seen}")


def test_a_seed_is_the_same_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second time with a database that the first has made."""
    monkeypatch.setattr(StoreFile, "_spare", [])
    one, other = run_seed(5), run_seed(5)
    assert one.digest == other.digest
    assert one.fired == other.fired
    assert run_seed(4).digest != one.digest


@pytest.mark.slow
def test_a_seed_is_the_same_in_another_process() -> None:
    """Whose sets of strings have another order."""
    said = {
        subprocess.run(
            [sys.executable, "-m", "tests.sim", "--seed", "3", "--trace"],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        ).stdout
        for hash_seed in ("1", "2")
    }
    assert len(said) == 1


def test_a_failing_seed_says_how_to_see_it_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def contains(_self: AppliedSet, _batch: BatchId) -> bool:
        return False

    monkeypatch.setattr(AppliedSet, "contains", contains)
    failed = _first_failure(range(20))
    assert f"seed {failed.seed} fails: " in str(failed)
    assert "policy=[" in str(failed)
    assert f"python -m tests.sim --seed {failed.seed} --trace" in str(failed)


def test_a_job_that_does_not_end_says_what_everybody_waits_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def live(worker: Worker) -> Iterator[object]:
        yield lambda _task: None

    monkeypatch.setattr(Worker, "live", live)
    failed = _first_failure(range(1))
    assert "the job does not end" in failed.failure
    assert "a worker to register" in failed.failure


def _first_failure(seeds: range) -> Verdict:
    return next(verdict for verdict in map(run_seed, seeds) if verdict.failure)


def test_calls_that_poll_at_their_own_time_wake_no_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each has its own time, and once that has come another one: looks rise with the calls and the
    time, and not with their powers."""
    looks: list[str] = []

    def find(engine: Engine, caller: Caller, received: int) -> Work:
        looks.append(caller.name)
        return Wait("a worker that is late", until=engine.job_run.now() + 0.1)

    monkeypatch.setattr(Engine, "_find", find)
    cluster = Cluster(1, draw(Random(1)))
    process = Process(cluster.schedule, "coordinator", 1)
    coordinator = Coordinator(cluster, process)
    cluster.lives["coordinator"] = coordinator
    process.spawn(coordinator.live())
    cluster.schedule.run(lambda: coordinator.job_run is not None)
    answers: list[object] = []
    for name in ("a", "b", "c"):
        work = Wait("a worker that is late", until=cluster.schedule.now())
        coordinator._answer_work(work, Caller(name, 1, 1), 0, pb.LeaseWorkResponse, answers.append)
    cluster.schedule.run(lambda: len(looks) > 1000 or len(answers) == 3)
    cluster.store.close()
    assert len(answers) == 3, f"looked {len(looks)} times by {cluster.schedule.now():.1f} s"
    assert POLL_S / 0.1 <= len(looks) / 3 <= 2 * POLL_S / 0.1


def test_events_without_end_at_one_instant_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    def tick(coordinator: Coordinator) -> None:
        coordinator._schedule.after(0.0, coordinator.process, coordinator._settle)
        coordinator._schedule.after(0.0, coordinator.process, tick, coordinator)

    monkeypatch.setattr(Coordinator, "_settle", tick)
    verdict = run_seed(1)
    assert "more than 10000 events at " in verdict.failure
    assert "of coordinator#" in verdict.failure


# -- the disk ---------------------------------------------------------------------------------


def _disk(**rates: float) -> tuple[Disk, View, Process]:
    schedule = Schedule(1)
    faults = Faults(schedule.random, rates, schedule.now)
    faults.begin(1.0)
    disk = Disk(schedule.random, faults)
    process = Process(schedule, "shard-0", 1)
    return disk, View(disk, process), process


def test_a_power_cut_takes_names_that_were_not_synced() -> None:
    kept = 0
    for _ in range(20):
        disk, view, process = _disk()
        make_directory(RUN, view)
        view.write(RUN / "a", [b"1"])
        view.sync(RUN)
        view.write(RUN / "b", [b"2"])
        disk.random.seed(kept)
        disk.lose({process.name})
        assert view.open(RUN / "a").read() == b"1"
        kept += "b" in disk.directory(RUN).names
    assert kept < 20


def test_a_sync_that_failed_is_not_made_good_by_another() -> None:
    disk, view, process = _disk()
    make_directory(RUN, view)
    view.write(RUN / "a", [b"1"])
    disk.directory(RUN).fail_to_sync()
    view.sync(RUN)
    assert disk.lacking(RUN)
    disk.lose({process.name})
    assert "a" not in disk.directory(RUN).names


def test_a_sync_that_failed_is_made_good_by_new_changes() -> None:
    """All of what it has failed for, and not by halves."""
    disk, view, process = _disk()
    for old in ("a", "b"):
        make_directory(RUN / old, view)
    view.rename(RUN / "a", RUN / "a2")
    view.rename(RUN / "b", RUN / "b2")
    disk.directory(RUN).fail_to_sync()
    view.rename(RUN / "a2", RUN / "c")
    view.rename(RUN / "c", RUN / "a2")
    view.sync(RUN)
    assert disk.lacking(RUN / "a2") == ""
    assert disk.lacking(RUN / "b2")
    disk.lose({process.name})
    assert sorted(disk.directory(RUN).names) == ["a2", "b"]


def test_bytes_that_were_not_synced_are_torn_by_a_power_cut() -> None:
    disk, view, process = _disk()
    make_directory(RUN, view)
    view.write(RUN / "a", [b"1" * 100])
    view.sync(RUN)
    file = disk.directory(RUN).names["a"]
    assert isinstance(file, File)
    file.lasts = False
    assert disk.lacking(RUN)
    disk.lose({process.name})
    assert file.data != b"1" * 100


def test_a_rename_is_kept_whole_or_not_at_all() -> None:
    seen = set()
    for seed in range(20):
        disk, view, process = _disk()
        make_directory(RUN / "old", view)
        view.rename(RUN / "old", RUN / "new")
        disk.random.seed(seed)
        disk.lose({process.name})
        seen.add(tuple(disk.directory(RUN).names))
    assert seen == {("old",), ("new",)}


def test_linked_files_rot_together_while_another_stays_good() -> None:
    disk, view, process = _disk()
    for step in range(3):
        make_directory(RUN / f"step-{step}", view)
    view.write(RUN / "step-0" / "a", [b"old"])
    view.write(RUN / "step-1" / "a", [b"1"])
    view.link(RUN / "step-1" / "a", RUN / "step-2" / "a")
    assert disk.rot(RUN) == 2
    damaged = view.open(RUN / "step-2" / "a").read()
    assert damaged != b"1"
    assert view.open(RUN / "step-1" / "a").read() == damaged
    assert view.open(RUN / "step-0" / "a").read() == b"old"
    assert disk.rot(RUN) == 0
    disk.lose({process.name})


def test_no_file_rots_that_all_checkpoints_have() -> None:
    disk, view, _ = _disk()
    for step in range(2):
        make_directory(RUN / f"step-{step}", view)
    view.write(RUN / "step-0" / "a", [b"1"])
    view.link(RUN / "step-0" / "a", RUN / "step-1" / "a")
    assert disk.rot(RUN) == 0
