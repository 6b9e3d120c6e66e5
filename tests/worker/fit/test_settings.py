"""Arguments of a cluster are checked where they are given."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

from psrpc.core.errors import InvalidArgument, InvalidData, InvalidJob
from worker.data.source import NO_LABELS
from worker.fit.cluster import Cluster
from worker.fit.settings import job_fields, up_flags
from worker.handover.refusals import check_has_labels

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"worker": 2}, "Cluster has no setting worker; did you mean 'workers'?"),
        ({"stalenes": 2}, "Cluster has no setting stalenes; did you mean 'staleness'?"),
        ({"zzz": 2}, "Cluster has no setting zzz; it knows gpu, "),
        ({"epochs": 2}, "Cluster takes no epochs: it follows from the model and the call of fit"),
        ({"workers": 0}, "workers is 0 (int); expected a whole number of at least 1"),
        ({"mode": "synch"}, "mode is 'synch' (str); expected "),
        ({"mode": "ssp"}, "mode is 'ssp' but staleness is not set"),
        ({"staleness": 2}, "staleness"),
        ({"mode": "async", "replicas": 2}, "replicas is 2, and mode 'async'; only sync"),
        ({"aggregate": 3, "replicas": 2}, "aggregate is 3, but a round has only 2 micro-batches"),
        ({"mode": "async", "dense": "allreduce"}, "dense is 'allreduce', which is for mode sync"),
        ({"engine": "nump"}, "engine is 'nump' (str); expected keras or numpy"),
        ({"gpu": "first"}, "gpu: 'first' is not auto, none, all or indices of GPUs"),
        ({"intra_op_threads": 0}, "intra_op_threads is 0 (int); expected a whole number"),
    ],
)
def test_an_argument_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises((InvalidJob, InvalidArgument)) as refused:
        Cluster(**given)
    assert str(refused.value).startswith(message)
    assert "\n" not in str(refused.value)


def test_settings_go_to_the_job_and_to_the_command_line() -> None:
    given: dict[str, Any] = {
        "engine": "numpy",
        "staleness": 2,
        "connect_timeout_s": 5,
        "intra_op_threads": 1,
    }
    Cluster(mode="ssp", **given)
    Cluster(aggregate=3)
    assert job_fields(given) == {"engine": "numpy", "staleness": 2}
    assert up_flags(given) == ["--intra-op-threads=1", "--connect-timeout=5"]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(run_dir=tmp_path_factory.mktemp("runs")) as entered:
        yield entered


@pytest.fixture
def model() -> keras.Model:
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)], name="one")
    model.compile("sgd", "mse")
    return model


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"epochs": 2.5}, "epochs is 2.5 (float); expected a whole number of at least 0"),
        ({"initial_epoch": "1"}, "initial_epoch is '1' (str); expected a whole number of at"),
        ({"validation_freq": 0}, "validation_freq is 0 (int); expected a whole number of at least"),
        ({"y": None}, "y has no labels, and model 'one' is compiled with a loss, which needs them"),
        ({"validation_data": np.ones((2, 2))}, "validation_data has no labels, and model 'one' is"),
    ],
)
def test_an_argument_of_fit_is_refused_and_leaves_nothing(
    given: dict[str, Any],
    message: str,
    cluster: Cluster,
    model: keras.Model,
    tmp_path: Path,
) -> None:
    cluster._base = tmp_path
    with pytest.raises(InvalidJob) as refused:
        cluster.fit(model, **{"x": np.ones((4, 2)), "y": np.ones(4), **given})
    assert str(refused.value).startswith(message)
    assert not any(tmp_path.iterdir())


def test_labels_may_lack_where_no_loss_needs_them(model: keras.Model) -> None:
    nothing = (np.ones((4, 2)), NO_LABELS)
    with pytest.raises(InvalidData, match="y has no labels"):
        check_has_labels(model, "y", nothing)
    check_has_labels(model, "y", (np.ones((4, 2)), np.ones(4)))
    without = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    without.compile("sgd")
    check_has_labels(without, "y", nothing)


def test_a_directory_that_cannot_be_made_is_named(
    cluster: Cluster, model: keras.Model, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    cluster._base = tmp_path / "file"
    with pytest.raises(InvalidArgument, match=r"run_dir is '.*file', which is no folder to write"):
        cluster.fit(model, np.ones((4, 2)), np.ones(4))


def test_fit_outside_of_the_block_is_refused_first(model: keras.Model, tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="this cluster is not entered; say: with"):
        Cluster(run_dir=tmp_path).fit(model)
