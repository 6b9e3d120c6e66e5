"""What ``Job.keep_best`` and its like mean: a result of evaluations, and which way is better."""

from __future__ import annotations

from typing import Literal

from psrpc.core.errors import InvalidJob

Direction = Literal["min", "max"]

_LESS = ("loss", "error", "crossentropy")
MORE = ("accuracy", "auc", "precision", "recall")
"""Parts of the names of Keras metrics that say which way is better."""


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
