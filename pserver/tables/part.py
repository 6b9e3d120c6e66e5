"""Rows of a table with their optimizer slots and counts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from psrpc.core.errors import CheckpointError
from psrpc.core.tables import Ids

Floats = npt.NDArray[np.float32]
Counts = npt.NDArray[np.uint32]


@dataclass(frozen=True, eq=False)
class TablePart:
    """Rows of one table, in its own arrays.

    Attributes:
        ids: int64 ``[n]``, distinct, in any order.
        values: float32 ``[n, width]``.
        slots: optimizer slot -> float32 ``[n, width]``, or ``[n, 1]`` for one element a row.
        counts: uint32 ``[n]``, applied pushes that named the row's id, including those before its
            admission.
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
        counts: uint32 ``[n]``, applied pushes that named the id.
        touched: uint32 ``[n]``, the version that named the id last.
    """

    ids: Ids
    counts: Counts
    touched: Counts


def check_part(
    table: str, part: TablePart, widths: Mapping[str, int], vocabulary: int | None
) -> None:
    """Checks that the ids of ``part`` are below ``vocabulary``, if it is not None, and that its
    ``values`` and optimizer slots are float32 of these ``widths``.

    Raises:
        CheckpointError: names the table, the expected and the actual values.
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
