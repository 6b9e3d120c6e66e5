"""The job of a ``fit`` that has ended, which has the first record of its data alone."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from psrpc.core.batch import BatchId
from psrpc.core.errors import InvalidData
from worker.handover.fitted import EndedData, fit_job, write_sample
from worker.handover.spec import EVAL, TRAIN, FitSpec, write_spec
from worker.stored.arguments import training_data
from worker.stored.stored_data import store

pytestmark = pytest.mark.slow

X, Y = np.arange(12.0, dtype="float32").reshape(6, 2), np.arange(6.0, dtype="float32")


def test_an_export_finds_a_record_after_the_data_has_gone(tmp_path: Path) -> None:
    train, held_out = training_data({"a": X}, Y, batch_size=2, validation_data=({"a": X}, Y))
    assert held_out is not None
    spec = FitSpec(
        train=store(tmp_path / TRAIN, train), eval=store(tmp_path / EVAL, held_out), batch_size=2
    )
    write_spec(tmp_path, spec)
    write_sample(tmp_path, ({"a": X[:1]}, Y[:1]))
    job = fit_job(tmp_path)
    assert job.train.num_records == 6
    assert job.eval is not None
    job.train.close()

    for name in (TRAIN, EVAL):
        for path in (tmp_path / name).iterdir():
            path.unlink()
        (tmp_path / name).rmdir()
    job = fit_job(tmp_path)
    assert isinstance(job.train, EndedData)
    assert job.eval is None
    assert job.train.num_records == 1
    x, y = job.train.read_range(0, 5)
    np.testing.assert_array_equal(x["a"], X[:1])
    np.testing.assert_array_equal(y, Y[:1])
    with pytest.raises(InvalidData, match="went with its end; call fit again"):
        job.train.read(0, BatchId(0, 0, 1))
