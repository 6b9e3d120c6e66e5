"""A whole cluster that trains an embedding table, of which a shard is killed: in sync mode rows end
as those of a plain loop over a whole table do, and in async mode every row has been in every batch
that names it, once."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from psrpc.checkpoint import load_variables, read_manifest
from psrpc.rows_chain import load_table
from psrpc.rows_reader import RowsBlock
from tests.e2e.cluster import JOBS, LIMIT_S, ROOT, Run, environment, up
from tests.e2e.test_recovery import COMMON, EPOCHS, assert_all_counted_once, faulty

pytestmark = pytest.mark.slow

RATED = JOBS / "rated.py"
EVERY = ("--set", "checkpoint_every=20")


@pytest.fixture(scope="module")
def loop(tmp_path_factory: pytest.TempPathFactory) -> dict[str, npt.NDArray[Any]]:
    """Of as many epochs as the clusters train."""
    out = tmp_path_factory.mktemp("loop") / "rated.npz"
    subprocess.run(
        [sys.executable, "-m", "tests.e2e.plain_table_loop", "rated", str(out), f"epochs={EPOCHS}"],
        check=True,
        timeout=LIMIT_S,
        cwd=ROOT,
        env=environment(),
    )
    return dict(np.load(out))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A synchronous run of one worker on two shards, in which nothing happens."""
    sync = ("--workers", "1", "--mode", "sync", *EVERY)
    return up(RATED, tmp_path_factory.mktemp("whole") / "run", *COMMON, *sync)


def harmed(folder: Path, *args: str) -> tuple[Run, RowsBlock]:
    """A run in which a shard was killed, and the table at its end."""
    with faulty(folder, *args, job=RATED) as cluster:
        generation = cluster.until_trained(after=0)
        cluster.kill("pserver")
        cluster.until_trained(after=generation)
        run = cluster.end()
    assert_all_counted_once(run)
    restarts = run.summary["restarts"]
    assert sum(n for name, n in restarts.items() if name.startswith("shard")) == 1
    return run, load_table(run.checkpoint, "things")


def assert_same_bits(table: RowsBlock, expected: RowsBlock) -> None:
    np.testing.assert_array_equal(table.ids, expected.ids)
    np.testing.assert_array_equal(table.values, expected.values)
    np.testing.assert_array_equal(table.slots["momentums"], expected.slots["momentums"])
    np.testing.assert_array_equal(table.counts, expected.counts)


def test_sync_rows_have_the_same_bits_on_other_shards_after_a_loss_and_agree_with_a_plain_loop(
    tmp_path: Path, loop: dict[str, npt.NDArray[Any]], whole: Run
) -> None:
    sync = ("--mode", "sync", *EVERY)
    up(RATED, tmp_path / "run", *sync, "--shards", "2", "--set", "epochs=2")
    # The rows of two shards go on in three, of which one is lost.
    run, table = harmed(tmp_path, *sync, "--shards", "3", "--resume")
    assert read_manifest(run.checkpoint).plan.shards == 3
    assert_same_bits(table, load_table(whole.checkpoint, "things"))
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


def test_async_every_row_was_in_every_batch_that_names_it_once(
    tmp_path: Path, loop: dict[str, npt.NDArray[Any]]
) -> None:
    run, table = harmed(tmp_path, "--mode", "async", *EVERY)
    np.testing.assert_array_equal(table.ids, loop["ids"])
    np.testing.assert_array_equal(table.counts, loop["batches"])
    assert np.isfinite(table.values).all()
    assert run.summary["global_step"] == run.summary["batches"]
    files = [file.rows for file in read_manifest(run.checkpoint).files]
    assert all(files), "rows of both shards are in the checkpoint"
