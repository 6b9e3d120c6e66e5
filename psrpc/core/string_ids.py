"""The ids that embedding tables have for strings, without TensorFlow.

A string's id is FarmHash's Fingerprint64 (Pike 2014, https://github.com/google/farmhash), which
never changes, modulo the vocabulary. ``worker.string_ids`` is the same in TensorFlow.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from farmhash import Fingerprint64

from psrpc.core.tables import Ids

STRINGS = (1 << 63) - 25
"""Strings of a table without a vocabulary come to ids below this, a prime. Load-bearing."""


def hashed(strings: Iterable[str | bytes], vocabulary: int | None = None) -> Ids:
    """The id of each string, int64 ``[n]``, in a table of ``vocabulary`` ids, or of any. A ``str``
    counts as its UTF-8, as in TensorFlow."""
    below = STRINGS if vocabulary is None else vocabulary
    return np.array([Fingerprint64(_bytes(one)) % below for one in strings], np.int64)


def _bytes(string: str | bytes) -> bytes:
    # What is not UTF-8 on a command line reaches Python as surrogates.
    return string if isinstance(string, bytes) else string.encode(errors="surrogateescape")
