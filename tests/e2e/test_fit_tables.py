"""``model.fit`` on a cluster with embedding tables, whose rows stay on the shards."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import pserver
from psrpc.checkpoint.load import load_variables
from psrpc.checkpoint.manifest import read_manifest
from psrpc.checkpoint.rows_reader import RowsBlock
from psrpc.core.errors import CheckpointError, InvalidJob
from tests.e2e.cluster import ended, up
from tests.e2e.jobs import rated
from tests.e2e.test_fit import Killing
from tests.e2e.test_tables import RATED
from worker.embedding.model_tables import trained_tables
from worker.embedding.trained import load_table_state
from worker.fit.prepare import FOLDER
from worker.handover.spec import read_spec

pytestmark = [
    pytest.mark.slow,
    pytest.mark.fit,
    # Of Keras, which writes arrays of TensorFlow with h5py.
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
]

REPLICAS, BATCH = 3, 60
"""Micro-batches as those of the job."""

TABLES = ("things", *rated.OTHERS)
HELD_OUT = rated.x[:500], rated.y[:500]


def made() -> keras.Model:
    """Returns the model of the job, with the same weights each time; fits have the same seed."""
    keras.utils.set_random_seed(7)
    model = rated.model()
    optimizer = keras.optimizers.SGD(rated.RATE, momentum=rated.MOMENTUM)
    model.compile(optimizer, rated.loss, metrics=["mae"])
    return model


def small(**options: Any) -> keras.Model:
    """Returns a small model with one table."""
    ids = keras.Input((3,), dtype="int64")
    rows = pserver.Embedding(2, combiner="mean", name="words", **options)(ids)
    start = keras.initializers.GlorotUniform(seed=3)
    model = keras.Model(ids, keras.layers.Dense(1, kernel_initializer=start)(rows))
    model.compile("adam", "mse")
    return model


def tables_of(checkpoint: Path) -> dict[str, RowsBlock]:
    names = [table.name for table in read_manifest(checkpoint).plan.tables]
    return {name: load_table_state(checkpoint, name).rows for name in names}


def assert_same_tables(some: Mapping[str, RowsBlock], others: Mapping[str, RowsBlock]) -> None:
    assert some.keys() == others.keys()
    for name, one in some.items():
        other = others[name]
        np.testing.assert_array_equal(one.ids, other.ids, err_msg=name)
        np.testing.assert_array_equal(one.values, other.values, err_msg=name)
        np.testing.assert_array_equal(one.counts, other.counts, err_msg=name)
        np.testing.assert_array_equal(one.touched, other.touched, err_msg=name)
        assert one.slots.keys() == other.slots.keys()
        for slot, array in one.slots.items():
            np.testing.assert_array_equal(array, other.slots[slot], err_msg=f"{name} {slot}")


def checkpoint_of(model: keras.Model) -> Path:
    """The checkpoint with the rows of a model."""
    found = {table.checkpoint for table in trained_tables(model).values()}
    (checkpoint,) = found
    assert checkpoint is not None
    return checkpoint


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[pserver.Cluster]:
    where = tmp_path_factory.mktemp("cluster") / "runs"
    with pserver.Cluster(
        shards=2,
        workers=2,
        replicas=REPLICAS,
        run_dir=where,
        engine="numpy",
        intra_op_threads=1,
    ) as entered:
        yield entered


def fit(cluster: pserver.Cluster, model: keras.Model, epochs: int, **options: Any) -> Any:
    given: dict[str, Any] = {"batch_size": BATCH, "verbose": 0, **options}
    return cluster.fit(model, rated.x, rated.y, epochs=epochs, **given)


@pytest.fixture(scope="module")
def whole(cluster: pserver.Cluster) -> keras.Model:
    """Trained for three epochs at once, in the order of the data."""
    model = made()
    fit(cluster, model, 3, shuffle=False)
    return model


def test_fit_has_the_bits_of_a_job(cluster: pserver.Cluster, tmp_path: Path) -> None:
    model = made()
    history = fit(cluster, model, 2, validation_data=HELD_OUT)
    assert cluster.run_dir is not None
    seed = read_spec(cluster.run_dir / FOLDER).seed
    shape = ("--shards", "2", "--workers", "2", "--mode", "sync")
    run = up(RATED, tmp_path / "run", *shape, "--set", "epochs=2", "--set", f"seed={seed}")
    assert_same_tables(tables_of(checkpoint_of(model)), tables_of(run.checkpoint))
    dense = load_variables(run.checkpoint)
    assert len(dense) == len(model.weights) == 2
    for variable in model.weights:
        np.testing.assert_array_equal(variable.numpy(), dense[variable.path])
    assert history.history["val_loss"][-1] == pytest.approx(run.summary["eval"]["loss"], rel=1e-6)


def test_fit_after_fit_goes_on_on_other_shards(
    cluster: pserver.Cluster,
    whole: keras.Model,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = made()
    fit(cluster, model, 1, shuffle=False)
    fit(cluster, model, 1, shuffle=False)
    halfway = checkpoint_of(model)
    assert read_manifest(halfway).plan.shards == 2
    # As Keras's files have rows and slots, a program may go on another day.
    cluster.fetch(model)
    model.save_weights(tmp_path / "halfway.weights.h5")
    again = made()
    again.optimizer.build(again.trainable_variables)
    again.load_weights(tmp_path / "halfway.weights.h5")
    monkeypatch.setattr(cluster, "shards", 3)
    for each in (model, again):
        fit(cluster, each, 1, shuffle=False)
        assert read_manifest(checkpoint_of(each)).plan.shards == 3
        assert_same_tables(tables_of(checkpoint_of(each)), tables_of(checkpoint_of(whole)))
        for one, other in zip(each.weights, whole.weights, strict=True):
            np.testing.assert_array_equal(one.numpy(), other.numpy())
        assert int(each.optimizer.iterations) == int(whole.optimizer.iterations)


def test_a_lost_shard_changes_no_bit(cluster: pserver.Cluster, whole: keras.Model) -> None:
    model = made()
    killing = Killing(cluster, {1: "pserver"})
    fit(cluster, model, 3, shuffle=False, callbacks=[killing])
    assert killing.killed == ["pserver"]
    assert_same_tables(tables_of(checkpoint_of(model)), tables_of(checkpoint_of(whole)))


def test_evaluate_and_predict_have_the_rows(
    cluster: pserver.Cluster, whole: keras.Model, tmp_path: Path
) -> None:
    unseen = np.arange(33).reshape(11, 3)
    x = np.concatenate([rated.x[:200], unseen])
    outputs = cluster.predict(whole, x, verbose=0)
    results = cluster.evaluate(whole, *HELD_OUT, verbose=0)
    cluster.fetch(whole)
    np.testing.assert_allclose(outputs, whole(x), rtol=1e-5)
    np.testing.assert_allclose(cluster._plain["predict"](whole, x, verbose=0), outputs, rtol=1e-5)
    here = cluster._plain["evaluate"](whole, *HELD_OUT, verbose=0)
    np.testing.assert_allclose(here, results, rtol=1e-5)
    whole.save(tmp_path / "whole.keras")
    read = keras.models.load_model(tmp_path / "whole.keras", {"loss": rated.loss})
    np.testing.assert_array_equal(read(x), whole(x))
    # Of rows in memory.
    np.testing.assert_allclose(cluster.predict(read, x, verbose=0), outputs, rtol=1e-6)


def test_rows_that_are_not_fetched_are_said_to_be_missing(
    cluster: pserver.Cluster, tmp_path: Path
) -> None:
    model = small()
    why = r"layer 'words' is a pserver.Embedding that has not been trained yet; call model.fit"
    for method in ("predict", "evaluate", "fetch"):
        given = [] if method == "fetch" else HELD_OUT[:1]
        with pytest.raises(InvalidJob, match=f"{why}.* before {method}"):
            getattr(cluster, method)(model, *given)
    x, y = rated.x, rated.y[:, :1]
    cluster.fit(model, x, y, batch_size=BATCH, verbose=0)
    why = r"layer 'words' has no rows in this process: .*; call cluster.fetch\(model\)"
    plain = cluster._plain
    uses: list[Callable[[], Any]] = [
        lambda: model(x[:5]),
        lambda: plain["predict"](model, x, verbose=0),
        lambda: plain["evaluate"](model, x, y, verbose=0),
        lambda: model.save(tmp_path / "model.keras"),
        lambda: model.save_weights(tmp_path / "model.weights.h5"),
    ]
    for use in uses:
        with pytest.raises(InvalidJob, match=why):
            use()
    cluster.fetch(model)
    before = model(x[:5]).numpy()
    with pytest.raises(InvalidJob, match="'words' trains on a cluster alone"):
        plain["fit"](model, x, y, verbose=0)
    cluster.fit(model, x, y, batch_size=BATCH, verbose=0)
    with pytest.raises(InvalidJob, match=why):
        plain["predict"](model, x, verbose=0)
    cluster.fetch(model)
    assert (model(x[:5]).numpy() != before).any()
    checkpoint = checkpoint_of(model)
    cluster.fit(model, x, y, batch_size=BATCH, verbose=0)
    moved = checkpoint_of(model)
    moved.rename(moved.with_name("elsewhere"))
    with pytest.raises(CheckpointError, match=r"table 'words' were in .* which is gone"):
        cluster.fetch(model)
    assert checkpoint.is_dir()


class Changing(keras.callbacks.Callback):  # type: ignore[misc]  # Keras has no types
    """Halves the weights after the first epoch, and predicts."""

    def __init__(self) -> None:
        super().__init__()
        self.outputs: list[Any] = []
        self.values: list[Any] = []
        self.files: list[set[int]] = []
        self.copies: list[Path] = []

    def on_train_begin(self, logs: Any = None) -> None:
        # Of the rows of the fit before.
        self.outputs.append(self.model.predict(rated.x[:5], verbose=0))

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        checkpoint = checkpoint_of(self.model)
        self.copies.append(checkpoint.with_name(f"{checkpoint.name}.set"))
        self.values.append(tables_of(checkpoint)["words"].values)
        self.files.append({path.stat().st_ino for path in checkpoint.glob("rows-*")})
        self.outputs.append(self.model.predict(rated.x[:5], verbose=0))
        if epoch == 0:
            self.model.set_weights([each / 2 for each in self.model.get_weights()])


def test_weights_that_a_callback_sets_leave_rows_as_they_are(
    cluster: pserver.Cluster, tmp_path: Path
) -> None:
    model, changing = small(), Changing()
    x, y = rated.x, rated.y[:, :1]
    cluster.fit(model, x, y, batch_size=BATCH, verbose=0)
    begun = cluster.predict(model, x[:5], verbose=0)
    cluster.fit(model, x, y, batch_size=BATCH, epochs=2, verbose=0, callbacks=[changing])
    assert cluster.run_dir is not None
    # Of the run alone, and for programs without this package.
    exported = ended("coordinator", "export", cluster.run_dir, "--to", f"{tmp_path}/saved/")
    assert exported.returncode == 0, exported.stderr
    served = tf.saved_model.load(f"{tmp_path}/saved")
    np.testing.assert_allclose(served.serve(x[:5]), changing.outputs[2], rtol=1e-5)
    # The same files, and not others of the same content.
    copied = changing.copies[0].glob("rows-*")
    assert {path.stat().st_ino for path in copied} == changing.files[0]
    np.testing.assert_allclose(changing.outputs.pop(0), begun, rtol=1e-6)
    one, other = changing.values
    assert (one != other).any()
    assert (changing.outputs[0] != changing.outputs[1]).any()
    np.testing.assert_allclose(cluster.predict(model, x[:5], verbose=0), changing.outputs[1])


class Later(keras.callbacks.Callback):  # type: ignore[misc]
    """Sets the weights back to those of the epoch before."""

    weights: Any = None

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if epoch:
            self.model.set_weights(self.weights)
        self.weights = self.model.get_weights()


def test_callbacks_that_keep_weights_keep_rows(cluster: pserver.Cluster, tmp_path: Path) -> None:
    x, y = rated.x, rated.y[:, :1]
    given: dict[str, Any] = {"batch_size": BATCH, "verbose": 0}
    given["validation_data"] = x[:200], y[:200]
    model = small()
    # The first epoch is the best.
    stop = keras.callbacks.EarlyStopping("val_loss", mode="max", patience=2, restore_best_weights=1)
    saving = keras.callbacks.ModelCheckpoint(tmp_path / "{epoch}.keras")
    history = cluster.fit(model, x, y, epochs=9, callbacks=[stop, saving], **given)
    losses = history.history["val_loss"]
    assert len(losses) == 3
    assert losses[0] > losses[1] > losses[2]
    for number, loss in enumerate(losses, 1):
        read = keras.models.load_model(tmp_path / f"{number}.keras")
        assert read.evaluate(x[:200], y[:200], verbose=0) == pytest.approx(loss, rel=1e-5)
    assert model.evaluate(x[:200], y[:200], verbose=0) == pytest.approx(losses[0], rel=1e-5)
    assert list((cluster.run_dir or tmp_path).glob("best/*/*")) == [checkpoint_of(model)]

    with pytest.raises(InvalidJob, match=r"set the model's weights back .* table 'words'"):
        cluster.fit(small(), x, y, epochs=4, callbacks=[Later()], **given)


def test_a_backed_up_fit_goes_on_with_its_rows(cluster: pserver.Cluster, tmp_path: Path) -> None:
    def backed_up(model: keras.Model, epochs: int) -> None:
        backup = keras.callbacks.BackupAndRestore(tmp_path / "backup", delete_checkpoint=False)
        fit(cluster, model, epochs, shuffle=False, callbacks=[backup])

    model = made()
    backed_up(model, 2)
    again = made()
    backed_up(again, 3)
    assert int(again.optimizer.iterations) == 3 * int(model.optimizer.iterations) // 2
    # Only the third epoch has been trained.
    fit(cluster, model, 1, shuffle=False)
    assert_same_tables(tables_of(checkpoint_of(again)), tables_of(checkpoint_of(model)))
