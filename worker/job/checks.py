"""Checks of the values that the fields of a job are given."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from numbers import Integral, Real

from psrpc.core.errors import InvalidSetting


def check_loss(loss: object) -> None:
    """Refuses what is neither a loss nor a nest of losses."""
    if isinstance(loss, Mapping | list | tuple) and loss:
        for part in loss.values() if isinstance(loss, Mapping) else loss:
            check_loss(part)
        return
    # Other classes are callable too, but mean an object that was not made.
    if loss is not None and (
        not (isinstance(loss, str) or callable(loss))
        or (isinstance(loss, type) and not _is_loss_class(loss))
    ):
        raise InvalidSetting(
            f"loss is {show(loss)}; expected a Keras loss, its name or a function, or a dict of "
            "them by the names of outputs"
        )


def _is_loss_class(kind: type) -> bool:
    """Whether it is a ``keras.losses.Loss``, of which Keras makes one. Keras is not imported for
    the question."""
    return any(
        base.__name__ == "Loss" and base.__module__.startswith("keras.") for base in kind.__mro__
    )


def check_loss_weights(weights: object) -> None:
    """Refuses what is neither a number nor a nest of numbers."""
    if isinstance(weights, Mapping | list | tuple) and weights:
        for part in weights.values() if isinstance(weights, Mapping) else weights:
            check_loss_weights(part)
    elif weights is not None and (
        isinstance(weights, bool) or not isinstance(weights, int | float)
    ):
        raise InvalidSetting(
            f"loss_weights is {show(weights)}; expected a number for each output, as a dict or list"
        )


def check_class_weight(weights: object) -> None:
    """Refuses what is neither None nor a dict from classes, whole numbers, to weights."""
    if weights is None:
        return
    if not isinstance(weights, Mapping) or not weights:
        raise InvalidSetting(
            f"class_weight is {show(weights)}; expected a dict such as {{0: 1.0, 1: 5.0}}"
        )
    for each, weight in weights.items():
        # NumPy's numbers, too.
        if isinstance(each, bool) or not isinstance(each, Integral):
            raise InvalidSetting(f"class_weight has the class {show(each)}; expected whole numbers")
        number = float(weight) if isinstance(weight, Real) else weight
        check_not_negative(f"class_weight[{each}]", number)


def check_metrics(metrics: object) -> None:
    """Refuses what is neither a list of metrics nor a nest of such lists."""
    if isinstance(metrics, Mapping):
        for part in metrics.values():
            check_metrics(part if isinstance(part, list | tuple) else [part])
        return
    if isinstance(metrics, str) or not isinstance(metrics, Sequence):
        raise InvalidSetting(
            f"metrics is {show(metrics)}; expected a list, such as metrics=[{metrics!r}]"
        )
    for metric in metrics:
        if isinstance(metric, list | tuple):
            check_metrics(metric)
        elif metric is not None and not isinstance(metric, str) and not callable(metric):
            raise InvalidSetting(
                f"metrics contains {show(metric)}; expected names of Keras metrics, metrics "
                "or functions that make one"
            )


def show(value: object) -> str:
    """A value and its type, for a message."""
    text = repr(value)
    return f"{text if len(text) <= 60 else text[:57] + '...'} ({type(value).__name__})"


def check_integer(name: str, value: object, least: int, most: int | None = None) -> None:
    """Refuses all but whole numbers of at least ``least``, and at most ``most``."""
    # bool is an int to Python, and True records a batch to nobody.
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise InvalidSetting(
            f"{name} is {show(value)}; expected a whole number of at least {least}"
        )
    if most is not None and value > most:
        raise InvalidSetting(f"{name} is {show(value)}; expected a whole number of at most {most}")


def check_boolean(name: str, value: object) -> None:
    """Refuses all but True and False."""
    if not isinstance(value, bool):
        raise InvalidSetting(f"{name} is {show(value)}; expected True or False")


def check_fraction(name: str, value: object, most: float) -> None:
    """Refuses all but numbers above 0 and at most ``most``."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= most:
        raise InvalidSetting(
            f"{name} is {show(value)}; expected a number above 0 and at most {most}"
        )


def check_not_negative(name: str, value: object) -> None:
    """Refuses all but finite numbers of at least 0."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise InvalidSetting(f"{name} is {show(value)}; expected a number of at least 0")


def check_choice(name: str, value: object, choices: tuple[str | None, ...]) -> None:
    """Refuses all but ``choices``."""
    if value not in choices:
        raise InvalidSetting(f"{name} is {show(value)}; expected {' or '.join(map(str, choices))}")


def check_source(name: str, value: object) -> None:
    """Refuses what has not the methods of a data source."""
    # A look at the class: isinstance on the protocol would read num_records, that is, the file.
    if isinstance(value, type) or not all(
        hasattr(type(value), part)
        for part in ("num_records", "read", "read_range", "fingerprint", "close")
    ):
        raise InvalidSetting(
            f"{name} is {show(value)}; expected a data source: Arrays, Npz, TfRecords, Csv or "
            "Function"
        )
