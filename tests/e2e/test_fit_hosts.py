"""``model.fit`` on a cluster whose workers host the parameters."""

from __future__ import annotations

from pathlib import Path

import pytest

import pserver
from tests.e2e.cluster import members
from tests.e2e.test_fit import assert_outlives, fitted

pytestmark = [
    pytest.mark.slow,
    # Of Keras, which writes arrays of TensorFlow with h5py.
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
]


def test_fit_outlives_hosts_of_the_parameters_with_the_bits_of_shards(tmp_path: Path) -> None:
    with pserver.Cluster(workers=2, run_dir=tmp_path / "shards", intra_op_threads=1):
        undisturbed = fitted()
    with pserver.Cluster(
        shards=2,
        workers=2,
        run_dir=tmp_path / "hosts",
        dense="allreduce",
        intra_op_threads=1,
    ) as cluster:
        assert_outlives(cluster, {1: "worker", 3: "worker"}, undisturbed)
        assert cluster.run_dir is not None
        assert not members(cluster.run_dir, "pserver")
