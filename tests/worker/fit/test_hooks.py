"""Callbacks that look at the model, and how often they do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import pytest

from psrpc.core.errors import InvalidJob
from tests.psrpc.rows import chain, plan_of
from worker import Embedding
from worker.embedding.model_tables import place_tables, trained_tables
from worker.fit.hooks import (
    BestTables,
    check_saves_tables,
    earliest_epoch,
    has_batch_hooks,
    looking,
)

pytestmark = pytest.mark.slow

kept = keras.callbacks


class Watching(keras.callbacks.History):  # type: ignore[misc]  # Keras has no types
    """A callback of a user's, though also Keras's."""

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        pass


def test_callbacks_of_every_fit_do_not_look() -> None:
    own = [kept.History(), kept.ProgbarLogger()]
    others = [Watching(), kept.LambdaCallback()]
    assert looking([*own, *others]) == others
    assert not has_batch_hooks(own)


def test_batch_hooks_that_do_nothing_are_not_called(tmp_path: Path) -> None:
    by_epoch = [
        kept.ModelCheckpoint(tmp_path / "a.keras"),
        kept.BackupAndRestore(tmp_path),
        kept.TensorBoard(tmp_path),
        kept.EarlyStopping(),
        kept.LambdaCallback(on_epoch_end=print),
    ]
    assert not has_batch_hooks(by_epoch)
    for callback in (
        kept.ModelCheckpoint(tmp_path / "a.keras", save_freq=5),
        kept.BackupAndRestore(tmp_path, save_freq=5),
        kept.TensorBoard(tmp_path, update_freq=5),
        kept.TerminateOnNaN(),
        kept.LambdaCallback(on_train_batch_end=print),
        Watching(),
    ):
        assert has_batch_hooks([*by_epoch, callback])


def test_a_job_has_the_epochs_that_a_callback_may_go_back_to(tmp_path: Path) -> None:
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    assert earliest_epoch(model, 3, []) == 3
    assert earliest_epoch(model, 3, [kept.BackupAndRestore(tmp_path)]) == 0
    # Keras begins every later fit of the model there.
    model._initial_epoch = 2
    assert earliest_epoch(model, 3, []) == 2


class Orbax(getattr(kept, "OrbaxCheckpoint", kept.Callback)):  # type: ignore[misc]
    """Made without the package that Keras asks for."""

    def __init__(self) -> None:
        kept.Callback.__init__(self)


def with_table() -> keras.Model:
    ids = keras.Input((), dtype="int64")
    return keras.Model(ids, keras.layers.Dense(1)(Embedding(3, name="user")(ids)))


@pytest.mark.skipif(not hasattr(kept, "OrbaxCheckpoint"), reason="Keras 3.12 has none")
def test_a_callback_that_saves_no_rows_is_refused() -> None:
    with pytest.raises(InvalidJob, match=r"Orbax saves variables alone, .* layer 'user'"):
        check_saves_tables(with_table(), [kept.History(), Orbax()])
    check_saves_tables(with_table(), [kept.ModelCheckpoint("a.keras")])
    check_saves_tables(keras.Sequential([keras.layers.Dense(1)]), [Orbax()])


def test_rows_of_the_best_epoch_are_kept_and_restored(tmp_path: Path) -> None:
    checkpoints, _ = chain(tmp_path, plan_of(1))
    model = with_table()
    stop = kept.EarlyStopping("loss", restore_best_weights=True)
    stop.set_model(model)
    best = BestTables(model, [kept.EarlyStopping(), stop], tmp_path / "best")
    stop.on_train_begin()
    weights = model.get_weights()
    for loss, checkpoint in zip((2.0, 1.0, 3.0), checkpoints, strict=True):
        place_tables(model, checkpoint, plan_of(1).tables)
        model.set_weights([each + loss for each in weights])
        stop.on_epoch_end(int(loss), {"loss": loss})
        best.keep(checkpoint)
    assert not best.restore()
    stop.on_train_end()
    assert best.restore()
    (table,) = trained_tables(model).values()
    # Only that is left of those that were kept.
    assert [table.checkpoint] == list(tmp_path.glob("best/0/*"))
    assert table.checkpoint is not None
    assert table.checkpoint.name == checkpoints[1].name
    for path in checkpoints[1].iterdir():
        assert (table.checkpoint / path.name).samefile(path)
