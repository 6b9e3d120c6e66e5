"""Tells the callbacks that look at the model, and when they do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras

BATCH_HOOKS = (
    "on_train_batch_begin",
    "on_train_batch_end",
    "on_batch_begin",
    "on_batch_end",
)

PARTS = 10
"""Batch hooks of an epoch, by default."""

_OWN = (keras.callbacks.History, keras.callbacks.ProgbarLogger)
"""Callbacks of every ``fit``. They do not look at the model."""

_BY_EPOCH = {
    keras.callbacks.ModelCheckpoint: "save_freq",
    keras.callbacks.BackupAndRestore: "save_freq",
    keras.callbacks.OrbaxCheckpoint: "save_freq",
    keras.callbacks.TensorBoard: "update_freq",
}
"""Callbacks whose batch hooks do nothing while an attribute is ``epoch``."""


def looking(callbacks: Sequence[Any]) -> list[Any]:
    """Returns the callbacks that may look at the model."""
    return [callback for callback in callbacks if type(callback) not in _OWN]


def has_batch_hooks(callbacks: Sequence[Any]) -> bool:
    """Whether a callback of the user's has hooks for batches that do something."""
    return any(
        _overrides(callback, hook)
        for callback in looking(callbacks)
        if getattr(callback, _BY_EPOCH.get(type(callback), ""), None) != "epoch"
        for hook in BATCH_HOOKS
    )


def _overrides(callback: Any, hook: str) -> bool:
    found = getattr(callback, hook)
    return getattr(found, "__func__", found) is not getattr(keras.callbacks.Callback, hook)


def earliest_epoch(model: keras.Model, initial_epoch: int, callbacks: Sequence[Any]) -> int:
    """Returns the first epoch that training may begin with, once callbacks have restored one."""
    if any(isinstance(each, keras.callbacks.BackupAndRestore) for each in callbacks):
        return 0
    return min(initial_epoch, model._initial_epoch or initial_epoch)
