"""Counts and their nouns, as messages say them. Pure."""

from __future__ import annotations


def counted(number: int, noun: str, plural: str = "") -> str:
    """``"1 day"`` or ``"2 days"``; ``plural`` of a noun that takes more than an s."""
    return f"{number} {noun if number == 1 else plural or noun + 's'}"
