"""Clusters whose workers host the parameters: they outlive what is killed or drained, and end in
the bits of shards in processes of their own. With embedding tables: tests/e2e/test_tables.py."""

from __future__ import annotations

import signal
from contextlib import ExitStack, closing
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from psrpc.checkpoint.load import load_variables
from tests.e2e.cluster import LIMIT_S, Gate, Process, Run, by_hand, codes, members, up
from tests.e2e.test_recovery import COMMON, GATED, assert_all_counted_once, faulty

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3 * LIMIT_S)]

SYNC = ("--mode", "sync", "--replicas", "4", "--set", "checkpoint_every=20")
HOSTED = ("--set", "dense=allreduce")


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, npt.NDArray[np.generic]]:
    """The variables at the end of a run with shards and one worker, which nothing disturbs."""
    whole = up(GATED, tmp_path_factory.mktemp("whole") / "run", *COMMON, "--workers", "1", *SYNC)
    return load_variables(whole.checkpoint)


def assert_same_bits(run: Run, expected: dict[str, npt.NDArray[np.generic]]) -> None:
    for name, value in load_variables(run.checkpoint).items():
        np.testing.assert_array_equal(value, expected[name], err_msg=name)


def assert_close(run: Run, expected: dict[str, npt.NDArray[np.generic]]) -> None:
    """Sums in another order differ by rounding, which 126 steps with momentum amplify."""
    for name, value in load_variables(run.checkpoint).items():
        found, exact = value.astype(np.float64), expected[name].astype(np.float64)
        np.testing.assert_allclose(found, exact, rtol=0, atol=1e-4, err_msg=name)


@pytest.mark.parametrize("exact", [True, False], ids=["exact", "sums"])
def test_training_outlives_killed_hosts_and_ends_in_the_bits_of_shards(
    tmp_path: Path, expected: dict[str, npt.NDArray[np.generic]], exact: bool
) -> None:
    """With sums of a round it ends near them, and every batch counts once all the same."""
    with faulty(tmp_path, *SYNC, *HOSTED, "--set", f"exact={exact}") as cluster:
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
    (assert_same_bits if exact else assert_close)(run, expected)


def test_a_drained_host_hands_its_slice_to_another_worker_in_a_cluster_by_hand(
    tmp_path: Path,
) -> None:
    with ExitStack() as stack:
        hand = stack.enter_context(by_hand(tmp_path))
        gate = stack.enter_context(closing(Gate(tmp_path, epoch=1)))
        more = ("--set", "epochs=3", "--set", "engine=keras")
        coordinator = hand.coordinator(GATED, *SYNC, *HOSTED, *more)
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
