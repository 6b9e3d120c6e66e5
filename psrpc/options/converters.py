"""Converters of texts to the values of options; each says what it expects."""

from __future__ import annotations

from argparse import ArgumentTypeError
from pathlib import Path

from psrpc.files.urls import is_url


def run_path(text: str) -> Path:
    """Returns the path of a run, or of a part of one: never a URL."""
    if is_url(text):
        raise ArgumentTypeError(
            f"{text!r} is a URL; expected a path: runs lie on a POSIX file system that the "
            "coordinator and all shards share (data, init_from and exports may be URLs)"
        )
    return Path(text)


def positive(text: str) -> int:
    """Returns a whole number of at least 1."""
    value = int(text) if text.isdecimal() else 0
    if value < 1:
        raise ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return value


def duration_s(text: str) -> float:
    """Returns a number of seconds."""
    value = _number(text)
    if not 0 <= value < float("inf"):
        raise ArgumentTypeError(f"{text!r} is not a number of seconds")
    return value


def factor(text: str) -> float:
    """Returns a number of at least 1."""
    value = _number(text)
    if not 1 <= value < float("inf"):
        raise ArgumentTypeError(f"{text!r} is not a number of at least 1")
    return value


def fraction(text: str) -> float:
    """Returns a number of more than 0 and at most 1."""
    value = _number(text)
    if not 0 < value <= 1:
        raise ArgumentTypeError(f"{text!r} is not more than 0 and at most 1")
    return value


def _number(text: str) -> float:
    """Parses a number; returns -1 for other text, which no option accepts."""
    try:
        return float(text)
    except ValueError:
        return -1.0
