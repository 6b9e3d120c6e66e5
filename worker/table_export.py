"""Embedding tables in a model that is exported: whole, and without the shards."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import keras
import numpy as np

from pserver.tables.initial import InitialRows
from psrpc.errors import InvalidArgument, InvalidJob
from psrpc.manifest import Manifest
from psrpc.rows_chain import fill_rows, table_ids
from worker.data import Array
from worker.embedding import Embedding


def whole_tables(checkpoint: Path, manifest: Manifest) -> dict[str, Array]:
    """All rows of the checkpoint's tables: name -> float32 ``[vocabulary, width]``. Rows that no
    update has created have their initial values.

    Raises:
        InvalidJob: a table has no fixed vocabulary.
        CheckpointError: the files are damaged.
    """
    whole = {}
    for table in manifest.plan.tables:
        if table.vocabulary is None:
            raise InvalidJob(
                f"table {table.name!r} has no fixed vocabulary, so no layer can hold all of its "
                "rows; write its ids and rows with `coordinator export RUN --tables DIRECTORY`"
            )
        values = np.empty((table.vocabulary, table.width), np.float32)
        InitialRows(table).fill(np.arange(table.vocabulary, dtype=np.int64), values)
        ids = table_ids(checkpoint, table.name)
        trained = np.empty((ids.size, table.width), np.float32)
        fill_rows(checkpoint, table.name, ids, trained)
        values[ids] = trained
        whole[table.name] = values
    return whole


def plain_keras(model: Any, tables: Mapping[str, Array], to: str) -> keras.Model:
    """``model`` with an ordinary ``keras.layers.Embedding`` in the place of each layer whose rows
    are in ``tables``, and all other weights as they are.

    Raises:
        InvalidArgument: ``to`` cannot be written; says what can.
    """
    held: dict[str, Array] = {}

    def replaced(layer: Any) -> Any:
        if not isinstance(layer, Embedding):
            return layer.__class__.from_config(layer.get_config())
        why = layer.more_than_keras
        if why:
            raise _only_saved_model(to, f"layer {layer.name!r} has {why}, which Keras's has not")
        held[layer.name] = tables[layer.options.name]
        return keras.layers.Embedding(
            layer.vocabulary, layer.width, name=layer.name, dtype=layer.dtype_policy
        )

    try:
        made = keras.models.clone_model(model, clone_function=replaced, recursive=True)
    except ValueError as error:
        raise _only_saved_model(to, str(error).splitlines()[0]) from None
    values = {variable.path: variable.numpy() for variable in model.weights}
    for layer in made._flatten_layers():
        if isinstance(layer, keras.layers.Embedding) and layer.name in held:
            values[layer.embeddings.path] = held[layer.name]
    for variable in made.weights:
        variable.assign(values[variable.path])
    return made


def _only_saved_model(to: str, why: str) -> InvalidArgument:
    return InvalidArgument(
        f"--to {to}: {why}; give a directory (with / at its end) for a SavedModel, which has all"
    )
