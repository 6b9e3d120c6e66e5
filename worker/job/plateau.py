"""Parses ``Job.stop_early``, ``Job.reduce_lr`` and ``Job.keep_best``."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import Any, Literal, Protocol

from psrpc.core.errors import InvalidJob, InvalidSetting
from psrpc.options.config_keys import did_you_mean
from worker.job.checks import show

Direction = Literal["min", "max"]

_LESS = ("loss", "error", "crossentropy")
MORE = ("accuracy", "auc", "precision", "recall")
"""Parts of the names of Keras metrics that are better if they are greater."""

STOP_EARLY: Mapping[str, Any] = {"patience": 0, "min_delta": 0.0, "restore_best": False}
"""Settings and defaults of ``keras.callbacks.EarlyStopping``."""

REDUCE_LR: Mapping[str, Any] = {
    "factor": 0.1,
    "patience": 10,
    "min_delta": 1e-4,
    "cooldown": 0,
    "min_lr": 0.0,
}
"""Settings and defaults of ``keras.callbacks.ReduceLROnPlateau``."""


def parse_stop_early(text: object) -> dict[str, Any]:
    """Parses ``min:loss patience=3`` to the metric, whether less of it is better, and the settings.

    Raises:
        InvalidJob: the name or direction is missing, or a setting is unknown or out of range.
    """
    return _parse("stop_early", text, STOP_EARLY)


def parse_reduce_lr(text: object) -> dict[str, Any]:
    """Parses ``min:loss factor=0.5 patience=2``; as :func:`parse_stop_early`."""
    parsed = _parse("reduce_lr", text, REDUCE_LR)
    if not 0 < parsed["factor"] < 1:
        raise InvalidSetting(
            f"reduce_lr has factor={parsed['factor']:g}; expected a number above 0 and below 1"
        )
    return parsed


class PlateauFields(Protocol):
    """The fields of :class:`worker.job.job.Job` that :func:`check_evaluated` depends on."""

    @property
    def eval(self) -> object: ...
    @property
    def then(self) -> object: ...
    @property
    def local_steps(self) -> int: ...


def check_evaluated(job: PlateauFields, name: str) -> None:
    """Refuses ``keep_best``, ``stop_early`` or ``reduce_lr``, by ``name``, if it cannot be parsed
    or does not fit other fields."""
    text = getattr(job, name)
    if text is None:
        return
    _PARSERS[name](text)
    if job.eval is None:
        raise InvalidSetting(f"{name} is {text!r}, but eval is None; nothing is evaluated")
    if name == "reduce_lr" and job.then is not None:
        raise InvalidSetting(
            f"reduce_lr and then exclude each other: then is {job.then!r}, and a run that "
            "has another learning rate than at first follows no rule"
        )
    if name == "reduce_lr" and job.local_steps > 1:
        raise InvalidSetting(
            "reduce_lr and local_steps exclude each other: the learning rate of local "
            "steps is the worker's own; give the optimizer a schedule"
        )


def _parse(field: str, text: object, defaults: Mapping[str, Any]) -> dict[str, Any]:
    words = text.split() if isinstance(text, str) else [text]
    if words and (short := _SHORT.fullmatch(str(words[0]))):
        direction, name, number = short.groups()
        less = direction == "min" if direction else not any(part in name for part in MORE)
        raise InvalidSetting(
            f"{field} is {text!r}; expected a result and settings, such as "
            f"'{'min' if less else 'max'}:{name} patience={number}'"
        )
    name, direction = _objective(field, words[0] if words else "")
    parsed: dict[str, Any] = {"metric": name, "lower": direction == "min", **defaults}
    given = set()
    for word in words[1:]:
        key, equals, value = str(word).partition("=")
        if key not in defaults or not equals or key in given:
            if key in given:
                raise InvalidSetting(f"{field} has {key} twice: {show(text)}")
            if key in defaults:
                such = "true" if isinstance(defaults[key], bool) else f"{defaults[key]:g}"
                raise InvalidSetting(f"{field}: {key} has no value; expected, say, {key}={such}")
            hint = did_you_mean(key, defaults) or f"; its settings are {', '.join(defaults)}"
            raise InvalidSetting(f"{field} has no setting {word!r}{hint}", code="PS104")
        given.add(key)
        parsed[key] = _value(field, key, value, defaults[key])
    return parsed


_SHORT = re.compile(r"(?:(min|max):)?([A-Za-z_]\w*)[:=](\d+)")
"""A patience without its name."""


def _value(field: str, key: str, text: str, default: Any) -> Any:
    if isinstance(default, bool):
        if text.lower() in ("true", "false"):
            return text.lower() == "true"
        raise InvalidSetting(f"{field} has {key}={text}; expected true or false")
    whole = isinstance(default, int)
    try:
        value: float = int(text) if whole else float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        kind = "a whole number" if whole else "a number"
        raise InvalidSetting(f"{field} has {key}={text}; expected {kind} of at least 0")
    return value


def parse_keep_best(text: object) -> tuple[str, Direction]:
    """Returns the name of the result and its better direction.

    Raises:
        InvalidJob: the name is missing, or its direction is unknown.
    """
    return _objective("keep_best", text)


def _objective(field: str, text: object) -> tuple[str, Direction]:
    if not isinstance(text, str):
        raise InvalidJob(
            f"{field} is {text!r} ({type(text).__name__}); expected a name like 'min:loss'"
        )
    direction, colon, name = text.partition(":")
    if colon and direction in ("min", "max") and name:
        return name, "min" if direction == "min" else "max"
    less = any(part in text for part in _LESS)
    more = any(part in text for part in MORE)
    if colon or not text or less == more:
        plain = text.rpartition(":")[2] or "accuracy"
        raise InvalidJob(
            f"{field} is {text!r}; say in which direction it gets better: "
            f"'max:{plain}' or 'min:{plain}'"
        )
    return text, "min" if less else "max"


_PARSERS: Mapping[str, Callable[[object], object]] = {
    "keep_best": parse_keep_best,
    "stop_early": parse_stop_early,
    "reduce_lr": parse_reduce_lr,
}
