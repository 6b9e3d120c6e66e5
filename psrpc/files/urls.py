"""Tells URLs from paths; imports no store."""

from __future__ import annotations

import re
from pathlib import Path

from psrpc.core.errors import InvalidData

# fsspec chains protocols with ::, as in simplecache::s3://bucket/key.
_URL = re.compile(r"(?:[A-Za-z][\w+.-]*::)*[A-Za-z][\w+.-]*://")

_LOST_SLASH = re.compile(r"[A-Za-z][\w+.-]+:/[^/]")


def is_url(name: object) -> bool:
    """Whether ``name`` is a URL, including ``file://``."""
    return isinstance(name, str) and _URL.match(name) is not None


def location(name: str | Path) -> Path | str:
    """Returns a local path as a ``Path``, and a URL unchanged.

    Raises:
        InvalidData: ``name`` is a URL in a ``Path``, which has removed a slash.
    """
    text = str(name)
    if isinstance(name, Path) and _LOST_SLASH.match(text):
        raise InvalidData(f"{text!r} is a URL in a Path, which takes a slash away; give a string")
    if text.startswith("file://"):
        return Path(text.removeprefix("file://"))
    return text if is_url(text) else Path(text)
