"""A whole cluster that trains embedding tables, of which a process is killed: in sync mode rows end
as those of a plain loop over a whole table do, on any number of shards and with any optimizer, and
in the other modes every row has been in every batch that names it, once."""

from __future__ import annotations

import json
import os
import signal
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from psrpc.checkpoint.checkpoint import read_manifest
from psrpc.checkpoint.load import load_variables
from psrpc.checkpoint.rows_chain import load_table
from psrpc.v1.coordinator_pb2 import GetJobStatusResponse
from tests.e2e.cluster import JOBS, LIMIT_S, Gate, Run, by_hand, ended, up
from tests.e2e.test_recovery import COMMON, EPOCHS, Faulty, assert_all_counted_once, faulty
from worker.step.feed import SHORT_DEPTH

pytestmark = pytest.mark.slow

RATED = JOBS / "rated.py"
EVERY = ("--set", "checkpoint_every=20")
OLDEST, AHEAD = 1, 1
"""``max_staleness``, and the ``staleness`` of ssp."""

SLOTS = {
    "things": {"momentums"},
    "adagrad": {"accumulators"},
    "adam": {"momentums", "velocities"},
    "ftrl": {"accumulators", "linears"},
    "rowwise": {"row_accumulators"},
}
"""The tables, and what each keeps beside its values."""


@pytest.fixture(scope="module")
def loop(tmp_path_factory: pytest.TempPathFactory) -> dict[str, npt.NDArray[Any]]:
    """Of as many epochs as the clusters train."""
    out = tmp_path_factory.mktemp("loop") / "rated.npz"
    ended("tests.e2e.plain_table_loop", "rated", out, f"epochs={EPOCHS}").check_returncode()
    return dict(np.load(out))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A synchronous run of one worker on two shards, in which nothing happens."""
    sync = ("--workers", "1", "--mode", "sync", *EVERY)
    return up(RATED, tmp_path_factory.mktemp("whole") / "run", *COMMON, *sync)


def harmed(folder: Path, *args: str) -> Run:
    """A run in which a shard was killed."""
    with faulty(folder, *args, job=RATED) as cluster:
        generation = cluster.until_trained(after=0)
        cluster.kill("pserver")
        cluster.until_trained(after=generation)
        run = cluster.end()
    assert_all_counted_once(run)
    restarts = run.summary["restarts"]
    assert sum(n for name, n in restarts.items() if name.startswith("shard")) == 1
    return run


def assert_same_bits(run: Run, other: Run, slots: dict[str, set[str]]) -> None:
    """All tables of both are alike; ``slots`` are those of each."""
    for name, expected_slots in slots.items():
        table, expected = load_table(run.checkpoint, name), load_table(other.checkpoint, name)
        assert set(table.slots) == expected_slots
        np.testing.assert_array_equal(table.ids, expected.ids)
        np.testing.assert_array_equal(table.values, expected.values)
        np.testing.assert_array_equal(table.counts, expected.counts)
        for slot, values in table.slots.items():
            np.testing.assert_array_equal(values, expected.slots[slot])


def assert_in_every_batch_once(run: Run, loop: dict[str, npt.NDArray[Any]]) -> None:
    """Each row has been in every batch that names it, once."""
    for name in SLOTS:
        table = load_table(run.checkpoint, name)
        np.testing.assert_array_equal(table.ids, loop["ids"])
        np.testing.assert_array_equal(table.counts, loop["batches"])
        assert np.isfinite(table.values).all()
    assert run.summary["global_step"] == run.summary["batches"]


def test_sync_rows_have_the_same_bits_on_other_shards_after_a_loss_and_agree_with_a_plain_loop(
    tmp_path: Path, loop: dict[str, npt.NDArray[Any]], whole: Run
) -> None:
    sync = ("--mode", "sync", *EVERY)
    up(RATED, tmp_path / "run", *sync, "--shards", "2", "--set", "epochs=2")
    # The rows of two shards go on in three, of which one is lost.
    run = harmed(tmp_path, *sync, "--shards", "3", "--resume")
    assert read_manifest(run.checkpoint).plan.shards == 3
    assert_same_bits(run, whole, SLOTS)
    table = load_table(run.checkpoint, "things")
    np.testing.assert_array_equal(table.ids, loop["ids"])
    np.testing.assert_array_equal(table.counts, loop["rounds"])
    # TensorFlow sums what a batch has twice in another order.
    np.testing.assert_allclose(table.values, loop["rows"], rtol=0, atol=1e-4)
    dense = load_variables(run.checkpoint)
    expected = load_variables(whole.checkpoint)
    for name, value in dense.items():
        np.testing.assert_array_equal(value, expected[name], err_msg=name)
        plain = loop[name.rpartition("/")[2]]
        np.testing.assert_allclose(value, plain, rtol=0, atol=1e-4, err_msg=name)


def test_async_rows_that_are_fetched_ahead_are_refused_when_too_old_and_none_is_lost(
    tmp_path: Path, loop: dict[str, npt.NDArray[Any]]
) -> None:
    """tests/worker/step/test_table_training.py has how old they are."""
    old = ("--set", "prefetch_rows=true", "--set", f"max_staleness={OLDEST}")
    run = harmed(tmp_path, "--mode", "async", "--workers", "3", *old, *EVERY)
    assert_in_every_batch_once(run, loop)
    assert run.summary["too_stale"] > 0
    assert len(run.summary["staleness_counts"]) <= 1 + OLDEST
    files = [file.rows for file in read_manifest(run.checkpoint).files]
    assert all(files), "rows of both shards are in the checkpoint"


def test_ssp_workers_do_not_run_away_from_one_that_is_held_and_then_killed(
    tmp_path: Path, loop: dict[str, npt.NDArray[Any]]
) -> None:
    """The simulator has what each gradient's base holds. Staleness has no bound here: the worker
    that comes for the killed one may enter behind the others (docs/design/0027)."""
    hold = tmp_path / "hold"
    os.mkfifo(hold)
    ssp = ("--mode", "ssp", "--workers", "3", "--set", f"staleness={AHEAD}", *EVERY)
    began: dict[str, int] = {}
    steps: dict[str, int] = {}
    # The others were up to s + 1 steps behind it, it did those more whose data it had read, and
    # they may be s + 1 ahead then.
    most = 2 * (AHEAD + 1) + SHORT_DEPTH

    with faulty(tmp_path, *ssp, job=RATED, HOLD=str(hold)) as cluster:
        marker = hold.with_name("hold.pid")
        cluster.until(lambda _: marker.exists() and marker.read_text() != "", "a held worker")
        held = int(marker.read_text())

        def stand(status: GetJobStatusResponse) -> bool:
            others = [worker for worker in status.workers if worker.pid != held]
            for worker in others:
                began.setdefault(worker.worker, worker.batches)
                steps[worker.worker] = worker.batches - began[worker.worker]
            wait = ["workers that are behind" in worker.waiting_for for worker in others]
            return (len(others) == 2 and all(wait)) or max(steps.values(), default=0) > most

        cluster.until(stand, "the others, who wait for it")
        assert max(steps.values()) <= most, steps
        os.kill(held, signal.SIGKILL)
        run = cluster.end()
    assert_all_counted_once(run)
    assert_in_every_batch_once(run, loop)
    restarts = run.summary["restarts"]
    assert [name.partition("-")[0] for name in restarts] == ["worker"]


@pytest.mark.timeout(3 * LIMIT_S)
def test_a_run_with_tables_goes_from_shards_to_workers_and_back_and_loses_both_kinds_of_hosts(
    tmp_path: Path, whole: Run
) -> None:
    """By `coordinator set`, in the midst of training; what it has set outlives the coordinator."""
    run_dir = tmp_path / "run"
    sync = (*COMMON, "--mode", "sync", *EVERY, "--run-dir", run_dir)
    folders = [tmp_path / name for name in ("first", "last")]
    for folder in folders:
        folder.mkdir()
    with (
        by_hand(tmp_path) as hand,
        closing(Gate(folders[0], epoch=1)) as first,
        closing(Gate(folders[1], epoch=EPOCHS - 1)) as last,
    ):
        gates = {k: os.pathsep.join([v, last.environment[k]]) for k, v in first.environment.items()}
        launched = hand.start("up", "coordinator", "up", RATED, *sync, **gates)

        def change(
            cluster: Faulty, gate: Gate, settings: str, plan: tuple[str, int | None]
        ) -> None:
            """Workers wait at the gate at last, with batches that are finished first."""
            cluster.until(lambda s: s.phase == "training" and s.global_step > 0, "a first step")
            asked = hand.start("set", "coordinator", "set", *settings.split(), "--run-dir", run_dir)
            first_of, begins = settings.split()[0], f"the change to {settings}"
            cluster.until(
                lambda status: status.switching.startswith(begins) or first_of in status.changed,
                "the change to begin",
            )
            gate.open()
            assert asked.wait() == 0, asked.text()
            again = rf"{settings}: the cluster starts again from step [1-9]\d*\n"
            asked.wait_for(again)
            launched.wait_for(again)
            cluster.until(lambda status: status.phase == "training", "training")
            written = json.loads((run_dir / "job.json").read_text())["description"]
            assert (written["dense"], written["slices"]) == plan

        with Faulty(run_dir, launched, last) as cluster:
            change(cluster, first, "dense=allreduce slices=2", ("allreduce", 2))
            generation = cluster.until_trained(after=1)
            for role in ("coordinator", "worker", "pserver"):
                cluster.kill(role)
                generation = cluster.until_trained(after=generation)
            change(cluster, last, "dense=shards", ("shards", None))
            run = cluster.end()
    assert (run.summary["shards"], run.summary.get("slices")) == (2, None)
    assert_all_counted_once(run)
    assert_same_bits(run, whole, SLOTS)
    expected = load_variables(whole.checkpoint)
    for name, value in load_variables(run.checkpoint).items():
        np.testing.assert_array_equal(value, expected[name], err_msg=name)
