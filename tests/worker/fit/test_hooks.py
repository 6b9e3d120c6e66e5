"""Callbacks that look at the model, and how often they do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import pytest

from worker.fit.hooks import earliest_epoch, has_batch_hooks, looking

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
