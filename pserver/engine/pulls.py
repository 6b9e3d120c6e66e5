"""Pushes and pulls without rounds: applies each gradient as it arrives, unless it is too stale, and
reads the newest values, kept snapshots and rows of tables."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from pserver.core.assembly import check_values
from pserver.core.counters import Counters
from pserver.core.requests import (
    LookedUp,
    PullRequest,
    PushRequest,
    PushResult,
    RowsRequest,
    Values,
)
from pserver.core.table_ids import check_tables, look_up_ids
from pserver.engine.buffers import Arrived
from pserver.engine.gate import Gate
from pserver.engine.held_snapshots import SnapshotShelf
from pserver.engine.parameters import Parameters
from psrpc.core.encoding import Encoding
from psrpc.core.errors import InvalidArgument
from psrpc.core.plan import Plan
from psrpc.core.policy import Policy
from psrpc.core.tables import Ids
from psrpc.ops.clock import Clock

MAX_VERSIONS = 32
"""Maximum number of versions kept, each a copy of the shard's parameters."""

MAX_WORKERS = 1024
"""Maximum number of workers whose last pull is remembered."""


class Pushes:
    """Makes one update per push. Not thread-safe: the engine holds the shard's lock."""

    def __init__(self, held: Parameters, counters: Counters, policy: Policy, clock: Clock) -> None:
        self._held = held
        self._counters = counters
        self._clock = clock
        self._pulled = Pulled()
        self._policy = policy

    def begin(self, policy: Policy) -> None:
        """Starts a generation under ``policy`` and forgets the workers' last pulls."""
        self._policy = policy
        self._pulled.clear()

    def known(self, request: PushRequest) -> PushResult | None:
        """Returns the result if there is nothing to apply or stage, because all batches of
        ``request`` were applied before, or some of a sum; None if none were."""
        applied, batches = self._held.applied, request.batches
        had = [batch for batch in batches if applied.contains(batch)]
        if not had:
            return None
        if len(had) < len(batches):
            return self._one_by_one()
        self._counters.already_applied += len(had)
        skipped, *others = map(applied.skipped, had)
        return PushResult(
            "already_applied",
            self._held.version,
            skipped=skipped,
            summed_skipped=tuple(others),
        )

    def _one_by_one(self) -> PushResult:
        return PushResult("one_by_one", self._held.version)

    def apply(self, request: PushRequest, arrived: Arrived | None, pulls: bool) -> PushResult:
        """Applies a gradient unless it is too stale, a sum in one update. If ``arrived`` is None,
        records that the gradient was not finite.

        Args:
            pulls: whether the worker pulls the newest parameters in the same exchange.

        Raises:
            InvalidArgument, ResourceExhausted: see :meth:`pserver.tables.tables.Tables.check`.
                Nothing has changed.
        """
        held, counters = self._held, self._counters
        if arrived is None:
            # Staleness does not matter here: the batch has no gradient, and all shards must record
            # that alike.
            held.applied.add(request.batch, skipped=True)
            counters.skipped += 1
            return PushResult("skipped", held.version, skipped=True)
        if request.summed and self._policy.delay_compensation is not None:
            # It depends on the square of each gradient.
            return self._one_by_one()
        staleness = held.version - request.base_version
        most = self._policy.max_staleness
        if most is not None and staleness > most:
            counters.too_stale += len(request.parts)
            return PushResult("too_stale", held.version, staleness)
        if arrived.rows:
            held.tables.check(arrived.rows)
        began = self._clock.now()
        if self._policy.delay_compensation is None:
            held.update(arrived.arrays, staleness, arrived.rows)
        else:
            self._compensate(request, arrived, staleness, pulls)
        took_s = self._clock.now() - began
        counters.apply_s += took_s
        for part in request.parts:
            held.applied.add(part.attempt.batch, totals=part.totals)
            counters.count_applied(request.worker, staleness)
        return PushResult("applied", held.version, staleness, int(took_s * 1e6))

    def _compensate(
        self, request: PushRequest, arrived: Arrived, staleness: int, pulls: bool
    ) -> None:
        pulled = self._pulled.of(request.base_version) if staleness else None
        if staleness and pulled is None:
            self._counters.uncompensated += 1
        gradients = self._held.compensated(arrived.arrays, pulled)
        del pulled
        if pulls:
            # The pull in this exchange replaces the worker's values anyway. Dropping them now saves
            # the copy that an update makes of values that are still held.
            self._pulled.forget(request.worker)
        self._held.update(gradients, staleness, arrived.rows)

    def pulled(self, worker: str, values: Values) -> None:
        """Records that ``worker`` computes from ``values`` from now on."""
        if self._policy.delay_compensation is not None:
            plain = values if values.encoding == "plain" else self._held.values()
            self._pulled.remember(worker, plain)

    def forget(self, worker: str) -> None:
        """Forgets the last pull of a revoked ``worker``."""
        self._pulled.forget(worker)


class Pulled:
    """The parameters that each worker pulled last. Workers that pulled the same version share one
    copy. Not thread-safe.

    While parameters are held, the next update must write to other memory; this is the cost of delay
    compensation.
    """

    def __init__(self) -> None:
        self._values: dict[int, Values] = {}
        self._versions: dict[str, int] = {}
        """By worker; the one that pulled last is at the end."""

    def __len__(self) -> int:
        """Number of held versions."""
        return len(self._values)

    def remember(self, worker: str, values: Values) -> None:
        """Records that ``worker`` computes from ``values``, whose encoding is plain."""
        self.forget(worker)
        if len(self._versions) >= MAX_WORKERS:
            self.forget(next(iter(self._versions)))
        self._versions[worker] = values.version
        self._values[values.version] = values
        if len(self._values) > MAX_VERSIONS:
            oldest = min(self._values)
            del self._values[oldest]
            self._versions = {w: v for w, v in self._versions.items() if v != oldest}

    def of(self, version: int) -> Values | None:
        """Returns the parameters of ``version``, if held."""
        return self._values.get(version)

    def forget(self, worker: str) -> None:
        """Drops the entry of ``worker``."""
        version = self._versions.pop(worker, None)
        if version is not None and version not in self._versions.values():
            del self._values[version]

    def clear(self) -> None:
        """Drops all entries."""
        self._values.clear()
        self._versions.clear()


class Pulls:
    """Serves pulls. Not thread-safe: the engine holds the shard's lock, except for :meth:`check`
    and :meth:`check_rows`."""

    def __init__(
        self, plan: Plan, gate: Gate, held: Parameters, shelf: SnapshotShelf, pushes: Pushes
    ) -> None:
        self._plan = plan
        self._gate = gate
        self._held = held
        self._shelf = shelf
        self._pushes = pushes

    def check(
        self, request: PullRequest, into: tuple[npt.NDArray[np.float32], ...] | None
    ) -> RowsRequest | None:
        """Returns the rows that ``request`` asks for, with the arrays to write them to (``into`` or
        new ones); None if it asks for no rows.

        Raises:
            InvalidArgument: values cannot have this encoding; or see :meth:`check_rows`.
        """
        check_values(request.encoding)
        if not request.rows and not request.rows_only:
            return None
        # Before the rows are checked: a request that follows another plan would name other tables.
        self._gate.admit_worker(request)
        return self.check_rows(RowsRequest(request.rows, into, request.rows_only))

    def check_rows(self, rows: RowsRequest) -> RowsRequest:
        """Returns ``rows`` with arrays to read into.

        Raises:
            InvalidArgument: an unknown table, or ids that do not ascend or belong to another shard.
        """
        check_tables(self._plan, rows.ids)
        self._held.tables.check_ids(rows.ids)
        if rows.into is not None:
            return rows
        made = (
            np.empty((len(ids), self._plan.tables[table].width), np.float32)
            for table, ids in rows.ids
        )
        return replace(rows, into=tuple(made))

    def of_snapshot(self, name: str, encoding: Encoding, rows: RowsRequest | None) -> Values:
        """Returns the values of a kept snapshot.

        Raises:
            RoundPassed: the snapshot is not kept, or no longer.
            InvalidArgument: ``encoding`` is not plain.
        """
        if encoding != "plain":
            raise InvalidArgument(
                f"snapshot {name!r} was asked for as {encoding}; snapshots are kept plain"
            )
        kept = self._shelf.get(name)
        if rows is None:
            return kept.values
        assert rows.into is not None
        if kept.tables is not None:
            kept.tables.read(rows.ids, rows.into)
        arrays = {} if rows.only else kept.values.arrays
        return replace(kept.values, arrays=arrays, rows=rows.into)

    def newest(
        self, request: PushRequest | PullRequest, encoding: Encoding, rows: RowsRequest | None
    ) -> Values:
        """Returns the present values. Also records that the worker computes from them, unless it
        asks for rows only."""
        if rows is not None and rows.only:
            return self._newest_rows(rows, encoding)
        values = self._held.values(encoding)
        self._pushes.pulled(request.worker, values)
        return values if rows is None else self._newest_rows(rows, encoding)

    def look_up(self, name: str, ids: Ids) -> LookedUp:
        """Returns the newest rows of a table.

        Raises:
            NotReady: there are no parameters.
            InvalidArgument: an unknown table, more rows than a message holds, or ids that do not
                ascend or belong to another shard.
        """
        self._gate.need_sound()
        self._gate.need_values()
        names = [table.name for table in self._plan.tables]
        if name not in names:
            raise InvalidArgument(
                f"there is no table {name!r}; the job's tables are: {', '.join(names) or 'none'}"
            )
        table = names.index(name)
        most = look_up_ids(self._plan.tables[table].width)
        if len(ids) > most:
            raise InvalidArgument(
                f"{len(ids)} ids of table {name!r} are looked up; expected at most {most}"
            )
        rows = self.check_rows(RowsRequest(((table, ids),), only=True))
        values = self._newest_rows(rows, "plain")
        present = self._held.tables[table].present(ids)
        return LookedUp(values.version, values.generation, values.rows[0], present)

    def _newest_rows(self, rows: RowsRequest, encoding: Encoding) -> Values:
        """Returns the present rows, with the values of the arenas unless ``rows.only``."""
        assert rows.into is not None
        held = self._held
        held.tables.read(rows.ids, rows.into)
        if rows.only:
            return Values(held.version, held.standing.generation, {}, encoding, rows.into)
        return replace(held.values(encoding), rows=rows.into)
