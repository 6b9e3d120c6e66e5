"""The tables of a caller's model: finds their rows, and brings them to the model or to files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import keras
import numpy as np

from psrpc.checkpoint.table_file import TableValues, map_table_file, write_table_file
from psrpc.core.errors import InvalidJob
from psrpc.core.tables import TableSpec
from worker.embedding.lookups import Found, LookUpCall
from worker.embedding.table_layer import TableLayer
from worker.embedding.trained import KnownRows, TrainedTable


def table_layers(model: keras.Model) -> list[TableLayer]:
    """Returns the layers, at any depth of the model, whose rows are on shards."""
    return [layer for layer in model._flatten_layers() if isinstance(layer, TableLayer)]


def trained_tables(model: keras.Model) -> dict[str, TrainedTable]:
    """Returns the tables of the model that have been trained, by name."""
    found: dict[str, TrainedTable] = {}
    for layer in table_layers(model):
        if layer.trained is not None:
            found.setdefault(layer.options.name, layer.trained)
    return found


def place_tables(
    model: keras.Model, checkpoint: Path, specs: tuple[TableSpec, ...]
) -> dict[str, TrainedTable]:
    """Makes the model's layers use the rows in ``checkpoint``, whose plan has the tables ``specs``.
    Reads no rows: layers fetch them when they need them. Returns the tables by name."""
    tables = {spec.name: TrainedTable(spec, checkpoint) for spec in specs}
    for layer in table_layers(model):
        if layer.options.name in tables:
            layer.take_trained(tables[layer.options.name])
    serve_callbacks(model)
    return tables


def serve_callbacks(model: keras.Model) -> None:
    """Lets layers fetch the rows that they need by themselves, for callbacks that use the model."""
    for table in trained_tables(model).values():
        table.fetches_itself = True


def leave_tables(model: keras.Model) -> None:
    """Ends :func:`serve_callbacks`: from now on, layers need :func:`fetch_tables` for rows."""
    for table in trained_tables(model).values():
        table.fetches_itself = False
        # A function traced before would fail only while it runs, where TensorFlow wraps the error.
        model.predict_function = model.test_function = None


def fetch_tables(model: Any) -> None:
    """Reads the rows of all tables of the model into the model.

    Raises:
        InvalidJob: the model has no table, or one that is not trained.
        CheckpointError: a checkpoint is gone, or damaged.
    """
    if not isinstance(model, keras.Model):
        raise InvalidJob(f"model is a {type(model).__name__}; fetch takes a keras.Model")
    if not table_layers(model):
        raise InvalidJob(
            f"model {model.name!r} has no pserver.Embedding; there is nothing to fetch"
        )
    check_trained(model, "fetch")
    for table in trained_tables(model).values():
        table.fetch()


def check_trained(model: keras.Model, method: str) -> None:
    """Refuses a model with a table that has never been trained. Raises InvalidJob."""
    for layer in table_layers(model):
        if layer.trained is None:
            raise InvalidJob(
                f"layer {layer.name!r} is a pserver.Embedding that has not been trained yet; call "
                f"model.fit within the cluster before {method}, or load the model from a file with "
                "its rows"
            )


def write_tables(folder: Path, model: keras.Model) -> None:
    """Writes the rows of all tables of a model, which :func:`check_trained` has passed, for
    :class:`MappedTables`.

    Raises:
        CheckpointError: they cannot be read or written.
    """
    for number, table in enumerate(trained_tables(model).values()):
        rows = table.read().rows

        def fill(into: TableValues, values: TableValues = rows.values) -> None:
            np.copyto(into, values)

        write_table_file(folder / f"{number}.safetensors", table.spec, {}, rows.ids, fill)


class MappedTables:
    """Finds rows in the files of :func:`write_tables`, which all processes of a machine share."""

    def __init__(self, folder: Path) -> None:
        """Raises CheckpointError if a file is damaged."""
        found = [KnownRows(*map_table_file(path)) for path in sorted(folder.glob("*.safetensors"))]
        self._tables: Mapping[str, KnownRows] = {rows.spec.name: rows for rows in found}

    def find(self, asked: LookUpCall) -> Found:
        """See :class:`worker.embedding.lookups.LookUps`."""
        return self._tables[asked.table.name].find(asked)
