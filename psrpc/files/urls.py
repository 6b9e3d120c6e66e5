"""Whether a name is a path of this machine or a URL."""

from __future__ import annotations

import re
from pathlib import Path

from psrpc.core.errors import InvalidData

# Several with :: between them are fsspec's, as in simplecache::s3://bucket/key.
_URL = re.compile(r"(?:[A-Za-z][\w+.-]*::)*[A-Za-z][\w+.-]*://")
_LOST_SLASH = re.compile(r"[A-Za-z][\w+.-]+:/[^/]")


def is_url(name: object) -> bool:
    """Whether it names something by a URL, ``file://`` among them."""
    return isinstance(name, str) and _URL.match(name) is not None


def location(name: str | Path) -> Path | str:
    """A path of this machine, or the URL as it is.

    Raises:
        InvalidData: it is a URL in a ``Path``, which has taken a slash away.
    """
    text = str(name)
    if isinstance(name, Path) and _LOST_SLASH.match(text):
        raise InvalidData(f"{text!r} is a URL in a Path, which takes a slash away; give a string")
    if text.startswith("file://"):
        return Path(text.removeprefix("file://"))
    return text if is_url(text) else Path(text)
