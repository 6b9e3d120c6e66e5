"""A model of a script's ``__main__`` trains in the processes of a job."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from psrpc.checkpoint.load import load_variables
from tests.e2e.cluster import ended, up

pytestmark = pytest.mark.slow

POLICY = ("--shards", "1", "--workers", "1", "--mode", "sync", "--replicas", "1")

METRICS = {
    "sequential": {"loss", "distance", "mae"},
    "subclassed": {"loss", "mae"},
    "two": {"loss", "number_loss", "kind_loss", "number_distance", "kind_accuracy"},
}


@pytest.mark.parametrize("kind", METRICS)
def test_a_handed_over_model_trains(kind: str, tmp_path: Path) -> None:
    folder = tmp_path / "fit"
    folder.mkdir()
    wrote = ended("tests.e2e.fit_models", kind, folder)
    assert wrote.returncode == 0, wrote.stderr
    run = up(folder / "fit.py", tmp_path / "run", *POLICY)
    assert set(run.summary["eval"]) == METRICS[kind]
    trained = dict(load_variables(run.checkpoint))
    with np.load(folder / "begun.npz", allow_pickle=False) as begun:
        for name, array in begun.items():
            assert trained[name].shape == array.shape
            # A few steps from the caller's values, under the caller's names.
            assert 0 < np.abs(trained[name] - array).max() < 0.5, name
