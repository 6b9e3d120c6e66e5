"""What peers tell about themselves in words: shown to people, so neither long nor obeyed."""

from __future__ import annotations

import unicodedata

NAME_CHARS = 255
"""Of a host or a device."""

WORDS_CHARS = 2000
"""Of what somebody waits for, or why something has failed."""


def told_lines(text: str, most: int) -> str:
    """:func:`told` of what was written for a terminal, where tabs are meant to be spaces."""
    return told(text.expandtabs(), most)


def told(text: str, most: int = WORDS_CHARS) -> str:
    """``text``, at most ``most`` characters of it, without those that a terminal obeys or that
    change the order of others; a line's end stays."""
    if len(text) > most:
        text = text[: most - 1] + "…"
    if text.isprintable():
        return text
    return "".join("\N{REPLACEMENT CHARACTER}" if _is_obeyed(c) else c for c in text)


def _is_obeyed(character: str) -> bool:
    # Categories C*: control, format, surrogate, private use, not assigned.
    return character != "\n" and unicodedata.category(character).startswith("C")
