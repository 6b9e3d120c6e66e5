"""Ranges: the values that a setting may take in a study.

Job files use it as ``from pserver import space``::

    search = {"optimizer.learning_rate": space.log(1e-4, 1e-1), "batch_size": space.choice(32, 64)}

The text of a range, ``log(0.0001, 0.1)``, is that of ``--space`` and of stored studies.
"""

from __future__ import annotations

import ast
import math
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from psrpc.core.errors import InvalidArgument
from psrpc.core.text import counted

Value = str | int | float | bool | None
"""A value of a setting."""


@dataclass(frozen=True)
class RealRange:
    """The real numbers from ``low`` to ``high``; with ``log``, every order of magnitude is equally
    likely."""

    low: float
    high: float
    log: bool = False

    def __post_init__(self) -> None:
        """Raises InvalidArgument for an empty or reversed interval."""
        if not all(map(math.isfinite, (self.low, self.high))) or not self.low < self.high:
            raise InvalidArgument(f"{self} is {_empty(self.low, self.high)}")
        if self.log and self.low <= 0:
            raise InvalidArgument(
                f"{self} begins at {self.low!r}; a logarithm needs values above 0, or say "
                f"uniform({self.low!r}, {self.high!r})"
            )

    def __str__(self) -> str:
        return f"{'log' if self.log else 'uniform'}({self.low!r}, {self.high!r})"

    def at(self, place: float) -> float:
        """Returns the number at ``place`` of the range, where 0 is its beginning and 1 its end."""
        low, high = self.low, self.high
        if self.log:
            found = math.exp(math.log(low) + place * (math.log(high) - math.log(low)))
        else:
            found = low + place * (high - low)
        return min(max(found, low), high)

    @property
    def ends(self) -> tuple[Value, ...]:
        """The first and the last value."""
        return (self.low, self.high)


@dataclass(frozen=True)
class WholeRange:
    """The whole numbers from ``low`` to ``high``, both included; with ``log``, every order of
    magnitude is equally likely."""

    low: int
    high: int
    log: bool = False

    def __post_init__(self) -> None:
        """Raises InvalidArgument for an empty or reversed interval."""
        if not self.low < self.high:
            raise InvalidArgument(f"{self} is {_empty(self.low, self.high)}")
        if self.log and self.low < 1:
            raise InvalidArgument(
                f"{self} begins at {self.low}; a logarithm needs whole numbers of at least 1, or "
                f"say integers({self.low}, {self.high})"
            )

    def __str__(self) -> str:
        return f"{'log_integers' if self.log else 'integers'}({self.low}, {self.high})"

    def at(self, place: float) -> int:
        """Returns the number at ``place`` of the range, where 0 is its beginning and 1 its end."""
        if self.log:
            # Each number has the interval that rounds to it, as in Optuna.
            low, high = math.log(self.low - 0.5), math.log(self.high + 0.5)
            found = round(math.exp(low + place * (high - low)))
        else:
            found = self.low + int(place * (self.high - self.low + 1))
        return min(max(found, self.low), self.high)

    @property
    def ends(self) -> tuple[Value, ...]:
        """The first and the last value."""
        return (self.low, self.high)


@dataclass(frozen=True)
class Alternatives:
    """A list of values."""

    values: tuple[Value, ...]

    def __post_init__(self) -> None:
        """Raises InvalidArgument for no values, one twice, or one of another type than `Value`."""
        if not self.values:
            raise InvalidArgument("choice() has no values; expected at least one")
        for index, value in enumerate(self.values):
            if value is not None and not isinstance(value, str | int | float | bool):
                raise InvalidArgument(
                    f"choice has {value!r}; expected texts, numbers, True, False or None"
                )
            if value in self.values[:index]:
                raise InvalidArgument(f"{self} has {value!r} twice; leave one out")

    def __str__(self) -> str:
        return f"choice({', '.join(map(repr, self.values))})"

    def at(self, place: float) -> Value:
        """Returns the value at ``place`` of the list, where 0 is its beginning and 1 its end."""
        return self.values[min(int(place * len(self.values)), len(self.values) - 1)]

    @property
    def ends(self) -> tuple[Value, ...]:
        """All values."""
        return self.values


Range = RealRange | WholeRange | Alternatives
"""The values that a setting may take."""


def log(low: float, high: float) -> RealRange:
    """Makes the range of real numbers from ``low`` to ``high`` in which every order of magnitude is
    equally likely, as for learning rates. Raises InvalidArgument for an empty interval or one that
    begins at 0 or below."""
    _check_real("log", low, high)
    return RealRange(float(low), float(high), log=True)


def uniform(low: float, high: float) -> RealRange:
    """Makes the range of real numbers from ``low`` to ``high``. Raises InvalidArgument for an empty
    interval."""
    _check_real("uniform", low, high)
    return RealRange(float(low), float(high))


def integers(low: int, high: int) -> WholeRange:
    """Makes the range of whole numbers from ``low`` to ``high``, both included. Raises
    InvalidArgument for an empty interval."""
    _check_whole("integers", low, high)
    return WholeRange(low, high)


def log_integers(low: int, high: int) -> WholeRange:
    """Makes the range of whole numbers from ``low`` to ``high``, both included, in which every
    order of magnitude is equally likely, as for widths and batch sizes. Raises InvalidArgument for
    an empty interval or one that begins below 1."""
    _check_whole("log_integers", low, high)
    return WholeRange(low, high, log=True)


def choice(*values: Value) -> Alternatives:
    """Makes the list of ``values``: texts, numbers, ``True``, ``False`` or ``None``. Raises
    InvalidArgument for none, or one twice."""
    return Alternatives(values)


def _check_real(kind: str, low: Any, high: Any) -> None:
    for name, end in (("lowest", low), ("highest", high)):
        if isinstance(end, bool) or not isinstance(end, int | float):
            raise InvalidArgument(
                f"the {name} value of {kind} is {end!r}; expected a number, as in "
                f"{kind}(0.001, 0.1)"
            )


def _check_whole(kind: str, low: Any, high: Any) -> None:
    for name, end in (("lowest", low), ("highest", high)):
        if isinstance(end, bool) or not isinstance(end, int):
            raise InvalidArgument(
                f"the {name} value of {kind} is {end!r}; expected a whole number, as in "
                f"{kind}(8, 64)"
            )


def _empty(low: float, high: float) -> str:
    if low > high:
        return f"reversed; say the smaller value first: {high!r}, {low!r}"
    if low == high:
        return f"one value; expected two different ones, or --set KEY={low!r} and no search of it"
    return "not an interval; expected two finite numbers"


KINDS = {each.__name__: each for each in (log, uniform, integers, log_integers, choice)}
"""The functions that make ranges, by name."""

_EXPECTED = (
    "expected log(LOW, HIGH), uniform(LOW, HIGH), integers(LOW, HIGH), log_integers(LOW, HIGH) or "
    "choice(A, B, ...)"
)
_WORDS = {"true": True, "false": False, "none": None}


def read_range(text: str) -> Range:
    """Parses a range; a list such as ``[32, 64]`` is a choice, and names need no quotes.

    Raises:
        InvalidArgument: it is no range.
    """
    try:
        node = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError):
        raise InvalidArgument(f"{text!r} is no range of values; {_EXPECTED}") from None
    if isinstance(node, ast.List | ast.Tuple):
        return choice(*(_literal(text, each) for each in node.elts))
    name = node.func.id if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) else ""
    if not isinstance(node, ast.Call) or name not in KINDS or node.keywords:
        close = get_close_matches(name, KINDS, 1, 0.65) if name not in KINDS else []
        hint = f"did you mean {close[0]}?" if close else _EXPECTED
        raise InvalidArgument(f"{text!r} is no range of values; {hint}")
    values = [_literal(text, each) for each in node.args]
    if name != "choice" and len(values) != 2:
        given = counted(len(values), "value")
        raise InvalidArgument(
            f"{text!r} has {given}; expected the lowest and the highest: {name}(LOW, HIGH)"
        )
    make: Any = KINDS[name]
    made: Range = make(*values)
    return made


def _literal(text: str, node: ast.expr) -> Value:
    if isinstance(node, ast.Name):
        return _WORDS.get(node.id.lower(), node.id)
    try:
        value: Value = ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError):
        raise InvalidArgument(
            f"{text!r} has the value {ast.unparse(node)}; put quotes around a text"
        ) from None
    return value
