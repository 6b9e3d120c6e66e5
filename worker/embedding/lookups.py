"""The source of the rows of ``worker.Embedding`` layers while a model runs.

The caller of a model enters :func:`look_up` with a source; the layers query it in the order of
their calls, which is the same in every run of one model.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import keras
import numpy as np
import tensorflow as tf

from psrpc.core.errors import InvalidJob
from worker.embedding.rows import Call, IdRule
from worker.embedding.table_options import TableOptions


@dataclass(frozen=True)
class LookUpCall:
    """One call of a layer: its table, the meaning of its ids, and the ids, int64 of any dense
    shape."""

    table: TableOptions
    rule: IdRule
    ids: tf.Tensor


Found = tuple[tf.Tensor, tf.Tensor | None]
"""Rows, float32 ``[*ids.shape, width]``, zeros for ids without one; and a bool in the shape of the
ids, whether each has a row; None means all have."""


class LookUps(Protocol):
    """Finds rows for layers."""

    def find(self, asked: LookUpCall) -> Found:
        """Returns the rows of ``asked``."""


class NoRows:
    """Returns zeros and records the calls, for building a model and for finding the ids of a batch.
    Tensors computed from the rows can be traced back to ``taint``, a scalar."""

    def __init__(self, taint: tf.Tensor | None = None) -> None:
        self.asked: list[LookUpCall] = []
        self._taint = taint

    def find(self, asked: LookUpCall) -> Found:
        """See :class:`LookUps`."""
        self.asked.append(asked)
        row = tf.zeros([asked.table.width])
        if self._taint is not None:
            row += self._taint
        rows = tf.zeros_like(asked.ids, tf.float32)[..., tf.newaxis] + row
        return rows, tf.ones_like(asked.ids, tf.bool) if asked.rule.drops else None


@dataclass
class FetchedRows:
    """Returns rows that were fetched for the batch.

    Attributes:
        rows: per table of the plan its rows, float32 ``[at least 1, width]``.
        calls: the calls of the run, in order.
        places: per call the place of each id among its table's rows, int32; -1 is none.
        orders: per table its ids by row, see :class:`worker.embedding.rows.ByRow`; empty if
            gradients are summed outside of the step.
    """

    rows: Sequence[tf.Tensor]
    calls: Sequence[Call]
    places: Sequence[tf.Tensor]
    orders: Sequence[tf.Tensor] = ()
    _done: int = field(default=0, init=False)
    _rows_of: dict[int, tf.Tensor] = field(default_factory=dict, init=False)

    def find(self, asked: LookUpCall) -> Found:
        """See :class:`LookUps`.

        Raises:
            InvalidJob: the model calls its layers in another order than for finding its ids.
        """
        index = self._done
        if index >= len(self.calls) or self.calls[index].rule != asked.rule:
            raise InvalidJob(
                f"layer {asked.rule.layer!r} was not expected to be called here; a model must "
                "call its Embedding layers in the same order each time"
            )
        self._done += 1
        if index not in self._rows_of:
            self._gather(self.calls[index].table)
        rows = self._rows_of[index]
        if not asked.rule.drops:
            return rows, None
        there = self.places[index] >= 0
        return tf.where(there[..., tf.newaxis], rows, tf.zeros_like(rows)), there

    def _gather(self, table: int) -> None:
        """Gathers the rows of all calls on ``table`` at once, so that the table has one gradient,
        with ids in the order of :class:`worker.embedding.rows.ByRow`."""
        mine = [index for index, call in enumerate(self.calls) if call.table == table]
        flat = [tf.reshape(self.places[index], [-1]) for index in mine]
        rows = self.rows[table]
        gathered = tf.gather(rows, tf.maximum(tf.concat(flat, 0), 0))
        parts = tf.split(gathered, [tf.size(each) for each in flat])
        for index, part in zip(mine, parts, strict=True):
            places = self.places[index]
            shaped = tf.reshape(part, tf.concat([tf.shape(places), [rows.shape[1]]], 0))
            shaped.set_shape([*places.shape, rows.shape[1]])
            self._rows_of[index] = shaped


_present = threading.local()


@contextmanager
def look_up(source: LookUps | None) -> Iterator[None]:
    """Makes layers that this thread calls in the block query ``source``; None changes nothing."""
    before = present()
    _present.source = before if source is None else source
    try:
        yield
    finally:
        _present.source = before


def present() -> LookUps | None:
    """Returns the source that layers on this thread query now."""
    source: LookUps | None = getattr(_present, "source", None)
    return source


class _Held(threading.local):
    """The tables whose rows a layer holds itself if this thread creates it, and the Keras layers
    that hold those rows. ``tables`` is None outside of :func:`holding`."""

    def __init__(self) -> None:
        self.tables: Mapping[str, Any] | None = None
        self.grown: Mapping[str, Any] = {}
        self.held: list[tuple[keras.layers.Embedding, str]] = []


held = _Held()
"""The tables of this thread."""


@contextmanager
def holding(
    tables: Mapping[str, Any] | None, grown: Mapping[str, Any] | None = None
) -> Iterator[list[tuple[keras.layers.Embedding, str]]]:
    """Makes layers that this thread creates in the block hold all rows of their tables themselves.

    ``tables``, and the ids ``grown`` of growing tables, come from
    :func:`worker.export.tables.whole_tables`; None changes nothing. Yields the Keras layers that
    hold the rows, each with the name of its table.

    Creating a layer in the block raises InvalidJob (PS405) if its table is missing or has another
    shape.
    """
    held.tables, held.grown, held.held = tables, grown or {}, []
    try:
        yield held.held
    finally:
        held.tables, held.grown, held.held = None, {}, []


class GivenRows(keras.layers.Embedding):  # type: ignore[misc]  # Keras has no types
    """A Keras layer with rows of a checkpoint. A file that holds the rest of the model has neither
    this layer nor its rows."""

    def load_own_variables(self, _store: Any) -> None:
        """Keeps the rows: the file has none."""


class HeldRows:
    """Returns rows that a layer holds itself, in a model for export. Only within :func:`holding`.

    Attributes:
        rows: Keras's layer that has them as its weights, float32 for every compute dtype.
    """

    def __init__(self, table: TableOptions) -> None:
        assert held.tables is not None  # the caller checks
        values = table.rows_of(held.tables, held.grown)
        self._vocabulary = table.vocabulary
        # The id of each row of a growing table; the last, the highest int64, is the row of all
        # other ids.
        self._ids: tf.Tensor | None = None
        if table.vocabulary is None:
            ids = np.append(held.grown[table.name], np.iinfo(np.int64).max)
            self._ids = tf.constant(ids, tf.int64)
        self.rows = GivenRows(len(values), table.width, name=table.layer, dtype="float32")
        self.rows.build((None,))
        self.rows.set_weights([values])
        held.held.append((self.rows, table.name))

    def find(self, asked: LookUpCall) -> Found:
        """See :class:`LookUps`."""
        ids, rule, there = asked.ids, asked.rule, None
        if rule.drops:
            there = tf.ones_like(ids, tf.bool) if rule.padding is None else ids != rule.padding
            if rule.out_of_vocabulary == "drop":
                there &= (ids >= 0) & (ids < self._vocabulary)
        if self._ids is not None:
            at = tf.reshape(tf.searchsorted(self._ids, tf.reshape(ids, [-1])), tf.shape(ids))
            ids = tf.where(tf.gather(self._ids, at) == ids, at, tf.size(self._ids) - 1)
        elif there is not None or rule.out_of_vocabulary == "clip":
            assert self._vocabulary is not None  # without _ids it has one
            ids = tf.clip_by_value(ids, 0, self._vocabulary - 1)
        rows = tf.cast(self.rows(ids), tf.float32)
        if there is not None:
            rows = tf.where(there[..., tf.newaxis], rows, tf.zeros_like(rows))
        return rows, there
