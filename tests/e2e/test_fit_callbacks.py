"""Keras's callbacks in a ``fit`` on a cluster: beside the same loop in one process."""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import pserver
from tests.e2e import plain_fit
from worker.fit import training
from worker.fit.prepare import FOLDER
from worker.handover.spec import read_spec

pytestmark = [
    pytest.mark.slow,
    pytest.mark.fit,
    # Of Keras, which writes arrays of TensorFlow with h5py.
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
]

BATCH = 16
RECORDS = 3 * BATCH - 5
HELD_OUT = 32
"""A power of two, so that the mean of a loss over the records is exact."""

WHOLE = [f"on_{what}_{at}" for what in ("train", "test") for at in ("begin", "end")]
NUMBERED = [
    f"on_{what}_{at}" for what in ("epoch", "train_batch", "test_batch") for at in ("begin", "end")
]

Hook = tuple[str, int | None, dict[str, float]]


def state(model: keras.Model) -> list[Any]:
    """Weights, slots, iterations and learning rate."""
    optimizer = model.optimizer
    values = [each.numpy() for each in (*model.weights, *optimizer.variables)]
    return [*values, np.asarray(optimizer.learning_rate)]


class Recorder(keras.callbacks.Callback):  # type: ignore[misc]  # Keras has no types
    """Records each hook with its arguments and what it finds in the model."""

    def __init__(self) -> None:
        super().__init__()
        self.hooks: list[Hook] = []
        self.states: list[list[Any]] = []
        for name in WHOLE:
            setattr(self, name, partial(self._record, name, None))
        for name in NUMBERED:
            setattr(self, name, partial(self._record, name))

    def _record(self, name: str, number: int | None, logs: Any = None) -> None:
        self.hooks.append((name, number, dict(logs)))
        self.states.append([*state(self.model), self.params])


class Changing(keras.callbacks.Callback):  # type: ignore[misc]
    """Changes weights, a slot of the optimizer and its rate, in hooks of batches and epochs."""

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        if batch == 1:
            kernel = self.model.weights[0]
            kernel.assign(kernel * 0.5)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if batch == 0:
            # No power of two: the factor is not exact in float32.
            self.model.optimizer.learning_rate = float(self.model.optimizer.learning_rate) * 0.7

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        for velocity in self.model.optimizer.momentums:
            velocity.assign(keras.ops.zeros_like(velocity))


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[pserver.Cluster]:
    where = tmp_path_factory.mktemp("cluster") / "runs"
    with pserver.Cluster(
        shards=1,
        workers=1,
        run_dir=where,
        batch_hooks_every=1,
        engine="numpy",
        intra_op_threads=1,
    ) as entered:
        yield entered


def made(optimizer: Any = None) -> keras.Model:
    """Returns a model with the same weights each time."""
    keras.utils.set_random_seed(7)
    layers = [
        keras.Input((6,), name="x"),
        keras.layers.Dense(8, "relu", name="hidden"),
        keras.layers.Dense(1, name="last"),
    ]
    model = keras.Sequential(layers, name="both")
    # Without XLA, as workers compute.
    model.compile(
        optimizer or keras.optimizers.SGD(0.05, momentum=0.9),
        "mse",
        metrics=["mae"],
        jit_compile=False,
    )
    return model


def data(records: int = RECORDS) -> tuple[Any, Any]:
    x = np.random.default_rng(records).normal(size=(records, 6)).astype("float32")
    return x, x.sum(1, keepdims=True)


Fit = tuple[keras.Model, Sequence[Any], Recorder]
"""A finished fit: the model, its callbacks, and their records."""


class Both:
    """The same ``fit`` on the cluster, and in one process."""

    def __init__(self, cluster: pserver.Cluster, folder: Path) -> None:
        self.cluster = cluster
        self._folder = folder
        self._fits = 0

    def fit(
        self,
        callbacks: Callable[[Path], Sequence[Any]],
        update: plain_fit.Update = plain_fit.sgd_in_numpy,
        **arguments: Any,
    ) -> tuple[Fit, Fit]:
        """Fits both, see :meth:`ours` and :meth:`plain`."""
        return self.ours(callbacks, **arguments), self.plain(callbacks, update=update, **arguments)

    def ours(
        self,
        callbacks: Callable[[Path], Sequence[Any]],
        optimizer: Callable[[], Any] = lambda: None,
        x: Any = None,
        **arguments: Any,
    ) -> Fit:
        """Fits a model on the cluster. ``callbacks`` gets a folder for their files."""
        model, seen = made(optimizer()), Recorder()
        given, y = data()
        others = callbacks(self._folder / "ours")
        model.fit(
            given if x is None else x,
            y,
            verbose=0,
            batch_size=BATCH,
            validation_batch_size=HELD_OUT,
            callbacks=[*others, seen],
            **arguments,
        )
        return model, others, seen

    def plain(
        self,
        callbacks: Callable[[Path], Sequence[Any]],
        optimizer: Callable[[], Any] = lambda: None,
        x: Any = None,
        update: plain_fit.Update = plain_fit.sgd_in_numpy,
        **arguments: Any,
    ) -> Fit:
        """Fits a model in this process, with the batches of the last fit on the cluster."""
        self._fits += 1
        model, seen = made(optimizer()), Recorder()
        given, y = data()
        others = callbacks(self._folder / "plain")
        assert self.cluster.run_dir is not None
        plain_fit.fit(
            self._folder / f"data-{self._fits}",
            model,
            given if x is None else x,
            y,
            seed=read_spec(self.cluster.run_dir / FOLDER).seed,
            update=update,
            batch_size=BATCH,
            callbacks=[*others, seen],
            **arguments,
        )
        return model, others, seen


@pytest.fixture
def both(cluster: pserver.Cluster, tmp_path: Path) -> Both:
    return Both(cluster, tmp_path)


def assert_same_bits(one: Fit, other: Fit) -> None:
    """Compares hooks, logs, and the state in each of them; and the final weights."""
    (model, _, seen), (plain, _, there) = one, other
    assert [hook[:2] for hook in seen.hooks] == [hook[:2] for hook in there.hooks]
    for hook, values, known, others in zip(
        seen.hooks, seen.states, there.hooks, there.states, strict=True
    ):
        # NaN equals NaN.
        assert repr(hook) == repr(known)
        for value, wanted in zip(values, others, strict=True):
            np.testing.assert_array_equal(value, wanted, err_msg=f"{hook}")
    for value, wanted in zip(model.get_weights(), plain.get_weights(), strict=True):
        np.testing.assert_array_equal(value, wanted)
    assert repr(model.history.history) == repr(plain.history.history)
    assert model.history.epoch == plain.history.epoch


def assert_close(one: Fit, other: Fit) -> None:
    """The same within the difference between Keras's updates with XLA and without."""
    (model, _, seen), (plain, _, there) = one, other
    for (name, number, logs), (known, wanted, numbers) in zip(seen.hooks, there.hooks, strict=True):
        assert (name, number) == (known, wanted)
        assert logs == pytest.approx(numbers, rel=1e-5, abs=1e-5)
    for (*values, params), (*others, known_params) in zip(seen.states, there.states, strict=True):
        assert params == known_params
        for value, wanted in zip(values, others, strict=True):
            np.testing.assert_allclose(value, wanted, rtol=1e-5, atol=1e-5)
    for value, known in zip(model.get_weights(), plain.get_weights(), strict=True):
        np.testing.assert_allclose(value, known, rtol=0, atol=1e-5)


def saved(folder: Path) -> dict[str, list[Any]]:
    """The files that callbacks have written, by name."""
    found: dict[str, list[Any]] = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.name.endswith(".weights.h5"):
            model = made()
            model.optimizer.build(model.trainable_variables)
            model.load_weights(path)
            found[name] = state(model)
        elif path.suffix == ".keras":
            found[name] = state(keras.models.load_model(path))
        elif path.suffix == ".csv":
            found[name] = [path.read_text()]
    return found


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Returns the content of TensorBoard's files, without times."""
    found = {}
    for part in ("train", "validation"):
        events = EventAccumulator(str(folder / part)).Reload()
        # "keras" is the model, with the ids of Python objects.
        for tag in set(events.Tags()["tensors"]) - {"keras"}:
            found[f"{part} {tag}"] = [
                (event.step, tf.make_ndarray(event.tensor_proto).tolist())
                for event in events.Tensors(tag)
            ]
    return found


def assert_same_files(folder: Path) -> None:
    ours, plain = saved(folder / "ours"), saved(folder / "plain")
    assert ours
    assert ours.keys() == plain.keys()
    for name, values in plain.items():
        for value, wanted in zip(ours[name], values, strict=True):
            np.testing.assert_array_equal(value, wanted, err_msg=name)


def test_callbacks_that_save_log_and_stop(both: Both, tmp_path: Path) -> None:
    def callbacks(folder: Path) -> Sequence[Any]:
        kept = keras.callbacks
        (folder / "log").mkdir(parents=True)
        return [
            kept.ModelCheckpoint(folder / "{epoch}-{val_loss:.6f}.keras"),
            kept.ModelCheckpoint(
                folder / "{epoch}-{batch}.weights.h5", save_freq=2, save_weights_only=True
            ),
            kept.ModelCheckpoint(folder / "best.keras", monitor="val_mae", save_best_only=True),
            # Never good enough.
            kept.ReduceLROnPlateau("loss", factor=0.3, patience=1, min_delta=10.0),
            kept.CSVLogger(folder / "log.csv"),
            kept.TensorBoard(folder / "tensorboard", histogram_freq=1, update_freq=1),
            Changing(),
            kept.TerminateOnNaN(),
            kept.EarlyStopping(
                "val_loss",
                patience=2,
                min_delta=1.0,
                restore_best_weights=True,
                start_from_epoch=1,
            ),
        ]

    ours, plain = both.fit(callbacks, epochs=6, validation_data=data(HELD_OUT))
    assert_same_bits(ours, plain)
    assert_same_files(tmp_path)
    stopping = ours[1][-1]
    assert (stopping.stopped_epoch, stopping.best_epoch) == (3, 1)
    written = scalars(tmp_path / "ours" / "tensorboard")
    assert written == scalars(tmp_path / "plain" / "tensorboard")
    assert {"train epoch_loss", "train batch_mae", "validation epoch_mae"} <= written.keys()
    with (tmp_path / "ours" / "log.csv").open() as file:
        rates = [row["learning_rate"] for row in csv.DictReader(file)]
    assert len(set(rates)) == 4


def test_callbacks_of_epochs_with_gaps_in_validation(both: Both, tmp_path: Path) -> None:
    said: list[Any] = []

    def callbacks(_folder: Path) -> Sequence[Any]:
        kept = keras.callbacks
        return [
            kept.LearningRateScheduler(lambda epoch, rate: rate if epoch == 1 else 0.03 * epoch),
            kept.LambdaCallback(
                on_epoch_begin=lambda epoch, logs: said.append((epoch, logs)),
                on_train_batch_end=lambda batch, logs: said.append((batch, logs)),
                on_train_end=lambda logs: said.append(logs),
            ),
        ]

    ours, plain = both.fit(
        callbacks,
        optimizer=lambda: keras.optimizers.SGD(0.0, momentum=0.9),
        initial_epoch=1,
        epochs=4,
        validation_freq=2,
        validation_data=data(HELD_OUT),
    )
    assert_same_bits(ours, plain)
    half = len(said) // 2
    assert said[:half] == said[half:]
    assert ours[0].history.epoch == [1, 2, 3]
    assert len(ours[0].history.history["val_loss"]) == 2
    assert ours[2].states[0][-1] == {"verbose": 0, "epochs": 4, "steps": 3}


def test_a_loss_that_is_not_finite_ends_training(both: Both) -> None:
    x, _ = data()
    x = x.copy()
    x[5] = np.nan
    ours, plain = both.fit(
        lambda _: [keras.callbacks.TerminateOnNaN()],
        x=x,
        epochs=3,
        validation_data=data(HELD_OUT),
    )
    assert_same_bits(ours, plain)
    *_, (_, _, logs) = (hook for hook in ours[2].hooks if hook[0] == "on_train_batch_end")
    assert np.isnan(logs["loss"])
    assert np.isnan(ours[0].history.history["loss"]).tolist() == [True]
    assert np.isfinite(ours[0].history.history["val_loss"]).all()


def test_training_that_was_interrupted_is_taken_up(both: Both, tmp_path: Path) -> None:
    steps: list[int] = []

    def raising(batch: int, logs: Any) -> None:
        steps.append(batch)
        if steps == [0, 1, 2, 0, 1, 2, 0, 1]:
            raise LookupError("interrupted")

    def interrupted(folder: Path) -> Sequence[Any]:
        steps.clear()
        return [
            keras.callbacks.BackupAndRestore(folder / "backup", save_freq=2),
            keras.callbacks.LambdaCallback(on_train_batch_begin=raising),
        ]

    for fit in (both.ours, both.plain):
        with pytest.raises(LookupError, match="interrupted"):
            fit(interrupted, epochs=4)
    # The end of the second epoch was backed up, and Keras begins that one anew.
    ours, plain = both.fit(
        lambda folder: [keras.callbacks.BackupAndRestore(folder / "backup")], epochs=4
    )
    assert_same_bits(ours, plain)
    assert ours[0].history.epoch == [1, 2, 3]
    assert not (tmp_path / "ours" / "backup").exists()


def with_averages() -> Any:
    rate = keras.optimizers.schedules.ExponentialDecay(0.01, decay_steps=3, decay_rate=0.5)
    return keras.optimizers.Adam(rate, use_ema=True, ema_momentum=0.8)


@pytest.mark.parametrize("on_epoch", [False, True])
def test_averages_are_swapped(
    both: Both, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, on_epoch: bool
) -> None:
    """NumPy's engine keeps no averages."""
    monkeypatch.setitem(both.cluster.settings, "engine", "keras")

    def callbacks(folder: Path) -> Sequence[Any]:
        return [
            keras.callbacks.SwapEMAWeights(swap_on_epoch=on_epoch),
            keras.callbacks.ModelCheckpoint(folder / "{epoch}.weights.h5", save_weights_only=True),
        ]

    ours, plain = both.fit(
        callbacks,
        optimizer=with_averages,
        update=plain_fit.by_keras,
        epochs=3,
        validation_data=data(HELD_OUT),
    )
    assert_close(ours, plain)
    assert len(list((tmp_path / "ours").iterdir())) == 3


def test_orbax(both: Both, tmp_path: Path) -> None:
    pytest.importorskip("orbax.checkpoint", reason="orbax-checkpoint is not installed")

    def callbacks(folder: Path) -> Sequence[Any]:
        return [keras.callbacks.OrbaxCheckpoint(str(folder), max_to_keep=None)]

    ours, plain = both.fit(callbacks, epochs=2)
    assert_same_bits(ours, plain)
    assert sorted(path.name for path in (tmp_path / "ours").iterdir()) == ["0", "1"]
    for model, _, _ in (ours, plain):
        restored = made()
        restored.load_weights(str(tmp_path / "ours"))
        for value, wanted in zip(restored.get_weights(), model.get_weights(), strict=True):
            np.testing.assert_array_equal(value, wanted)


def test_hooks_in_async_mode(both: Both, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(both.cluster, "mode", "async")
    ours, plain = both.fit(
        lambda _: [keras.callbacks.ReduceLROnPlateau("loss"), Changing()],
        epochs=2,
        validation_data=data(HELD_OUT),
    )
    seen, known = (
        [(name, number, list(logs)) for name, number, logs in each[2].hooks]
        for each in (ours, plain)
    )
    assert seen == known


def test_nothing_stops_where_nothing_looks(
    both: Both, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    x, y = data()
    model = made()
    history = model.fit(x, y, epochs=5, batch_size=BATCH, verbose=2)
    assert (history.epoch, history.params["steps"]) == ([0, 1, 2, 3, 4], 3)
    plain, _, _ = both.plain(lambda _: [], epochs=5)
    assert repr(history.history) == repr(plain.history.history)
    for value, wanted in zip(state(model), state(plain), strict=True):
        np.testing.assert_array_equal(value, wanted)
    assert holds(both.cluster) == [0, 15]
    shown = capsys.readouterr().out.splitlines()
    assert [line for line in shown if line.startswith("Epoch")] == [
        f"Epoch {number}/5" for number in range(1, 6)
    ]
    for loss, line in zip(
        history.history["loss"], (line for line in shown if "3/3" in line), strict=True
    ):
        assert f"loss: {loss:.4f}" in line

    # Of no more epochs than shards keep the totals.
    monkeypatch.setattr(training, "kept_epochs", lambda _: 2)
    model = made()
    history = model.fit(x, y, epochs=5, batch_size=BATCH, verbose=0)
    assert history.epoch == [0, 1, 2, 3, 4]
    assert holds(both.cluster) == [0, 6, 12, 15]
    plain, _, _ = both.plain(lambda _: [], epochs=5)
    assert repr(history.history) == repr(plain.history.history)


def holds(cluster: pserver.Cluster) -> list[int]:
    """The batches after which the last run held."""
    assert cluster.run_dir is not None
    log = (cluster.run_dir / "logs" / "coordinator.log").read_text()
    return [int(at) for at in re.findall(r"\bheld +at=(\d+)", log)]


def test_data_without_any_finite_loss_are_trained_as_by_keras(both: Both) -> None:
    x, y = data()
    model = made()
    history = model.fit(np.full_like(x, np.nan), y, epochs=4, batch_size=BATCH, verbose=0)
    # More batches in a row than stop a job.
    assert np.isnan(history.history["loss"]).tolist() == [True] * 4
    assert history.history.keys() == {"loss", "mae"}
    assert both.cluster.run_dir is not None
    assert "PS603" in (both.cluster.run_dir / "logs" / "coordinator.log").read_text()
