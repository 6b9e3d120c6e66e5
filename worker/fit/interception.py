"""Redirects ``fit``, ``evaluate`` and ``predict`` of Keras models to a cluster, within a block."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from types import CellType
from typing import Any

import keras

from psrpc.core.errors import InvalidArgument

_ONE = threading.Lock()
"""Held while calls are sent to a cluster."""


@contextmanager
def calls_sent(to: Mapping[str, Callable[..., Any]]) -> Iterator[Mapping[str, Callable[..., Any]]]:
    """Within the context, ``model.NAME(...)`` calls ``to[NAME](model, ...)`` in all threads.
    Yields Keras's own functions by the same names.

    Keras's own function is replaced inside of the wrapper that Keras has put around it, and not on
    the class: tools such as MLflow, which wrap ``keras.Model.fit``, keep the wrapper, and still
    see the call.

    Raises:
        InvalidArgument: calls are sent to another cluster already.
    """
    if not _ONE.acquire(blocking=False):
        raise InvalidArgument("another pserver.Cluster is entered already; leave that one first")
    try:
        with ExitStack() as held:
            yield {
                name: held.enter_context(_replaced(_cell(name), function))
                for name, function in to.items()
            }
    finally:
        _ONE.release()


def _cell(name: str) -> CellType:
    """Returns the place where Keras's wrapper of the method ``name`` keeps the function that it
    wraps."""
    trainers = [each for each in keras.Model.__mro__ if each.__name__.endswith("Trainer")]
    method = next(vars(each)[name] for each in trainers if name in vars(each))
    cells: dict[str, CellType]
    cells = dict(zip(method.__code__.co_freevars, method.__closure__, strict=True))
    return cells["fn"]


@contextmanager
def _replaced(cell: CellType, function: Callable[..., Any]) -> Iterator[Callable[..., Any]]:
    before: Callable[..., Any] = cell.cell_contents

    def sent(model: Any, *args: Any, **kwargs: Any) -> Any:
        return function(model, *args, **kwargs)

    cell.cell_contents = sent
    try:
        yield before
    finally:
        cell.cell_contents = before
