"""Formats and sanitizes text for messages, and hides secrets in it. Pure."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable
from typing import Any

HIDDEN = "(not shown)"
"""Replaces the whole value of a secret."""

_STARS = "***"
_SECRET = r"pass|pwd|auth|secret|token|key|credential|signature|\bsig"
_NAMES_A_PLACE = re.compile(r"_(file|dir|path)$", re.IGNORECASE)
_USER = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*://)[^\s/?#'\"]*@")
"""``user:password@`` before a host. Matches up to the last ``@``, since a password may contain
one."""

NAME_CHARS = 255
"""Maximum number of characters in the name of a host or a device."""

WORDS_CHARS = 2000
"""Maximum number of characters in a reason to wait or to fail."""

NAMES_LISTED = 8
"""Maximum number of names in a reason to wait. Without a limit, a thousand workers could each get a
text with a thousand names."""


def counted(number: int, noun: str, plural: str = "") -> str:
    """Formats ``"1 day"`` or ``"2 days"``; ``plural`` is for irregular nouns."""
    return f"{number} {noun if number == 1 else plural or noun + 's'}"


def first_names(names: Iterable[str]) -> str:
    """Lists the first :data:`NAMES_LISTED` distinct names, sorted, and says if there are others.
    Does not read ``names`` further than necessary."""
    found: set[str] = set()
    for name in names:
        if name not in found and len(found) == NAMES_LISTED:
            return f"{', '.join(sorted(found))} and others"
        found.add(name)
    return ", ".join(sorted(found))


def sanitize_lines(text: str, most: int) -> str:
    """Sanitizes text written for a terminal: :func:`sanitize`, with tabs expanded to spaces."""
    return sanitize(text.expandtabs(), most)


def sanitize(text: str, most: int = WORDS_CHARS) -> str:
    """Sanitizes peer-supplied text for display: cuts it to ``most`` characters, and replaces
    characters that control a terminal or reorder others. Keeps line ends."""
    if len(text) > most:
        text = text[: most - 1] + "…"
    if text.isprintable():
        return text
    return "".join("\N{REPLACEMENT CHARACTER}" if _is_obeyed(c) else c for c in text)


def _is_obeyed(character: str) -> bool:
    # Categories C*: control, format, surrogate, private use, unassigned.
    return character != "\n" and unicodedata.category(character).startswith("C")


_IS_SECRET = re.compile(rf"(?:{_SECRET})", re.IGNORECASE)
_PARAMETER = re.compile(
    rf"(^|[?&;#\s'\"])([^=&;?#\s'\"]*(?:{_SECRET})[^=&;?#\s'\"]*)=([^&;#\s'\"]+)", re.IGNORECASE
)
"""``name=value`` in a query or a settings override."""


def is_secret_name(name: str) -> bool:
    """Whether ``name`` is the name of a secret, such as ``S3_SECRET_KEY`` or ``api_token``. Not if
    it ends in ``_FILE``, ``_DIR`` or ``_PATH``: such a value only says where a secret is."""
    return bool(_IS_SECRET.search(name)) and not _NAMES_A_PLACE.search(name)


def without_secrets(text: str) -> str:
    """Hides user and password in URLs, and values of parameters and overrides that have the name of
    a secret."""

    def starred(match: re.Match[str]) -> str:
        return f"{match[1]}{match[2]}={_STARS}" if is_secret_name(match[2]) else match[0]

    return _PARAMETER.sub(starred, _USER.sub(rf"\1{_STARS}@", text))


def document_without_secrets(value: Any) -> Any:
    """Hides secrets in all texts of a JSON value, and whole values whose key is the name of a
    secret."""
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
