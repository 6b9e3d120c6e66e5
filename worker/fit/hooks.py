"""Finds the callbacks that look at the model, and keeps the table rows of weights that they
keep."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np

from psrpc.checkpoint.manifest import read_manifest
from psrpc.core.errors import InvalidJob
from worker.embedding.model_tables import place_tables, table_layers
from worker.embedding.row_copies import link_checkpoint

BATCH_HOOKS = (
    "on_train_batch_begin",
    "on_train_batch_end",
    "on_batch_begin",
    "on_batch_end",
)

PARTS = 10
"""How often batch hooks run in an epoch, by default."""

_OWN = (keras.callbacks.History, keras.callbacks.ProgbarLogger)
"""Callbacks of every ``fit``. They do not look at the model."""

_ORBAX = tuple(filter(None, [getattr(keras.callbacks, "OrbaxCheckpoint", None)]))
"""The class ``OrbaxCheckpoint``, which Keras 3.12 does not have."""

_BY_EPOCH = {
    keras.callbacks.ModelCheckpoint: "save_freq",
    keras.callbacks.BackupAndRestore: "save_freq",
    keras.callbacks.TensorBoard: "update_freq",
} | dict.fromkeys(_ORBAX, "save_freq")
"""Callback -> the attribute with which its batch hooks do nothing, if it is ``epoch``."""


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
    """Returns the earliest epoch that training may begin with: callbacks may restore a state of
    another epoch than ``initial_epoch``."""
    if any(isinstance(each, keras.callbacks.BackupAndRestore) for each in callbacks):
        return 0
    return min(initial_epoch, model._initial_epoch or initial_epoch)


def check_saves_tables(model: keras.Model, callbacks: Sequence[Any]) -> None:
    """Refuses a callback that would save a model without the rows of its tables. Raises
    InvalidJob."""
    tables = table_layers(model)
    for each in callbacks if tables else ():
        if isinstance(each, _ORBAX):
            raise InvalidJob(
                f"callback {type(each).__name__} saves variables alone, and the rows of layer "
                f"{tables[0].name!r}, a pserver.Embedding, are none; use ModelCheckpoint or "
                "BackupAndRestore, which save them",
                code="PS108",
            )


class BestTables:
    """The rows of the epochs whose weights ``EarlyStopping(restore_best_weights=True)`` keeps."""

    def __init__(self, model: keras.Model, callbacks: Sequence[Any], folder: Path) -> None:
        """``folder`` is for checkpoints with these rows; it need not be there."""
        self._model = model
        self._folder = folder
        self._kept: list[tuple[Any, Any, Path]] = []
        """Callbacks, the weights that they keep, and the checkpoint with the rows."""
        if table_layers(model):
            self._kept = [
                (each, None, folder / str(number))
                for number, each in enumerate(callbacks)
                if isinstance(each, keras.callbacks.EarlyStopping) and each.restore_best_weights
            ]

    def keep(self, checkpoint: Path) -> None:
        """Keeps the rows of ``checkpoint``, at the end of its epoch, if a callback has kept the
        weights. Raises CheckpointError."""
        for number, (callback, weights, before) in enumerate(self._kept):
            if callback.best_weights is weights:
                continue
            to = self._folder / str(number) / checkpoint.name
            if to != before:
                link_checkpoint(checkpoint, to)
                if weights is not None:
                    shutil.rmtree(before)
            self._kept[number] = (callback, callback.best_weights, to)

    def restore(self) -> bool:
        """Gives the model the rows that belong to its weights, if a callback has restored earlier
        weights; returns whether that is so."""
        for _, weights, kept in self._kept:
            if weights is not None and _same(weights, self._model.get_weights()):
                place_tables(self._model, kept, read_manifest(kept).plan.tables)
                return True
        return False


def _same(some: Sequence[Any], others: Sequence[Any]) -> bool:
    if len(some) != len(others):
        return False
    return all(
        np.array_equal(one, other, equal_nan=one.dtype.kind == "f")
        for one, other in zip(some, others, strict=True)
    )
