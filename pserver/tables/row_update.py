"""One optimizer step on some rows of a table."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from pserver.tables.hash_index import Slots
from pserver.tables.memory import scatter
from pserver.tables.part import Floats
from pserver.tables.row_store import RowStore
from pserver.tables.rules import PER_ROW, make_row_rule
from pserver.updates.schedules import make_schedule
from psrpc.errors import InvalidJob
from psrpc.lanes import LANES, in_lanes
from psrpc.plan import aligned_empty
from psrpc.tables import TableSpec

_BLOCK = 1 << 15
"""Elements worked on at a time: rows, gradients, slots and scratch of them stay in the second-level
cache between being gathered and scattered, so that each passes through memory once."""


class RowUpdate:
    """The optimizer of a table, the same as on arenas, on touched rows alone. Not thread-safe.

    The update of each row is the same sequence of operations wherever it lies and whatever rows
    are updated with it.

    Attributes:
        slots: optimizer slot -> what it starts from.
        slot_widths: optimizer slot -> elements of a row.

    Raises:
        InvalidJob: names the table and what its optimizer has that rows cannot have.
    """

    def __init__(self, spec: TableSpec) -> None:
        self._rule = make_row_rule(spec)
        config = spec.optimizer["config"]
        try:
            self._rate = make_schedule(config["learning_rate"])
        except InvalidJob as error:
            raise InvalidJob(f"table {spec.name!r}: {error}") from None
        self._clip = config.get("clipvalue")
        self.slots = dict(self._rule.slots)
        self.slot_widths = {name: 1 if name in PER_ROW else spec.width for name in self.slots}
        self._rows = max(1, _BLOCK // spec.width)
        self._row_nbytes = 4 * spec.width
        self._scratch = [[self._block(spec.width) for _ in range(4)] for _ in range(LANES)]
        self._slot_scratch = [
            [self._block(wide) for wide in self.slot_widths.values()] for _ in range(LANES)
        ]

    def apply(
        self,
        store: RowStore,
        at: Slots,
        gradients: Floats,
        picked: npt.NDArray[np.int64] | None,
        rate_scale: float,
        iterations: int,
    ) -> None:
        """Updates the rows in the slots ``at``, distinct, ``[m]``.

        Their gradients are ``gradients[picked]``, or all of ``gradients``, ``[m, width]``.
        """
        rate = self._rate(iterations) * np.float32(rate_scale)
        factors = self._rule.factors(rate, iterations, "float32")
        values = store.values.rows()
        slots = [column.rows() for column in store.slots.values()]

        def update(lane: int, part: slice) -> None:
            # A run that diverges says so by its loss, as on arenas.
            with np.errstate(all="ignore"):
                for start in range(part.start, part.stop, self._rows):
                    block = slice(start, min(start + self._rows, part.stop))
                    if picked is None:
                        own = gradients[block]
                    else:
                        own = self._scratch[lane][3][: block.stop - start]
                        np.take(gradients, picked[block], axis=0, out=own, mode="clip")
                    self._update(lane, values, slots, at[block], own, factors)

        in_lanes(len(at), self._row_nbytes, update)

    def _update(
        self,
        lane: int,
        values: Floats,
        slots: list[Floats],
        at: Slots,
        gradients: Floats,
        factors: object,
    ) -> None:
        n = len(at)
        rows, first, second, clipped = (scratch[:n] for scratch in self._scratch[lane])
        if self._clip:
            limit = np.float32(self._clip)
            gradients = np.clip(gradients, -limit, limit, out=clipped)
        np.take(values, at, axis=0, out=rows, mode="clip")
        own = [scratch[:n] for scratch in self._slot_scratch[lane]]
        for column, scratch in zip(slots, own, strict=True):
            np.take(column, at, axis=0, out=scratch, mode="clip")
        self._rule.update(rows, gradients, own, factors, (first, second))
        scatter(values, at, rows)
        for column, scratch in zip(slots, own, strict=True):
            scatter(column, at, scratch)

    def _block(self, width: int) -> Floats:
        return aligned_empty(self._rows * width, "float32").reshape(self._rows, width)
