"""Puts whole embedding tables into an exported model, which runs without shards."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import keras
import numpy as np

from pserver.tables.initial import InitialRows
from psrpc.checkpoint.manifest import Manifest
from psrpc.checkpoint.rows_chain import fill_rows, table_ids
from psrpc.core.errors import InvalidArgument, PsError
from psrpc.core.tables import Ids
from worker.data.source import Array
from worker.embedding.embedding import Embedding


def whole_tables(checkpoint: Path, manifest: Manifest) -> tuple[dict[str, Array], dict[str, Ids]]:
    """Returns all rows of the checkpoint's tables by name, float32 ``[vocabulary, width]``; rows
    that no update has created have their initial values. A growing table has ``[n + 1, width]``:
    its trained rows and last, for all other ids, the mean of its initializer. Also returns the n
    ids of each growing table by name, ascending.

    Raises:
        CheckpointError: the files are damaged.
    """
    whole, grown = {}, {}
    for table in manifest.plan.tables:
        ids = table_ids(checkpoint, table.name)
        if table.vocabulary is None:
            values = np.empty((ids.size + 1, table.width), np.float32)
            fill_rows(checkpoint, table.name, ids, values[:-1])
            values[-1] = _mean(table.initializer)
            grown[table.name] = ids
        else:
            values = np.empty((table.vocabulary, table.width), np.float32)
            InitialRows(table).fill(np.arange(table.vocabulary, dtype=np.int64), values)
            trained = np.empty((ids.size, table.width), np.float32)
            fill_rows(checkpoint, table.name, ids, trained)
            values[ids] = trained
        whole[table.name] = values
    return whole, grown


def _mean(initializer: Mapping[str, Any]) -> float:
    """Returns the mean of an initializer as in :class:`psrpc.core.tables.TableSpec`."""
    config = initializer["config"]
    match initializer["class_name"]:
        case "uniform":
            return (float(config["low"]) + float(config["high"])) / 2
        case "normal":
            return float(config["mean"])
        case _:
            return float(config["value"])


def plain_keras(
    model: Any, tables: Mapping[str, Array], to: str
) -> tuple[keras.Model, list[tuple[keras.layers.Embedding, str]]]:
    """Returns ``model`` with a ``keras.layers.Embedding`` in place of each layer whose rows are in
    ``tables``; all other layers keep their weights. Also returns the new layers, each with the name
    of its table.

    Raises:
        InvalidJob: a layer's table is not among ``tables``, or has another shape.
        InvalidArgument: ``to`` cannot be written; the message names alternatives.
    """
    held: list[tuple[keras.layers.Embedding, str]] = []

    def replaced(layer: Any) -> Any:
        if not isinstance(layer, Embedding):
            # Operations that are no layers contain none.
            for part in getattr(layer, "_flatten_layers", list)():
                if isinstance(part, Embedding):
                    raise _only_saved_model(
                        to, f"layer {part.name!r} is within layer {layer.name!r}"
                    )
            return layer
        why = _more_than_keras(layer)
        if why:
            cannot = "grow" if layer.vocabulary is None else "do that"
            raise _only_saved_model(
                to,
                f"layer {layer.name!r} has {why}; the keras.layers.Embedding that a Keras file has "
                f"in its place cannot {cannot}",
            )
        rows = layer.options.rows_of(tables)
        plain = keras.layers.Embedding(
            layer.vocabulary,
            layer.width,
            name=layer.name,
            dtype=layer.dtype_policy,
            trainable=layer.trainable,
        )
        plain.build((None,))
        plain.set_weights([rows])
        held.append((plain, layer.options.name))
        return plain

    _check_layers(model, to)
    try:
        made = keras.models.clone_model(model, clone_function=replaced, recursive=True)
    except PsError:
        raise
    except Exception as error:
        # Cloning calls the user's layers, which may raise anything.
        raise _only_saved_model(to, _reason(error)) from None
    return made, held


def _more_than_keras(layer: Embedding) -> str:
    """Returns the first feature that ``keras.layers.Embedding`` lacks; empty if none."""
    if layer.vocabulary is None:
        return "a growing table"
    if layer.combiner is not None:
        return f"combiner={layer.combiner!r}"
    if layer.padding is not None:
        return f"padding={layer.padding!r}"
    if layer.out_of_vocabulary != "error":
        return f"out_of_vocabulary={layer.out_of_vocabulary!r}"
    return "ids that are strings" if layer.strings else ""


def _check_layers(model: Any, to: str) -> None:
    """Refuses a ``.keras`` file that Keras could not load, since it makes layers from their
    configuration."""
    if not to.endswith(".keras"):
        return
    for layer in model._flatten_layers(include_self=False):
        if type(layer).__module__.split(".")[0] in ("keras", "worker"):
            continue
        try:
            type(layer).from_config(layer.get_config())
        except Exception as error:
            raise InvalidArgument(
                f"--to {to}: Keras could not load layer {layer.name!r} from it: {_reason(error)}; "
                f"let {type(layer).__name__}.__init__ take **kwargs for super().__init__, and "
                "get_config() return its other arguments, or give MODEL.weights.h5, or a directory "
                "(with / at its end) for a SavedModel"
            ) from None


def _reason(error: Exception) -> str:
    first = (str(error).splitlines() or [""])[0]
    return f"{type(error).__name__}: {first}".rstrip(".: ")


def _only_saved_model(to: str, why: str) -> InvalidArgument:
    return InvalidArgument(
        f"--to {to}: {why}; give a directory (with / at its end) for a SavedModel, which has all, "
        "or say --tables DIRECTORY for rows and variables without a model"
    )
