"""Takes optimizer steps on touched rows of a table."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from pserver.tables.hash_index import Slots
from pserver.tables.memory import scatter
from pserver.tables.part import Floats
from pserver.tables.row_store import RowStore
from pserver.tables.rules import PER_ROW, make_row_rule
from pserver.updates.schedules import make_schedule
from psrpc.core.errors import InvalidJob
from psrpc.core.plan import aligned_empty
from psrpc.core.tables import TableSpec
from psrpc.ops.lanes import BLOCK, in_lanes


class Scratch:
    """Temporary arrays of an update. All tables of a shard share them, since tables are updated one
    after the other. They grow to the size that the largest update needs."""

    def __init__(self) -> None:
        self._arrays: dict[tuple[int, int], Floats] = {}

    def rows(self, lane: int, number: int, n: int, width: int) -> Floats:
        """Returns array ``number`` of ``lane``, ``[n, width]``, uninitialized. Lanes (threads of
        one update) may call this at the same time."""
        array = self._arrays.get((lane, number))
        if array is None or array.size < n * width:
            array = self._arrays[lane, number] = aligned_empty(n * width, "float32")
        return array[: n * width].reshape(n, width)


class RowUpdate:
    """Applies a table's optimizer to the touched rows only. Not thread-safe.

    Each row is updated by the same sequence of operations as elements of an arena, independent of
    its place and of the other rows in the update.

    Attributes:
        slots: optimizer slot -> initial value.
        slot_widths: optimizer slot -> elements of a row.

    Raises:
        InvalidJob: names the table and the part of its optimizer that rows do not support.
    """

    def __init__(self, spec: TableSpec, scratch: Scratch) -> None:
        self._rule = make_row_rule(spec)
        config = spec.optimizer["config"]
        try:
            self._rate = make_schedule(config["learning_rate"])
        except InvalidJob as error:
            raise InvalidJob(f"table {spec.name!r}: {error}") from None
        self._clip = config.get("clipvalue")
        self.slots = dict(self._rule.slots)
        self.slot_widths = {name: 1 if name in PER_ROW else spec.width for name in self.slots}
        self._width = spec.width
        self._scratch = scratch

    def apply(
        self,
        store: RowStore,
        at: Slots,
        gradients: Floats,
        picked: npt.NDArray[np.int64] | None,
        rate_scale: float,
        iterations: int,
    ) -> None:
        """Updates the rows in the slots ``at``, distinct, ``[m]``, with ``gradients[picked]``,
        ``[m, width]``; with all of ``gradients`` if ``picked`` is None."""
        rate = np.float32(float(self._rate(iterations)) * rate_scale)
        factors = self._rule.factors(rate, iterations, "float32")
        values = store.values.rows()
        slots = [column.rows() for column in store.slots.values()]
        step = max(1, BLOCK // self._width)

        def update(lane: int, part: slice) -> None:
            # No warnings: a diverging run overflows here, and its loss already shows that.
            with np.errstate(all="ignore"):
                for start in range(part.start, part.stop, step):
                    block = slice(start, min(start + step, part.stop))
                    if picked is None:
                        own = gradients[block]
                    else:
                        own = self._scratch.rows(lane, 3, block.stop - start, self._width)
                        np.take(gradients, picked[block], axis=0, out=own, mode="clip")
                    self._update(lane, values, slots, at[block], own, factors)

        in_lanes(len(at), 4 * self._width, update)

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
        rows, first, second, clipped = (
            self._scratch.rows(lane, number, n, self._width) for number in range(4)
        )
        if self._clip:
            limit = np.float32(self._clip)
            gradients = np.clip(gradients, -limit, limit, out=clipped)
        np.take(values, at, axis=0, out=rows, mode="clip")
        own = [
            self._scratch.rows(lane, 4 + number, n, column.shape[1])
            for number, column in enumerate(slots)
        ]
        for column, scratch in zip(slots, own, strict=True):
            np.take(column, at, axis=0, out=scratch, mode="clip")
        self._rule.update(rows, gradients, own, factors, (first, second))
        scatter(values, at, rows)
        for column, scratch in zip(slots, own, strict=True):
            scatter(column, at, scratch)
