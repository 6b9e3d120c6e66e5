"""What ``Job.stop_early`` and ``Job.reduce_lr`` mean: a result of evaluations, and settings."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any, Literal

from psrpc.core.errors import InvalidJob, InvalidSetting
from psrpc.options.config_keys import did_you_mean
from worker.job.checks import show

Direction = Literal["min", "max"]

_LESS = ("loss", "error", "crossentropy")
MORE = ("accuracy", "auc", "precision", "recall")
"""Parts of the names of Keras metrics that say which way is better."""


STOP_EARLY: Mapping[str, Any] = {"patience": 0, "min_delta": 0.0, "restore_best": False}
"""Settings and their defaults: those of ``keras.callbacks.EarlyStopping``."""

REDUCE_LR: Mapping[str, Any] = {
    "factor": 0.1,
    "patience": 10,
    "min_delta": 1e-4,
    "cooldown": 0,
    "min_lr": 0.0,
}
"""The same of ``keras.callbacks.ReduceLROnPlateau``."""


def parse_stop_early(text: object) -> dict[str, Any]:
    """``min:loss patience=3``: the metric, whether less of it is better, and the settings.

    Raises:
        InvalidJob: no name, no direction, or a setting that is none or out of range.
    """
    return _parse("stop_early", text, STOP_EARLY)


def parse_reduce_lr(text: object) -> dict[str, Any]:
    """``min:loss factor=0.5 patience=2``; as :func:`parse_stop_early`."""
    found = _parse("reduce_lr", text, REDUCE_LR)
    if not 0 < found["factor"] < 1:
        raise InvalidSetting(
            f"reduce_lr has factor={found['factor']:g}; expected a number above 0 and below 1"
        )
    return found


def _parse(field: str, text: object, defaults: Mapping[str, Any]) -> dict[str, Any]:
    words = text.split() if isinstance(text, str) else [text]
    if words and (short := _SHORT.fullmatch(str(words[0]))):
        direction, name, number = short.groups()
        less = direction == "min" if direction else not any(part in name for part in MORE)
        raise InvalidSetting(
            f"{field} is {text!r}; expected a result and settings, such as "
            f"'{'min' if less else 'max'}:{name} patience={number}'"
        )
    name, direction = parse_objective(field, words[0] if words else "")
    found: dict[str, Any] = {"metric": name, "lower": direction == "min", **defaults}
    given = set()
    for word in words[1:]:
        key, equals, value = str(word).partition("=")
        if key not in defaults or not equals or key in given:
            if key in given:
                raise InvalidSetting(f"{field} has {key} twice: {show(text)}")
            hint = did_you_mean(key, defaults) or f"; its settings are {', '.join(defaults)}"
            raise InvalidSetting(f"{field} has no setting {word!r}{hint}", code="PS104")
        given.add(key)
        found[key] = _value(field, key, value, defaults[key])
    return found


_SHORT = re.compile(r"(?:(min|max):)?([A-Za-z_]\w*)[:=](\d+)")
"""Patience without its name."""


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
    """The name of the result and the direction in which it gets better.

    Raises:
        InvalidJob: no name, or one of which the direction is not known.
    """
    return parse_objective("keep_best", text)


def parse_objective(field: str, text: object) -> tuple[str, Direction]:
    """The same of another field."""
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
