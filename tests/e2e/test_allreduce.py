"""Clusters whose workers host the parameters: they outlive what is killed, drained or resumed, and
end in the bits of shards in processes of their own."""

from __future__ import annotations

import signal
from contextlib import ExitStack, closing
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from psrpc.checkpoint.checkpoint import read_manifest
from psrpc.checkpoint.load import load_variables
from tests.e2e.cluster import LIMIT_S, Gate, Process, Run, by_hand, codes, members, up
from tests.e2e.test_recovery import (
    COMMON,
    EPOCHS,
    GATED,
    Faulty,
    assert_all_counted_once,
    faulty,
)
from tests.e2e.test_tables import RATED, SLOTS
from tests.e2e.test_tables import assert_same_bits as assert_same_rows

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3 * LIMIT_S)]

SYNC = ("--mode", "sync", "--set", "checkpoint_every=20")
HOSTED = ("--set", "dense=allreduce")


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, npt.NDArray[np.generic]]:
    """The variables at the end of a run with shards and one worker, which nothing disturbs."""
    whole = up(GATED, tmp_path_factory.mktemp("whole") / "run", *COMMON, "--workers", "1", *SYNC)
    return load_variables(whole.checkpoint)


def assert_same_bits(run: Run, expected: dict[str, npt.NDArray[np.generic]]) -> None:
    for name, value in load_variables(run.checkpoint).items():
        np.testing.assert_array_equal(value, expected[name], err_msg=name)


def test_training_outlives_killed_hosts_and_ends_in_the_bits_of_shards(
    tmp_path: Path, expected: dict[str, npt.NDArray[np.generic]]
) -> None:
    with faulty(tmp_path, *SYNC, *HOSTED) as cluster:
        generation = cluster.until_trained(after=0)
        assert not members(cluster.run_dir, "pserver")
        cluster.kill("worker")
        generation = cluster.until_trained(after=generation)
        cluster.kill("coordinator")
        cluster.kill("worker")
        generation = cluster.until_trained(after=generation)
        run = cluster.end()
    assert_all_counted_once(run)
    restarts = run.summary["restarts"]
    assert restarts["coordinator"] == 1
    assert sum(n for name, n in restarts.items() if name.startswith("worker")) == 2
    assert run.summary["generation"] == generation == 3
    assert_same_bits(run, expected)


def test_a_run_with_tables_goes_from_shards_to_workers_and_back_and_loses_both_kinds_of_hosts(
    tmp_path: Path,
) -> None:
    whole = up(RATED, tmp_path / "whole", *COMMON, *SYNC)
    run_dir = tmp_path / "run"
    args: tuple[str | Path, ...] = ("up", RATED, *COMMON, *SYNC, "--run-dir", run_dir)
    with by_hand(tmp_path) as hand:
        for gate_at, more in ((5, ()), (EPOCHS - 1, ("--resume", *HOSTED, "--set", "slices=2"))):
            folder = tmp_path / f"gate-{gate_at}"
            folder.mkdir()
            with closing(Gate(folder, epoch=gate_at)) as gate:
                cluster = hand.start("up", "coordinator", *args, *more, **gate.environment)
                cluster.wait_for(r"training  epoch \d+/12 ")
                assert len(members(run_dir, "pserver")) == 2
                if more:
                    with Faulty(run_dir, cluster, gate) as harmed:
                        generation = harmed.until_trained(after=0)
                        for role in ("worker", "pserver"):
                            harmed.kill(role)
                            generation = harmed.until_trained(after=generation)
                else:
                    cluster.wait_for(rf"training  epoch {gate_at}/12 ")
                cluster.kill(signal.SIGINT)
                assert cluster.wait() == 130, cluster.text()
                plan = read_manifest(Run(run_dir, 130, "", "").checkpoint).plan
                assert (plan.shards, plan.slices) == ((4, 2) if more else (2, 0))
    run = up(RATED, run_dir, *COMMON, *SYNC, "--resume")
    assert_all_counted_once(run)
    assert_same_bits(run, load_variables(whole.checkpoint))
    assert_same_rows(run, whole, SLOTS)


def test_a_drained_host_hands_its_slice_to_another_worker_in_a_cluster_by_hand(
    tmp_path: Path,
) -> None:
    with ExitStack() as stack:
        hand = stack.enter_context(by_hand(tmp_path))
        gate = stack.enter_context(closing(Gate(tmp_path, epoch=1)))
        coordinator = hand.coordinator(GATED, *SYNC, *HOSTED, "--set", "epochs=3")
        where = coordinator.wait_for(r"serving +address=(\S+)")[1]

        def worker(name: str) -> Process:
            args = ("run", "--gpu", "none", "--coordinator", where)
            return hand.start(name, "worker", *args, **gate.environment)

        refused = hand.start("shard", "pserver", "serve", "--shard", "0", "--coordinator", where)
        assert refused.wait() == 2
        refused.wait_for("error PS.*: dense is 'allreduce', so workers host the parameters")
        host = worker("first")
        host.wait_for("hosts a slice +.*shard=0")
        other = worker("second")
        host.wait_for("waiting for the training data")
        other.wait_for("waiting for the training data")
        host.kill(signal.SIGTERM)
        assert host.wait() == 75, host.text()
        other.wait_for("hosts a slice +.*shard=0")
        gate.open()
        assert codes([coordinator, other]) == [0, 0], hand.logs()
        coordinator.wait_for("over .*phase=done")
