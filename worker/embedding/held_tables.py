"""Whole tables for the layers that an exported model is made of, which hold them by themselves."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import keras


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
