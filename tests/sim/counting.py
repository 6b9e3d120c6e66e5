"""An update engine and tables that count batches whatever they weigh."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from pserver.tables.tables import Tables, TablesUpdate
from pserver.updates.numpy_engine import NumpyEngine
from psrpc.core.plan import Plan
from psrpc.core.tables import Ids, Rows
from tests.sim.table_witness import COLUMNS, RARE, SEEN
from tests.sim.witness import ARENA

NDArray = npt.NDArray[Any]


class CountingEngine(NumpyEngine):
    """The real one; but whatever is not zero of the witness adds 1 to its entry, whatever its
    weight in its round and the rate that it is applied at. So an entry still shows how many
    updates a record was in."""

    def __init__(self, optimizer: Mapping[str, Any], plan: Plan, shard: int, rows: int) -> None:
        """The witness is the first ``rows`` entries of the shard's part."""
        super().__init__(optimizer, plan, shard)
        self._rows = rows

    def apply(self, gradients: Mapping[str, NDArray], rate_scale: float = 1.0) -> None:
        """See :class:`pserver.updates.engine.UpdateEngine`."""
        if gradients:
            witness = gradients[ARENA][: self._rows]
            np.copyto(witness, np.float32(-1.0 / rate_scale), where=witness != 0)
        super().apply(gradients, rate_scale)


class CountingTables(Tables):
    """The real ones; but an update adds to a row of ``seen`` how many records it stands for, and 1
    to that of ``rare``, whatever weights and rate it comes with."""

    def __init__(self, plan: Plan, shard: int, own: Ids) -> None:
        """``own`` are the ids of ``seen`` that stand for one record."""
        super().__init__(plan, shard)
        self._own = np.sort(own)

    def prepare(self, rows: Mapping[int, Rows]) -> TablesUpdate:
        """See :class:`pserver.tables.tables.Tables`."""
        counted = dict(rows)
        if SEEN in rows:
            ids, values = rows[SEEN].ids, rows[SEEN].values
            one = np.abs(values[np.isin(ids, self._own), 0]).max()
            counted[SEEN] = Rows(ids, np.rint(values[:, :1] / one) * COLUMNS)
        if RARE in rows:
            ids = rows[RARE].ids
            counted[RARE] = Rows(ids, np.full((len(ids), 1), -1.0, np.float32))
        prepared = super().prepare(counted)
        scaled = [rows for table, rows in counted.items() if table in (SEEN, RARE)]
        return _Unscaled(prepared, scaled)


class _Unscaled(TablesUpdate):
    """An update of which some ``rows`` are applied as they are, whatever the rate."""

    def __init__(self, prepared: TablesUpdate, rows: Sequence[Rows]) -> None:
        super().__init__(prepared.parts)
        self._rows = rows

    def apply(self, rate_scale: float, iterations: int, version: int) -> None:
        for rows in self._rows:
            np.divide(rows.values, np.float32(rate_scale), out=rows.values)
        super().apply(rate_scale, iterations, version)
