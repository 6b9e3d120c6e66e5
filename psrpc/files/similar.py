"""Names the entry of a directory that a mistyped path probably means."""

from __future__ import annotations

import os
from difflib import get_close_matches
from itertools import islice
from pathlib import Path

MOST = 4096
"""Entries that are compared: a directory of data may hold millions."""


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
