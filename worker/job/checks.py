"""Checks of the values of a job's fields."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral, Real
from pathlib import Path
from typing import Any

from psrpc.checkpoint.checkpoint_every import EXPECTED, read_checkpoint_every
from psrpc.core.errors import InvalidSetting
from psrpc.options.config_keys import did_you_mean
from psrpc.options.job_keys import INSTEAD


def check_model(model: object) -> None:
    """Refuses values other than a function that makes the model."""
    if hasattr(model, "trainable_variables") and not isinstance(model, type):
        raise InvalidSetting(
            f"model is {show(model)}, a model; expected a function without arguments "
            "that makes one: each process makes its own (model=build, not model=build())"
        )
    if not callable(model):
        raise InvalidSetting(
            f"model is {show(model)}; expected a function without arguments that makes the model"
        )
    if needed := required_arguments(model):
        call = f"{getattr(model, '__name__', 'build')}({', '.join(f'{n}=...' for n in needed)})"
        raise InvalidSetting(
            f"model needs {', '.join(needed)}; expected a function without arguments: "
            f"model=lambda: {call}"
        )


def required_arguments(function: Any) -> list[str]:
    """Returns the names of the positional arguments without a default that a callable takes; an
    empty list if it has no signature, as some callables written in C."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:
        return []
    return [
        p.name
        for p in parameters
        if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]


def check_job_optimizer(optimizer: object) -> None:
    """Refuses values that are neither an optimizer, its name, nor a function that makes one."""
    if optimizer is not None and not (
        isinstance(optimizer, str) or callable(optimizer) or hasattr(optimizer, "get_config")
    ):
        raise InvalidSetting(
            f"optimizer is {show(optimizer)}; expected a Keras optimizer, its name or a "
            "function that makes one"
        )


def check_loss(loss: object) -> None:
    """Refuses values that are neither a loss nor a nest of losses."""
    if isinstance(loss, Mapping | list | tuple) and loss:
        for part in loss.values() if isinstance(loss, Mapping) else loss:
            check_loss(part)
        return
    # Other classes are callable too, but were probably meant to be called.
    if loss is not None and (
        not (isinstance(loss, str) or callable(loss))
        or (isinstance(loss, type) and not _is_loss_class(loss))
    ):
        raise InvalidSetting(
            f"loss is {show(loss)}; expected a Keras loss, its name or a function, or a dict of "
            "them by the names of outputs"
        )


def _is_loss_class(kind: type) -> bool:
    """Whether ``kind`` is a ``keras.losses.Loss``, judged without importing Keras."""
    return any(
        base.__name__ == "Loss" and base.__module__.startswith("keras.") for base in kind.__mro__
    )


def check_loss_weights(weights: object) -> None:
    """Refuses values that are neither a number nor a nest of numbers."""
    if isinstance(weights, Mapping | list | tuple) and weights:
        for part in weights.values() if isinstance(weights, Mapping) else weights:
            check_loss_weights(part)
    elif weights is not None and (
        isinstance(weights, bool) or not isinstance(weights, int | float)
    ):
        raise InvalidSetting(
            f"loss_weights is {show(weights)}; expected a number for each output, as a dict or list"
        )


def check_field_names(given: Iterable[str], known: Sequence[str]) -> None:
    """Refuses fields that a job does not have; names the nearest one, or what there is instead."""
    for name in given:
        if name not in known:
            hint = f"; {INSTEAD[name]}" if name in INSTEAD else did_you_mean(name, known)
            hint = hint or f"; its fields are {', '.join(known)}"
            raise InvalidSetting(f"Job has no field {name}{hint}", code="PS104")


def check_path(name: str, value: object) -> None:
    """Refuses values other than None and paths."""
    if value is not None and not isinstance(value, str | Path):
        raise InvalidSetting(f"{name} is {show(value)}; expected a path")


def check_class_weight(weights: object) -> None:
    """Refuses values other than None and a dict from integer classes to weights."""
    if weights is None:
        return
    if not isinstance(weights, Mapping) or not weights:
        raise InvalidSetting(
            f"class_weight is {show(weights)}; expected a dict such as {{0: 1.0, 1: 5.0}}"
        )
    for each, weight in weights.items():
        # Integral and Real include NumPy's numbers.
        if isinstance(each, bool) or not isinstance(each, Integral):
            raise InvalidSetting(f"class_weight has the class {show(each)}; expected whole numbers")
        number = float(weight) if isinstance(weight, Real) else weight
        check_not_negative(f"class_weight[{each}]", number)


def check_devices(devices: object, local_steps: int) -> None:
    """Refuses values other than None, ``"columns"`` and a dict from patterns to indices."""
    if devices is None:
        return
    if local_steps > 1:
        raise InvalidSetting(
            f"devices is given, and local_steps is {local_steps}; local steps run on one device: "
            "leave one of them out"
        )
    if devices == "columns":
        return
    if not isinstance(devices, Mapping) or not devices:
        raise InvalidSetting(
            f"devices is {show(devices)}; expected 'columns', or indices of devices by the names "
            "of layers, as in {'block1/*': 0, 'block2/*': 1}"
        )
    for pattern, index in devices.items():
        check_integer(f"devices[{pattern!r}]", index, 0)


def check_metrics(metrics: object) -> None:
    """Refuses values that are neither a list of metrics nor a nest of such lists."""
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
    """Formats a value and its type for a message."""
    text = repr(value)
    return f"{text if len(text) <= 60 else text[:57] + '...'} ({type(value).__name__})"


def check_integer(name: str, value: object, least: int, most: int | None = None) -> None:
    """Refuses everything but integers from ``least`` to ``most``."""
    # bool is an int in Python, but True is no batch size.
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise InvalidSetting(
            f"{name} is {show(value)}; expected a whole number of at least {least}"
        )
    if most is not None and value > most:
        raise InvalidSetting(f"{name} is {show(value)}; expected a whole number of at most {most}")


def check_boolean(name: str, value: object) -> None:
    """Refuses everything but True and False."""
    if not isinstance(value, bool):
        raise InvalidSetting(f"{name} is {show(value)}; expected True or False")


def check_fraction(name: str, value: object, most: float) -> None:
    """Refuses everything but numbers above 0 and at most ``most``."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= most:
        raise InvalidSetting(
            f"{name} is {show(value)}; expected a number above 0 and at most {most}"
        )


def check_not_negative(name: str, value: object) -> None:
    """Refuses everything but finite numbers of at least 0."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise InvalidSetting(f"{name} is {show(value)}; expected a number of at least 0")


def check_choice(name: str, value: object, choices: tuple[str | None, ...]) -> None:
    """Refuses everything but ``choices``."""
    if value not in choices:
        raise InvalidSetting(f"{name} is {show(value)}; expected {' or '.join(map(str, choices))}")


def check_checkpoint_every(value: object) -> None:
    """Refuses everything but a number of steps, a time, or None."""
    try:
        read_checkpoint_every(value)
    except ValueError:
        raise InvalidSetting(f"checkpoint_every is {show(value)}; expected {EXPECTED}") from None


def check_source(name: str, value: object) -> None:
    """Refuses values without the methods of a data source."""
    # Checks the class: isinstance on the protocol would read num_records, and so the file.
    if isinstance(value, type) or not all(
        hasattr(type(value), part)
        for part in ("num_records", "read", "read_range", "fingerprint", "close")
    ):
        raise InvalidSetting(
            f"{name} is {show(value)}; expected a data source: Arrays, Npz, TfRecords, Csv, "
            "Parquet or Function"
        )
