"""Counts and their nouns, as messages say them. Pure."""

from __future__ import annotations

import re
import unicodedata
from typing import Any

HIDDEN = "(not shown)"
"""In place of the whole value."""

_STARS = "***"
_SECRET = r"pass|pwd|auth|secret|token|key|credential|signature|\bsig"
_NAMES_A_PLACE = re.compile(r"_(file|dir|path)$", re.IGNORECASE)
_USER = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*://)[^\s/?#'\"]*@")
"""``user:password@`` before a host, up to the last ``@``: a password may have one."""


NAME_CHARS = 255
"""Of a host or a device."""

WORDS_CHARS = 2000
"""Of what somebody waits for, or why something has failed."""


def counted(number: int, noun: str, plural: str = "") -> str:
    """``"1 day"`` or ``"2 days"``; ``plural`` of a noun that takes more than an s."""
    return f"{number} {noun if number == 1 else plural or noun + 's'}"


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


_IS_SECRET = re.compile(rf"(?:{_SECRET})", re.IGNORECASE)


_PARAMETER = re.compile(
    rf"(^|[?&;#\s'\"])([^=&;?#\s'\"]*(?:{_SECRET})[^=&;?#\s'\"]*)=([^&;#\s'\"]+)", re.IGNORECASE
)
"""``name=value`` of a query, or of an override of a setting."""


def is_secret_name(name: str) -> bool:
    """Whether what is called so (``S3_SECRET_KEY``, ``api_token``) is nobody's business; what ends
    in ``_FILE``, ``_DIR`` or ``_PATH`` says where a secret is, and is none."""
    return bool(_IS_SECRET.search(name)) and not _NAMES_A_PLACE.search(name)


def without_secrets(text: str) -> str:
    """``text`` without user and password in URLs, and without the values of what bears the name of
    a secret: parameters of a URL, overrides."""

    def starred(found: re.Match[str]) -> str:
        if not is_secret_name(found[2]):
            return found[0]
        return f"{found[1]}{found[2]}={_STARS}"

    return _PARAMETER.sub(starred, _USER.sub(rf"\1{_STARS}@", text))


def document_without_secrets(value: Any) -> Any:
    """The same of all texts in plain JSON types, and of what stands under the name of a secret."""
    if isinstance(value, str):
        return without_secrets(value)
    if isinstance(value, list):
        return [document_without_secrets(one) for one in value]
    if isinstance(value, dict):
        return {
            key: HIDDEN
            if isinstance(one, str) and is_secret_name(key)
            else document_without_secrets(one)
            for key, one in value.items()
        }
    return value
