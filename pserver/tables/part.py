"""Some rows of a table, with all that belongs to them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from psrpc.tables import Ids

Floats = npt.NDArray[np.float32]
Counts = npt.NDArray[np.uint32]


@dataclass(frozen=True, eq=False)
class TablePart:
    """Rows of one table, in arrays of its own.

    Attributes:
        ids: int64 ``[n]``, distinct, in any order.
        values: float32 ``[n, width]``.
        slots: optimizer slot -> float32 ``[n, width]``, or ``[n, 1]`` where a row has one.
        counts: uint32 ``[n]``, applied pushes that named the row's id, those before it was admitted
            among them.
        touched: uint32 ``[n]``, the version that touched the row last.
    """

    ids: Ids
    values: Floats = field(repr=False)
    slots: Mapping[str, Floats] = field(repr=False)
    counts: Counts = field(repr=False)
    touched: Counts = field(repr=False)

    def __len__(self) -> int:
        return len(self.ids)
