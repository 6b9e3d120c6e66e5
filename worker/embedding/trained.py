"""The rows of a trained table outside of a job: in a checkpoint, in memory, or in a mapped file."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from pserver.tables.initial import InitialRows
from psrpc.checkpoint.manifest import read_manifest
from psrpc.checkpoint.rows_chain import SavedCandidates, load_table, opened_chain
from psrpc.checkpoint.rows_reader import RowsBlock
from psrpc.core.errors import CheckpointError, InvalidJob
from psrpc.core.tables import Ids, TableSpec
from worker.embedding.lookups import Found, LookUpCall
from worker.embedding.rows import RowValues, checked_ids
from worker.runtime.devices import HOST


@dataclass(frozen=True, eq=False)
class TableState:
    """All of a table: its rows, by ascending ids, and the ids that are counted but have no row."""

    spec: TableSpec
    rows: RowsBlock
    candidates: SavedCandidates


class KnownRows:
    """Rows by id, in arrays that may be mapped from a file. Thread-safe."""

    def __init__(self, spec: TableSpec, ids: Ids, values: RowValues) -> None:
        """``ids`` are int64 ``[n]``, ascending; ``values`` float32 ``[n, width]``."""
        self.spec = spec
        self.ids = ids
        self.values = values
        self._initial = InitialRows(spec)
        self._one = threading.Lock()

    def read(self, ids: Ids) -> RowValues:
        """Returns the rows of ``ids`` ``[n]``; initial values for those without one."""
        found = np.empty((ids.size, self.spec.width), np.float32)
        at = np.searchsorted(self.ids, ids)
        there = at < self.ids.size
        there[there] = self.ids[at[there]] == ids[there]
        found[there] = self.values[at[there]]
        absent = np.flatnonzero(~there)
        with self._one:
            self._initial.fill_to(ids[absent], absent, found)
        return found

    def find(self, asked: LookUpCall) -> Found:
        """See :class:`worker.embedding.lookups.LookUps`."""
        return find_known(lambda: self, asked)


def find_known(known: Callable[[], KnownRows], asked: LookUpCall) -> Found:
    """Returns the rows that a layer asks for, without a gradient. The look-up calls ``known`` each
    time it runs, and so finds rows that were changed since."""
    ids, rule = asked.ids, asked.rule

    def read(given: Any) -> tuple[RowValues, Any]:
        rows = known()
        # An eager call gives a tensor.
        array = np.asarray(given)
        try:
            flat, kept = checked_ids(rows.spec, rule, array.reshape(-1), array.shape)
        except InvalidJob as error:
            # Keras adds its own text to a message without this mark.
            error._keras_call_info_injected = True  # type: ignore[attr-defined]
            raise
        values = rows.read(flat)
        there = np.ones(flat.size, np.bool_) if kept is None else kept
        values[~there] = 0
        return values.reshape(*array.shape, rows.spec.width), there.reshape(array.shape)

    with tf.device(HOST):
        values, there = tf.numpy_function(read, [ids], [tf.float32, tf.bool])
    values.set_shape(ids.shape.concatenate([asked.table.width]))
    there.set_shape(ids.shape)
    return values, there if rule.drops else None


class TrainedTable:
    """The rows of a table that a ``fit`` has trained, for the layers of its caller's model. They
    stay in the checkpoint until they are fetched. Not thread-safe.

    Attributes:
        spec: the table, as the job's plan has it.
        checkpoint: a checkpoint with its rows; None if they were read from a Keras file.
        fetches_itself: whether the layers fetch the rows when they need them, as they do for the
            callbacks of a ``fit``.
    """

    def __init__(
        self, spec: TableSpec, checkpoint: Path | None, state: TableState | None = None
    ) -> None:
        self.spec = spec
        self.checkpoint = checkpoint
        self.fetches_itself = False
        self._state = state
        self._known: KnownRows | None = None

    def read(self) -> TableState:
        """Returns the rows, without keeping those of a checkpoint.

        Raises:
            CheckpointError: the checkpoint is gone, or damaged.
        """
        if self._state is not None:
            return self._state
        assert self.checkpoint is not None
        if not self.checkpoint.is_dir():
            raise CheckpointError(
                f"the rows of table {self.spec.name!r} were in {str(self.checkpoint)!r}, which is "
                "gone; keep the directory of a run until they are fetched with "
                "cluster.fetch(model), or train again",
                code="PS404",
            )
        return load_table_state(self.checkpoint, self.spec.name)

    def fetch(self) -> None:
        """Reads the rows into memory. Raises as :meth:`read`."""
        self._state = self.read()

    def needed(self, layer: str) -> TableState:
        """Returns the rows for ``layer``, which needs them now.

        Raises:
            InvalidJob: they are not fetched.
            CheckpointError: as :meth:`read`.
        """
        if self._state is None and not self.fetches_itself:
            raise InvalidJob(
                f"layer {layer!r} has no rows in this process: those of table {self.spec.name!r} "
                f"are in {str(self.checkpoint)!r}; call cluster.fetch(model), which reads them "
                "into the model"
            )
        self.fetch()
        assert self._state is not None
        return self._state

    def known(self, layer: str) -> KnownRows:
        """Returns the rows for look-ups of ``layer``. Raises as :meth:`needed`."""
        state = self.needed(layer)
        if self._known is None:
            self._known = KnownRows(self.spec, state.rows.ids, state.rows.values)
        return self._known


def load_table_state(checkpoint: Path, name: str) -> TableState:
    """Returns all of one table of a checkpoint.

    Raises:
        CheckpointError: there is no such table, or the files are damaged.
    """
    rows = load_table(checkpoint, name)
    manifest = read_manifest(checkpoint)
    number = [table.name for table in manifest.plan.tables].index(name)
    pieces = [_no_candidates()]
    for file in manifest.files:
        for reader in opened_chain(checkpoint, manifest, file):
            if reader.header.part == len(file.rows) - 1:
                # The last part of a chain has all candidates.
                reader.check()
                pieces += [SavedCandidates(*piece) for piece in reader.candidates(number)]
    candidates = SavedCandidates(
        np.concatenate([piece.ids for piece in pieces]),
        np.concatenate([piece.counts for piece in pieces]),
        np.concatenate([piece.touched for piece in pieces]),
    )
    return TableState(manifest.plan.tables[number], rows, candidates)


def _no_candidates() -> SavedCandidates:
    none = np.zeros(0, np.uint32)
    return SavedCandidates(np.zeros(0, np.int64), none, none)


ABOUT = "about"
"""Name of the array that describes the others in a Keras file. Load-bearing, like their names."""

_COLUMNS = ("ids", "values", "counts", "touched")
_CANDIDATES = ("ids", "counts", "touched")


def state_arrays(state: TableState) -> dict[str, np.ndarray[Any, Any]]:
    """Returns a table as the arrays that a Keras file has of it, by name."""
    about = {"table": state.spec.to_json(), "slots": list(state.rows.slots)}
    found: dict[str, np.ndarray[Any, Any]]
    found = {ABOUT: np.frombuffer(json.dumps(about).encode(), np.uint8)}
    found |= {name: getattr(state.rows, name) for name in _COLUMNS}
    found |= {f"slot_{n}": array for n, array in enumerate(state.rows.slots.values())}
    found |= {f"candidate_{name}": getattr(state.candidates, name) for name in _CANDIDATES}
    return found


def state_of_arrays(arrays: Mapping[str, Any]) -> TableState:
    """Inverts :func:`state_arrays`. Takes arrays, or values that NumPy converts to arrays.

    Raises:
        ValueError: an array is missing, or they do not fit each other.
    """
    try:
        about = json.loads(np.asarray(arrays[ABOUT]).tobytes())
        spec = TableSpec.from_json(about["table"])
        columns = [np.asarray(arrays[name]) for name in _COLUMNS]
        slots = {name: np.asarray(arrays[f"slot_{n}"]) for n, name in enumerate(about["slots"])}
        candidates = [np.asarray(arrays[f"candidate_{name}"]) for name in _CANDIDATES]
    except KeyError as error:
        raise ValueError(f"array {error} is missing") from None
    ids, values, counts, touched = columns
    if {len(each) for each in (*columns, *slots.values())} != {len(ids)} or (
        values.shape != (len(ids), spec.width) or (np.diff(ids) <= 0).any()
    ):
        raise ValueError(f"the arrays of table {spec.name!r} do not fit each other")
    rows = RowsBlock(ids, values, slots, counts, touched)
    return TableState(spec, rows, SavedCandidates(*candidates))


class _LeftOut(threading.local):
    active = False


_left_out = _LeftOut()


@contextmanager
def rows_left_out() -> Iterator[None]:
    """Makes layers leave their rows out of Keras files that this thread writes in the block. For
    files whose readers get the rows in another way."""
    before, _left_out.active = _left_out.active, True
    try:
        yield
    finally:
        _left_out.active = before


def rows_are_left_out() -> bool:
    """Returns whether this thread is within :func:`rows_left_out`."""
    return _left_out.active
