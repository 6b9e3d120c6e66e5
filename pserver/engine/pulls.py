"""Parameters go out: the newest values, those of a kept snapshot, and rows of tables."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from pserver.core.assembly import check_values
from pserver.core.requests import LookedUp, PullRequest, PushRequest, RowsRequest, Values
from pserver.engine.gate import Gate
from pserver.engine.held_snapshots import SnapshotShelf
from pserver.engine.parameters import Parameters
from pserver.engine.pushes import Pushes
from pserver.engine.row_reads import RowReads
from psrpc.core.encoding import Encoding
from psrpc.core.errors import InvalidArgument
from psrpc.core.plan import Plan
from psrpc.core.tables import Ids


class Pulls:
    """Not thread-safe: the shard's engine holds its lock, but for what checks a request."""

    def __init__(
        self, plan: Plan, gate: Gate, held: Parameters, shelf: SnapshotShelf, pushes: Pushes
    ) -> None:
        self._gate = gate
        self._held = held
        self._shelf = shelf
        self._pushes = pushes
        self._reads = RowReads(plan, held)

    def check(
        self, request: PullRequest, into: tuple[npt.NDArray[np.float32], ...] | None
    ) -> RowsRequest | None:
        """The rows that ``request`` asks for, ``into`` these arrays; None if it asks for none.

        Raises:
            InvalidArgument: an encoding that values cannot have, or see :meth:`check_rows`.
        """
        check_values(request.encoding)
        if not request.rows and not request.rows_only:
            return None
        # Of another plan's tables nothing can be said.
        self._gate.admit_worker(request)
        return self.check_rows(RowsRequest(request.rows, into, request.rows_only))

    def check_rows(self, rows: RowsRequest) -> RowsRequest:
        """See :meth:`pserver.engine.row_reads.RowReads.checked`."""
        return self._reads.checked(rows)

    def of_snapshot(self, name: str, encoding: Encoding, rows: RowsRequest | None) -> Values:
        """The values of a kept snapshot.

        Raises:
            RoundPassed: it is not kept, any more.
            InvalidArgument: snapshots are kept plain.
        """
        if encoding != "plain":
            raise InvalidArgument(
                f"snapshot {name!r} was asked for as {encoding}; snapshots are kept plain"
            )
        kept = self._shelf.get(name)
        return kept.values if rows is None else self._reads.of_kept(rows, kept)

    def newest(
        self, request: PushRequest | PullRequest, encoding: Encoding, rows: RowsRequest | None
    ) -> Values:
        """The values of this moment, which the worker computes from now on."""
        if rows is not None:
            return self._reads.newest(rows, encoding)
        values = self._held.values(encoding)
        self._pushes.pulled(request.worker, values)
        return values

    def look_up(self, table: str, ids: Ids) -> LookedUp:
        """See :meth:`pserver.engine.row_reads.RowReads.look_up`. Raises NotReady before the
        beginning."""
        self._gate.need_sound()
        self._gate.need_values()
        return self._reads.look_up(table, ids)
