"""A whole cluster that is given ragged ids, of which no record has as many as the next: rows end as
those of a plain loop over a whole table do, whatever the records are read from."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from psrpc.checkpoint.load import load_variables
from psrpc.checkpoint.rows_chain import load_table
from tests.e2e.cluster import JOBS, ended, up

pytestmark = pytest.mark.slow


def test_ragged_ids_of_tfrecords_train_and_are_evaluated_as_in_a_plain_loop_on_arrays(
    tmp_path: Path,
) -> None:
    from tests.e2e.jobs import baskets  # TensorFlow

    records, out = tmp_path / "baskets.tfrecord", tmp_path / "loop.npz"
    baskets.write(str(records))
    ended("tests.e2e.plain_table_loop", "baskets", out).check_returncode()
    loop = np.load(out)
    assert np.abs(loop["rows"] - baskets.INITIAL).max() > 0.01, "training changes rows"
    of_file = ("--set", f"data={records}")
    sync = ("--mode", "sync", "--shards", "2", "--workers", "2")
    run = up(JOBS / "baskets.py", tmp_path / "run", *sync, *of_file)
    assert run.summary["examples"] == 2 * baskets.RECORDS
    table = load_table(run.checkpoint, "things")
    np.testing.assert_array_equal(table.ids, loop["ids"])
    np.testing.assert_array_equal(table.counts, loop["rounds"])
    np.testing.assert_allclose(table.values, loop["rows"], rtol=0, atol=1e-4)
    for name, value in load_variables(run.checkpoint).items():
        plain = loop[name.rpartition("/")[2]]
        np.testing.assert_allclose(value, plain, rtol=0, atol=1e-4, err_msg=name)
    assert run.summary["eval"]["loss"] == pytest.approx(float(loop["loss"]), rel=1e-4)
