"""Ranges: the values that a setting may take in a study.

Job files use it as ``from pserver import space``::

    search = {"optimizer.learning_rate": space.log(1e-4, 1e-1), "batch_size": space.choice(32, 64)}

The text of a range, ``log(0.0001, 0.1)``, is that of ``--space`` and of stored studies.
"""

from __future__ import annotations

import ast
import math
from dataclasses import dataclass
from typing import Any

from psrpc.core.errors import InvalidArgument

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
                f"{self} begins at {self.low!r}; a logarithm needs bounds above 0, or say "
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
    """The whole numbers from ``low`` to ``high``, both included."""

    low: int
    high: int

    def __post_init__(self) -> None:
        """Raises InvalidArgument for an empty or reversed interval."""
        if not self.low < self.high:
            raise InvalidArgument(f"{self} is {_empty(self.low, self.high)}")

    def __str__(self) -> str:
        return f"integers({self.low}, {self.high})"

    def at(self, place: float) -> int:
        """Returns the number at ``place`` of the range, where 0 is its beginning and 1 its end."""
        return min(self.low + int(place * (self.high - self.low + 1)), self.high)

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
    return RealRange(_real("log", low), _real("log", high), log=True)


def uniform(low: float, high: float) -> RealRange:
    """Makes the range of real numbers from ``low`` to ``high``. Raises InvalidArgument for an empty
    interval."""
    return RealRange(_real("uniform", low), _real("uniform", high))


def integers(low: int, high: int) -> WholeRange:
    """Makes the range of whole numbers from ``low`` to ``high``, both included. Raises
    InvalidArgument for an empty interval."""
    for bound in (low, high):
        if isinstance(bound, bool) or not isinstance(bound, int):
            raise InvalidArgument(f"integers has the bound {bound!r}; expected a whole number")
    return WholeRange(low, high)


def choice(*values: Value) -> Alternatives:
    """Makes the list of ``values``: texts, numbers, ``True``, ``False`` or ``None``. Raises
    InvalidArgument for none, or one twice."""
    return Alternatives(values)


def _real(kind: str, bound: Any) -> float:
    if isinstance(bound, bool) or not isinstance(bound, int | float):
        raise InvalidArgument(f"{kind} has the bound {bound!r}; expected a number")
    return float(bound)


def _empty(low: float, high: float) -> str:
    if low > high:
        return f"reversed; say the smaller bound first: {high!r}, {low!r}"
    if low == high:
        return f"empty; expected two different bounds, or --set KEY={low!r} for one value"
    return "not an interval; expected two finite numbers"


_KINDS = {"log": log, "uniform": uniform, "integers": integers, "choice": choice}
_EXPECTED = "expected log(LOW, HIGH), uniform(LOW, HIGH), integers(LOW, HIGH) or choice(A, B, ...)"
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
    if not isinstance(node, ast.Call) or name not in _KINDS or node.keywords:
        raise InvalidArgument(f"{text!r} is no range of values; {_EXPECTED}")
    values = [_literal(text, each) for each in node.args]
    if name != "choice" and len(values) != 2:
        raise InvalidArgument(f"{text!r} has {len(values)} bounds; expected {name}(LOW, HIGH)")
    make: Any = _KINDS[name]
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
