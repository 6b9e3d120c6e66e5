"""Where ``worker.Embedding`` layers take their rows from while a model runs.

A run of the model is entered with :func:`look_up`; the layers that it calls ask whatever was given
there, in the order of the calls, which is the same in every run of one model.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import keras
import tensorflow as tf

from psrpc.core.errors import InvalidJob
from worker.embedding.rows import Call, IdRule
from worker.embedding.table_options import TableOptions


@dataclass(frozen=True)
class Asked:
    """One call: which table, what its ids mean, and the ids, int64 of any dense shape."""

    table: TableOptions
    rule: IdRule
    ids: tf.Tensor


Found = tuple[tf.Tensor, tf.Tensor | None]
"""Rows, float32 ``[*ids.shape, width]``, zeros where an id comes to none, and a bool of the shape
of the ids, whether it came to one; None where all do."""


class LookUps(Protocol):
    """Finds rows for layers."""

    def find(self, asked: Asked) -> Found:
        """The rows of ``asked``."""


class NoRows:
    """Answers zeros, and remembers what was asked for: for building a model, and for finding out
    which ids a batch has. What comes of the rows can be traced back to ``taint``, a scalar."""

    def __init__(self, taint: tf.Tensor | None = None) -> None:
        self.asked: list[Asked] = []
        self._taint = taint

    def find(self, asked: Asked) -> Found:
        """See :class:`LookUps`."""
        self.asked.append(asked)
        row = tf.zeros([asked.table.width])
        if self._taint is not None:
            row += self._taint
        rows = tf.zeros_like(asked.ids, tf.float32)[..., tf.newaxis] + row
        return rows, tf.ones_like(asked.ids, tf.bool) if asked.rule.drops else None


@dataclass
class FetchedRows:
    """Answers rows that were fetched for the batch.

    Attributes:
        rows: of each table of the plan, float32 ``[at least 1, width]``.
        calls: that the run makes, in order.
        places: of each call, int32: where its ids are among the rows of its table; -1 is none.
        orders: of each table, see :class:`worker.embedding.rows.ByRow`; none where gradients are
        summed up
            outside of the step.
    """

    rows: Sequence[tf.Tensor]
    calls: Sequence[Call]
    places: Sequence[tf.Tensor]
    orders: Sequence[tf.Tensor] = ()
    _done: int = field(default=0, init=False)
    _found: dict[int, tf.Tensor] = field(default_factory=dict, init=False)

    def find(self, asked: Asked) -> Found:
        """See :class:`LookUps`.

        Raises:
            InvalidJob: the model calls its layers in another order than when its ids were found.
        """
        index = self._done
        if index >= len(self.calls) or self.calls[index].rule != asked.rule:
            raise InvalidJob(
                f"layer {asked.rule.layer!r} was not expected to be called here; a model must "
                "call its Embedding layers in the same order each time"
            )
        self._done += 1
        if index not in self._found:
            self._gather(self.calls[index].table)
        found = self._found[index]
        if not asked.rule.drops:
            return found, None
        there = self.places[index] >= 0
        return tf.where(there[..., tf.newaxis], found, tf.zeros_like(found)), there

    def _gather(self, table: int) -> None:
        """The rows of all calls that ask ``table``, at once: so the table has one gradient, of ids
        in the order of :class:`worker.embedding.rows.ByRow`."""
        mine = [index for index, call in enumerate(self.calls) if call.table == table]
        flat = [tf.reshape(self.places[index], [-1]) for index in mine]
        rows = self.rows[table]
        gathered = tf.gather(rows, tf.maximum(tf.concat(flat, 0), 0))
        parts = tf.split(gathered, [tf.size(each) for each in flat])
        for index, part in zip(mine, parts, strict=True):
            places = self.places[index]
            found = tf.reshape(part, tf.concat([tf.shape(places), [rows.shape[1]]], 0))
            found.set_shape([*places.shape, rows.shape[1]])
            self._found[index] = found


_present = threading.local()


@contextmanager
def look_up(source: LookUps | None) -> Iterator[None]:
    """The layers that this thread calls within ask ``source``; None changes nothing."""
    before = present()
    _present.source = before if source is None else source
    try:
        yield
    finally:
        _present.source = before


def present() -> LookUps | None:
    """What layers ask on this thread now."""
    source: LookUps | None = getattr(_present, "source", None)
    return source


class _Held(threading.local):
    """Tables that layers hold which are made by this thread, and where they hold them; None where
    they hold none."""

    def __init__(self) -> None:
        self.tables: Mapping[str, Any] | None = None
        self.grown: Mapping[str, Any] = {}
        self.held: list[tuple[keras.layers.Embedding, str]] = []


held = _Held()
"""Of this thread."""


@contextmanager
def holding(
    tables: Mapping[str, Any] | None,
    grown: Mapping[str, Any] | None = None,
) -> Iterator[list[tuple[keras.layers.Embedding, str]]]:
    """Layers that this thread makes within hold all rows of their tables, and work by themselves;
    ``tables`` and the ids of those that have ``grown`` are of
    :func:`worker.export.tables.whole_tables`. Gives the layers of Keras in which they hold the
    rows, each with the name of its table. None is as if it were not called.

    Making a layer raises InvalidJob (PS405) within, if its table is not there or has another shape.
    """
    held.tables, held.grown, held.held = tables, grown or {}, []
    try:
        yield held.held
    finally:
        held.tables, held.grown, held.held = None, {}, []
