"""Rows of a table with their optimizer slots and counts, and the checks of ids and gradients."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from psrpc.core.errors import CheckpointError, InvalidArgument
from psrpc.core.tables import Ids, Rows, TableSpec, shard_of

Floats = npt.NDArray[np.float32]
Counts = npt.NDArray[np.uint32]


@dataclass(frozen=True, eq=False)
class TablePart:
    """Rows of one table, in its own arrays.

    Attributes:
        ids: int64 ``[n]``, distinct, in any order.
        values: float32 ``[n, width]``.
        slots: optimizer slot -> float32 ``[n, width]``, or ``[n, 1]`` if it has one element per
            row.
        counts: uint32 ``[n]``, the number of applied pushes that named the row's id, including
            those before its admission.
        touched: uint32 ``[n]``, the version that touched the row last.
    """

    ids: Ids
    values: Floats = field(repr=False)
    slots: Mapping[str, Floats] = field(repr=False)
    counts: Counts = field(repr=False)
    touched: Counts = field(repr=False)

    def __len__(self) -> int:
        return len(self.ids)


class Counted(NamedTuple):
    """Ids that were counted and have no row yet, in their own arrays.

    Attributes:
        ids: int64 ``[n]``, distinct, in any order.
        counts: uint32 ``[n]``, the number of applied pushes that named the id.
        touched: uint32 ``[n]``, the version that named the id last.
    """

    ids: Ids
    counts: Counts
    touched: Counts


def check_part(
    table: str, part: TablePart, widths: Mapping[str, int], vocabulary: int | None
) -> None:
    """Checks that the ids of ``part`` are from 0 to below ``vocabulary``, if that is not None, and
    that its ``values`` and optimizer slots are float32 of the given ``widths``.

    Raises:
        CheckpointError: they are not; names the table, the expected and the actual values.
    """
    n, ids = len(part.ids), part.ids
    if vocabulary is not None and n and not (ids.min() >= 0 and ids.max() < vocabulary):
        raise CheckpointError(
            f"table {table!r} has ids {ids.min()} to {ids.max()} in the checkpoint; expected 0 to "
            f"{vocabulary - 1}: its vocabulary is another"
        )
    have = {"values": part.values, **part.slots}
    for what in widths.keys() | have.keys():
        expected = f"float32[{n}, {widths[what]}]" if what in widths else "none"
        found = f"{have[what].dtype}{list(have[what].shape)}" if what in have else "none"
        if found != expected:
            raise CheckpointError(
                f"table {table!r} has {what} {found} in the checkpoint; expected {expected}: "
                "its width or optimizer is another"
            )


_BLOCK = 1 << 17
"""Number of elements checked at a time, so that intermediate arrays stay in the cache."""


def check_ids(spec: TableSpec, shard: int, shards: int, ids: Ids) -> None:
    """Checks that ``ids`` are int64 ``[n]``, strictly ascending, of this shard and the vocabulary.

    Raises:
        InvalidArgument: names the table, the id and the expected values.
    """
    if ids.dtype != np.int64 or ids.ndim != 1:
        raise InvalidArgument(
            f"table {spec.name!r} got ids {ids.dtype}{list(ids.shape)}; expected int64[n]"
        )
    if not len(ids):
        return
    falling = ids[1:] <= ids[:-1]
    if falling.any():
        at = int(falling.argmax())
        raise InvalidArgument(
            f"table {spec.name!r}: id {ids[at + 1]} follows id {ids[at]}; ids have to ascend, each "
            "once"
        )
    if spec.vocabulary is not None and not (ids[0] >= 0 and ids[-1] < spec.vocabulary):
        wrong = ids[0] if ids[0] < 0 else ids[ids.searchsorted(spec.vocabulary)]
        raise InvalidArgument(
            f"table {spec.name!r}: id {wrong} is outside the vocabulary, 0 to {spec.vocabulary - 1}"
        )
    if shards > 1:
        owners = shard_of(ids, shards)
        foreign = owners != shard
        if foreign.any():
            at = int(foreign.argmax())
            raise InvalidArgument(
                f"table {spec.name!r}: id {ids[at]} is of shard {owners[at]}; this is shard {shard}"
            )


def check_gradients(spec: TableSpec, rows: Rows) -> None:
    """Checks that the gradients are float32 ``[n, width]`` and finite.

    Raises:
        InvalidArgument: names the table and the id of a value that is not finite.
    """
    values = rows.values
    if values.dtype != np.float32 or values.shape != (len(rows.ids), spec.width):
        raise InvalidArgument(
            f"table {spec.name!r} got gradients {values.dtype}{list(values.shape)}; expected "
            f"float32[{len(rows.ids)}, {spec.width}]"
        )
    if rows.finite:
        return
    step = max(1, _BLOCK // spec.width)
    for start in range(0, len(values), step):
        finite = np.isfinite(values[start : start + step])
        if not finite.all():
            row, column = np.argwhere(~finite)[0]
            raise InvalidArgument(
                f"table {spec.name!r}: the gradient of id {rows.ids[start + row]} is "
                f"{values[start + row, column]} in column {column}; nothing was applied"
            )
