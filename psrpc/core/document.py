"""Parses untrusted JSON within bounds, and checks it before use. Pure.

A *check* takes a value and its place in the document, and returns the value or raises ValueError
with both: ``files[0].nbytes is 'x'; expected a whole number from 0 to 9007199254740992``.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Mapping
from reprlib import Repr
from types import MappingProxyType
from typing import Any

Check = Callable[[Any, str], Any]

LARGEST = 192 << 20
"""Maximum bytes of a document. A checkpoint's document for the largest plan that fits a message is
smaller, and a manifest of 100 shards and 10 000 variables is a 60th of it."""

MOST_CONTAINERS = 1 << 21
"""Maximum number of objects and arrays. Each takes about 100 bytes of memory, however short its
text is."""

DEEPEST = 64
"""Maximum nesting depth of objects and arrays; a manifest has about ten levels."""

MOST_WHOLE = 1 << 53
"""Default maximum of integers: more than any real count, and up to it floats represent all integers
exactly."""

LONGEST_TEXT = 1 << 20

_REPR = Repr()
_REPR.maxstring = _REPR.maxother = _REPR.maxlong = 60
_REPR.maxlevel = 2

_EMPTY: Mapping[str, Check] = MappingProxyType({})


def parse_json(data: bytes, *, finite: bool = True) -> Any:
    """Parses a UTF-8 document.

    Args:
        finite: whether to refuse NaN and infinities, which Python writes although JSON does not
            allow them.

    Raises:
        ValueError: ``data`` is not JSON, is too large or too deep, repeats a key in an object, or
            has invalid characters or a number of more than 64 bits.
    """
    check_extent(data)
    text = data.decode()
    try:
        document = json.loads(
            text,
            object_pairs_hook=_unique,
            parse_int=_whole,
            parse_float=_finite if finite else None,
            parse_constant=_refuse_constant if finite else None,
        )
    except RecursionError:
        raise ValueError(f"it is nested more than {DEEPEST} deep") from None
    _check_depth(document)
    if "\\u" in text:
        # JSON allows a lone surrogate, which cannot be encoded.
        json.dumps(document, ensure_ascii=False).encode()
    return document


def check_extent(data: bytes) -> None:
    """Raises ValueError if a document is too large. Call it before parsing and before writing."""
    if len(data) > LARGEST:
        raise ValueError(f"it has {len(data)} bytes; expected {LARGEST} at most")
    containers = data.count(b"[") + data.count(b"{")
    if containers > MOST_CONTAINERS:
        raise ValueError(f"it has {containers} brackets; expected {MOST_CONTAINERS} at most")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"key {shown(twice)} is there twice")
    return made


def _whole(text: str) -> int:
    if len(text) > 20 or not -(1 << 63) <= (number := int(text)) < 1 << 64:
        raise ValueError(f"number {shown(text)} does not fit 64 bits")
    return number


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"number {shown(text)} is not finite")
    return number


def _refuse_constant(text: str) -> float:
    raise ValueError(f"{text} is no JSON")


def _check_depth(document: Any) -> None:
    level = [document] if isinstance(document, dict | list) else []
    for _ in range(DEEPEST):
        if not level:
            return
        level = [
            inner
            for outer in level
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, dict | list)
        ]
    if level:
        raise ValueError(f"it is nested more than {DEEPEST} deep")


def shown(value: object) -> str:
    """Formats any value as one short line."""
    return _REPR.repr(value)


def wrong(value: object, where: str, expected: str) -> ValueError:
    """Returns the error for an unexpected value."""
    return ValueError(f"{where or 'it'} is {shown(value)}; expected {expected}")


def anything(value: Any, _where: str) -> Any:
    """Passes every value."""
    return value


def whole(least: int = 0, most: int = MOST_WHOLE) -> Check:
    """Makes a check for an integer from ``least`` to ``most``. Refuses ``true`` and ``1.0``."""

    def check(value: Any, where: str) -> int:
        if type(value) is not int or not least <= value <= most:
            raise wrong(value, where, f"a whole number from {least} to {most}")
        return value

    return check


def real(value: Any, where: str) -> float:
    """Passes an integer or a finite float."""
    if not math.isfinite(real_or_nan(value, where)):
        raise wrong(value, where, "a finite number")
    number: float = value
    return number


def real_or_nan(value: Any, where: str) -> float:
    """Passes an integer or a float, such as a loss."""
    if type(value) not in (int, float):
        raise wrong(value, where, "a number")
    number: float = value
    return number


def flag(value: Any, where: str) -> bool:
    """Passes true and false."""
    if type(value) is not bool:
        raise wrong(value, where, "true or false")
    return value


def text(value: Any, where: str) -> str:
    """Passes a string."""
    if type(value) is not str or len(value) > LONGEST_TEXT:
        raise wrong(value, where, f"text of at most {LONGEST_TEXT} characters")
    return value


def choice(*choices: str | None) -> Check:
    """Makes a check for one of ``choices``."""

    def check(value: Any, where: str) -> Any:
        if not (value is None or type(value) is str) or value not in choices:
            raise wrong(value, where, " or ".join(map(repr, choices)))
        return value

    return check


def maybe(inner: Check) -> Check:
    """Makes a check that passes null and every value that ``inner`` passes."""
    return lambda value, where: None if value is None else inner(value, where)


def listed(each: Check, most: int = MOST_CONTAINERS, least: int = 0) -> Check:
    """Makes a check for an array of ``least`` to ``most`` values that pass ``each``."""

    def check(value: Any, where: str) -> list[Any]:
        if type(value) is not list or not least <= len(value) <= most:
            raise wrong(value, where, f"a list of {least} to {most} entries")
        for index, inner in enumerate(value):
            each(inner, f"{where}[{index}]")
        return value

    return check


def mapped(each: Check) -> Check:
    """Makes a check for an object with any keys whose values pass ``each``."""

    def check(value: Any, where: str) -> dict[str, Any]:
        if type(value) is not dict:
            raise wrong(value, where, "an object")
        for key, inner in value.items():
            each(inner, f"{where}.{shown(key)[1:-1]}".lstrip("."))
        return value

    return check


def record(
    required: Mapping[str, Check], optional: Mapping[str, Check] = _EMPTY, *, more: bool = False
) -> Check:
    """Makes a check for an object with these keys; ``more`` allows unknown keys, too."""
    known = {**required, **optional}

    def check(value: Any, where: str) -> dict[str, Any]:
        if type(value) is not dict:
            raise wrong(value, where, "an object")
        _check_keys(value, where, required, () if more else known)
        for key, each in known.items():
            if key in value:
                each(value[key], f"{where}.{key}".lstrip("."))
        return value

    return check


def _check_keys(
    value: Mapping[str, Any], where: str, required: Collection[str], known: Collection[str]
) -> None:
    missing = [key for key in required if key not in value]
    unknown = [key for key in value if known and key not in known]
    if missing or unknown:
        what = f"no {missing[0]!r}" if missing else f"the key {shown(unknown[0])}, which is unknown"
        raise ValueError(f"{where or 'it'} has {what}")
