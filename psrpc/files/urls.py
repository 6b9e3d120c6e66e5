"""Tells apart paths and URLs that users write. Imports no packages for stores."""

from __future__ import annotations

import os
import re
from difflib import get_close_matches
from itertools import islice
from pathlib import Path

from psrpc.core.errors import InvalidData

# fsspec chains protocols with ::, as in simplecache::s3://bucket/key.
_URL = re.compile(r"(?:[A-Za-z][\w+.-]*::)*[A-Za-z][\w+.-]*://")

_LOST_SLASH = re.compile(r"[A-Za-z][\w+.-]+:/[^/]")


def is_url(name: object) -> bool:
    """Whether ``name`` is a URL, including ``file://``."""
    return isinstance(name, str) and _URL.match(name) is not None


def location(name: str | Path) -> Path | str:
    """Returns local paths and ``file://`` URLs as a ``Path``, other URLs unchanged.

    Raises:
        InvalidData: ``name`` is a URL in a ``Path``, which turns ``//`` into ``/``.
    """
    text = str(name)
    if isinstance(name, Path) and _LOST_SLASH.match(text):
        raise InvalidData(f"{text!r} is a URL in a Path, which takes a slash away; give a string")
    if text.startswith("file://"):
        return Path(text.removeprefix("file://"))
    return text if is_url(text) else Path(text)


MOST = 4096
"""Maximum number of entries that are compared, since a directory of data may have millions."""


def similar_path(path: Path) -> str:
    """Returns ``"; did you mean PATH?"`` for a missing ``path``, with the most similar entry of its
    directory; empty if there is none."""
    try:
        with os.scandir(path.parent) as entries:
            names = sorted(entry.name for entry in islice(entries, MOST))
    except OSError:
        return ""
    close = get_close_matches(path.name, names, n=1)
    return f"; did you mean {path.with_name(close[0])}?" if close and path.name else ""
