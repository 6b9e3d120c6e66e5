"""Embedding tables: their description in the plan, and the choice of a shard for each row.

See docs/design/0010-embedding-tables.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from farmhash import Fingerprint64

from psrpc.core.document import anything, choice, flag, mapped, maybe, record, text, whole

STRINGS = (1 << 63) - 25
"""Upper bound, exclusive, of the ids of strings in a table without a vocabulary; a prime.
Load-bearing."""

Ids = npt.NDArray[np.int64]
Hashes = npt.NDArray[np.uint64]

Eviction = Literal["age", "frequency"]
IdKind = Literal["numbers", "strings", "both"]

FULL_EVERY = 16
"""Default for how often all rows of a table are written: in one of this many checkpoints. The
others have only changed rows."""

MAX_IDS = 1 << 19
"""Maximum number of ids per message, over all tables: 4 MiB of a message's 8 MiB."""

OPTIMIZERS = ("SGD", "Adagrad", "RowwiseAdagrad", "Adam", "Ftrl")
"""Optimizer classes for rows: classes of Keras, and row-wise Adagrad, which Keras does not have."""

INITIALIZERS = ("uniform", "normal", "constant")
MAX_WIDTH = 1 << 24
"""Maximum number of elements in a row: 64 MiB, more than any message."""

_MADE_BY = {"class_name": text, "config": mapped(anything)}
_CHECK = record(
    {
        "name": text,
        "width": whole(1, MAX_WIDTH),
        "vocabulary": maybe(whole(1, 1 << 63)),
        "initializer": record(_MADE_BY | {"class_name": choice(*INITIALIZERS)}, more=True),
        "optimizer": record(_MADE_BY | {"class_name": choice(*OPTIMIZERS)}, more=True),
    },
    {
        "seed": whole(0, 1 << 64),
        "min_count": whole(1),
        "max_rows": maybe(whole(1)),
        "eviction": choice("age", "frequency", None),
        "keep_evicted": flag,
        "id_kind": choice("numbers", "strings", "both"),
    },
)

# The finalizer of SplitMix64 (Steele, Lea and Flood 2014, "Fast Splittable Pseudorandom Number
# Generators", figure 16: mix64 variant 13): a bijection in which every output bit depends on every
# input bit. Load-bearing: it decides which shard's file of a checkpoint has a row.
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_FIRST = np.uint64(0xBF58476D1CE4E5B9)
_SECOND = np.uint64(0x94D049BB133111EB)
_30, _27, _31, _32 = (np.uint64(n) for n in (30, 27, 31, 32))


@dataclass(frozen=True)
class TableSpec:
    """Describes one table. :func:`psrpc.core.placement.make_plan` checks it.

    Attributes:
        name: unique among the tables of a job.
        width: number of elements of a row, float32.
        vocabulary: ids are ``0 .. vocabulary - 1``; None allows any int64.
        initializer: ``{"class_name": one of INITIALIZERS, "config": {...}}``; uniform has ``low``
            and ``high``, normal ``mean`` and ``stddev``, constant ``value``.
        optimizer: ``{"class_name": one of OPTIMIZERS, "config": {...}}``, serialized as Keras does.
        seed: of the initial values.
        min_count: number of applied pushes that must name an id before it gets a row.
        max_rows: maximum number of rows over all shards, divided evenly; None for no limit.
        eviction: how to select the rows that make room for others; with None a full table is an
            error.
        keep_evicted: whether checkpoints keep evicted rows, for export.
        id_kind: the input of the table's layers: numbers, strings (which :func:`hashed` maps to
            ids), or both.
    """

    name: str
    width: int
    vocabulary: int | None
    initializer: Mapping[str, Any]
    optimizer: Mapping[str, Any]
    seed: int = 0
    min_count: int = 1
    max_rows: int | None = None
    eviction: Eviction | None = None
    keep_evicted: bool = False
    id_kind: IdKind = "numbers"

    def to_json(self) -> dict[str, Any]:
        """Converts to plain JSON types. Omits ``keep_evicted`` if it is false and ``id_kind`` if it
        is numbers, because older plans do not have these fields and the hash must stay the same."""
        document = dict(vars(self))
        if not self.keep_evicted:
            del document["keep_evicted"]
        if self.id_kind == "numbers":
            del document["id_kind"]
        return document

    @staticmethod
    def from_json(document: Mapping[str, Any]) -> TableSpec:
        """The inverse of :meth:`to_json`. Raises ValueError, which names the field."""
        return TableSpec(**_CHECK(document, "the table"))


@dataclass(frozen=True, eq=False)
class Rows:
    """Rows of one table: ``ids`` int64 ``[n]``, strictly ascending, and ``values`` float32 ``[n,
    width]``, the contents or gradients of the rows. ``finite`` says that all values are known to be
    finite; False means that this is unknown."""

    ids: Ids
    values: npt.NDArray[np.float32] = field(repr=False)
    finite: bool = False


def weighted_sum(parts: Sequence[tuple[np.float32, Rows]]) -> Rows:
    """Returns Σ w_k g_k for each id, summed in the given order; a part that lacks an id adds
    nothing to it.

    Args:
        parts: weights, and gradients of rows of one table; at least one pair.

    Returns:
        The ids of all parts, each once and ascending, and the sums, in new arrays.
    """
    weight, first = parts[0]
    if all(np.array_equal(first.ids, rows.ids) for _, rows in parts[1:]):
        total = first.values * weight
        for weight, rows in parts[1:]:
            total += rows.values * weight
        return Rows(first.ids.copy(), total)
    ids = np.unique(np.concatenate([rows.ids for _, rows in parts]))
    total = np.zeros((len(ids), first.values.shape[1]), np.float32)
    for weight, rows in parts:
        at = ids.searchsorted(rows.ids)
        total[at] += rows.values * weight
    return Rows(ids, total)


def mix(ids: npt.NDArray[Any]) -> Hashes:
    """Hashes each element of an int64 or uint64 array to 64 bits; returns an array of the same
    shape."""
    h = ids.astype(np.uint64) + _GOLDEN
    h ^= h >> _30
    h *= _FIRST
    h ^= h >> _27
    h *= _SECOND
    h ^= h >> _31
    return h


def shard_of(ids: Ids, shards: int) -> npt.NDArray[np.uint64]:
    """Returns the shard of each id, in the shape of ``ids``: the upper half of the id's hash modulo
    ``shards``."""
    return (mix(ids) >> _32) % np.uint64(shards)


def hashed(strings: Iterable[str | bytes], vocabulary: int | None = None) -> Ids:
    """Maps strings to ids, int64 ``[n]``, below ``vocabulary``, or below :data:`STRINGS` if that is
    None. Encodes ``str`` as UTF-8, like TensorFlow."""
    below = STRINGS if vocabulary is None else vocabulary
    return np.array([Fingerprint64(_bytes(one)) % below for one in strings], np.int64)


def _bytes(string: str | bytes) -> bytes:
    # Invalid UTF-8 on a command line reaches Python as surrogates.
    return string if isinstance(string, bytes) else string.encode(errors="surrogateescape")
