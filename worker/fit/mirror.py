"""Copies the state of a job's checkpoint into the caller's Keras model, and back."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import keras
import numpy as np

from pserver.updates.keras_objects import assign, view
from psrpc.checkpoint.directory import commit
from psrpc.checkpoint.load import load_state
from psrpc.checkpoint.manifest import TEMPORARY, Manifest, ManifestFile, read_manifest
from psrpc.checkpoint.shard_file import NDArray, ShardState, shard_file_name, write_shard_file
from psrpc.core.errors import CheckpointError, InvalidJob, disk_code, disk_reason
from psrpc.core.plan import Plan
from psrpc.files.storage import DISK
from worker.embedding.model_tables import (
    place_tables,
    table_layers,
    trained_tables,
)
from worker.embedding.row_copies import link_rows, write_rows
from worker.embedding.trained import TableState, TrainedTable
from worker.fit.binding import Binding, Key
from worker.model.loss_scale import inner
from worker.model.variables import derive


class Mirror:
    """Keeps a caller's model equal to the checkpoints of the job that trains it.

    A checkpoint holds the model's weights and the state of its optimizer. It does not hold the
    learning rate, the states of seed generators (workers derive them from the batch) and the scale
    of a ``LossScaleOptimizer`` (workers begin each batch with the same): the model keeps its own.
    Rows of embedding tables stay in the checkpoint, and the layers know its path. Not thread-safe.
    """

    def __init__(self, model: keras.Model) -> None:
        """``model`` is compiled, and must be built before the first :meth:`load` or :meth:`save`.

        Raises:
            InvalidJob: it is not compiled with an optimizer that shards can run.
        """
        check_mirrored(model)
        self._model = model
        self._bound: Binding | None = None
        self._tables: dict[str, TrainedTable] = {}
        """Rows that :meth:`load` has given to the model's layers, by the table's name."""
        self._earlier: set[bytes] = set()
        """Digests of the weights of earlier calls of :meth:`load`, where there are tables."""
        self._loaded: list[tuple[Any, NDArray]] = []
        """Each variable with the array that :meth:`load` has assigned to it."""

    def load(self, checkpoint: Path) -> None:
        """Assigns a committed checkpoint, of any number of shards, to the model and its optimizer,
        which is built if it is not.

        Raises:
            CheckpointError: the checkpoint cannot be read; nothing was assigned.
            InvalidJob: it is of another model or optimizer; nothing was assigned.
        """
        bound = self._bound
        if bound is None or not bound.holds(self._model):
            bound = Binding(self._model, read_manifest(checkpoint).plan)
        state = load_state(checkpoint, bound.whole, 0)
        parts = {key: part for key, _, part in _parts(bound.whole, 0, state)}
        bound.check(parts.keys())
        arrays = [
            parts[key].astype(dtype, copy=False).reshape(shape)
            for key, (dtype, shape) in bound.forms.items()
        ]
        self._bound, self._loaded = bound, list(zip(bound.variables.values(), arrays, strict=True))
        assign(bound.variables.values(), arrays)
        bound.follow_constants()
        derive(self._model)
        if bound.whole.tables:
            self._earlier.add(_digest(bound))
        self._tables = place_tables(self._model, checkpoint, bound.whole.tables)

    def changed(self) -> bool:
        """Whether the model has changed since :meth:`load`: a bit of a variable or of an
        optimizer's slot differs, a table has other rows, or the model was compiled anew."""
        if self._bound is None or not self._bound.holds(self._model):
            return True
        if self._changed_tables():
            return True
        return not all(_same_bits(view(variable), array) for variable, array in self._loaded)

    def save(self, checkpoint: Path, to: Path) -> None:
        """Writes a copy of ``checkpoint`` with the present values of the model and its optimizer.
        All else, such as the step and the applied batches, stays the same. ``to`` is a new
        directory in an existing one. Shards restore it like any other checkpoint. Files of rows are
        hard links, unless a table of the model has other rows than ``checkpoint``.

        Raises:
            CheckpointError: ``checkpoint`` cannot be read, or ``to`` not be written.
            InvalidJob: ``checkpoint`` is of another model or optimizer.
        """
        manifest = read_manifest(checkpoint)
        plan = manifest.plan
        bound = Binding(self._model, plan)
        states = [load_state(checkpoint, plan, shard) for shard in range(plan.shards)]
        bound.check({key for k, state in enumerate(states) for key, *_ in _parts(plan, k, state)})
        values = {key: view(variable).reshape(-1) for key, variable in bound.variables.items()}
        for shard, state in enumerate(states):
            for key, elements, part in _parts(plan, shard, state):
                if key in values:
                    np.copyto(part, values[key][elements], casting="unsafe")
        tables: dict[str, TableState] = {}
        if self._changed_tables():
            changed = trained_tables(self._model)
            here = {spec.name: TrainedTable(spec, checkpoint) for spec in plan.tables}
            tables = {name: changed.get(name, table).read() for name, table in here.items()}
        go_on = bool(int(bound.optimizer.iterations))

        def rows(file: ManifestFile, folder: Path) -> ManifestFile:
            if tables:
                return write_rows(checkpoint, manifest, file, tables, folder, keep_slots=go_on)
            link_rows(checkpoint, file, folder)
            return file

        _write(manifest, states, rows, to)

    def check_not_set_back(self) -> None:
        """Refuses weights of an earlier batch that a callback has kept and set again, if there are
        tables: their rows are of a later batch, and do not belong to such weights.

        Raises:
            InvalidJob: names callbacks that set rows back as well.
        """
        if self._bound is None or not self._tables or not self._bound.holds(self._model):
            return
        same = all(_same_bits(view(variable), array) for variable, array in self._weights())
        if not same and not self._changed_tables() and _digest(self._bound) in self._earlier:
            raise InvalidJob(
                "a callback has set the model's weights back to those of an earlier batch, which "
                f"leaves the rows of table {next(iter(self._tables))!r} as they are; use "
                "EarlyStopping(restore_best_weights=True), or load_weights of a file, which take "
                "rows along",
                code="PS108",
            )

    def _weights(self) -> list[tuple[Any, NDArray]]:
        assert self._bound is not None
        return [
            loaded
            for (slot, _), loaded in zip(self._bound.variables, self._loaded, strict=True)
            if not slot
        ]

    def _changed_tables(self) -> bool:
        layers = table_layers(self._model)
        return any(layer.trained is not self._tables.get(layer.options.name) for layer in layers)


def check_mirrored(model: keras.Model) -> None:
    """Refuses a model that cannot mirror a checkpoint. Raises InvalidJob as :class:`Mirror`."""
    if not model.compiled or not isinstance(model.optimizer, keras.optimizers.Optimizer):
        raise InvalidJob(
            f"model {model.name!r} is not compiled with an optimizer; call compile() first"
        )
    inner(model.optimizer)


def _parts(plan: Plan, shard: int, state: ShardState) -> Iterator[tuple[Key, slice, NDArray]]:
    """Yields each part of a shard's state with its place among the elements of the flattened
    variable, and a flat view of it."""
    slots = {"": state.values, **state.elements}
    for arena in plan.arenas:
        for piece in plan.shard_slices(arena, shard):
            elements = slice(piece.start, piece.stop)
            place = slice(piece.offset, piece.offset + piece.stop - piece.start)
            for slot, arrays in slots.items():
                if arena.name in arrays:
                    yield (slot, piece.variable.name), elements, arrays[arena.name][place]
    for slot, arrays in state.variables.items():
        for name, array in arrays.items():
            yield (slot, name), slice(array.size), array.reshape(-1)
    for name, array in state.scalars.items():
        yield (name, ""), slice(1), array.reshape(-1)


def _digest(bound: Binding) -> bytes:
    """Returns a digest of the present weights."""
    found = hashlib.blake2b()
    for (slot, _), variable in bound.variables.items():
        if not slot:
            found.update(view(variable).tobytes())
    return found.digest()


def _same_bits(one: NDArray, other: NDArray) -> bool:
    kind = f"u{one.itemsize}"
    return np.array_equal(one.reshape(-1).view(kind), other.reshape(-1).view(kind))


def _write(
    manifest: Manifest,
    states: Sequence[ShardState],
    rows: Callable[[ManifestFile, Path], ManifestFile],
    to: Path,
) -> None:
    """Writes a checkpoint like that of ``manifest``, with other states. ``rows`` writes the rows of
    a shard into a directory, and returns the shard's entry with them. Raises CheckpointError."""
    if to.exists():
        raise CheckpointError(f"checkpoint {to} is there already")
    temporary = to.with_name(f"{TEMPORARY}{to.name}")
    try:
        with suppress(FileNotFoundError):
            DISK.remove(temporary)
        DISK.make_directory(temporary)
    except OSError as error:
        raise CheckpointError(
            f"{temporary} cannot be made: {disk_reason(error)}", code=disk_code(error)
        ) from error
    files = []
    for shard, state in enumerate(states):
        (file,) = (file for file in manifest.files if file.shard == shard)
        if manifest.plan.tables_on(shard):
            file = rows(file, temporary)
        written = write_shard_file(
            temporary / shard_file_name(shard, manifest.plan.shards),
            manifest.plan,
            shard,
            state,
            run_id=manifest.run_id,
            generation=manifest.generation,
            global_step=manifest.global_step,
        )
        files.append(replace(file, name=written.name, nbytes=written.nbytes, sha256=written.sha256))
    commit(temporary, to, replace(manifest, name=to.name, files=tuple(files)))
