"""The state of a shard: parameters, optimizer state, version and applied-set."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any, NamedTuple

import numpy.typing as npt

from pserver.core.applied import AppliedSet
from pserver.core.counters import Rates
from pserver.core.requests import RestoredState, Snapshot, Values
from pserver.engine.compensation import Compensation
from pserver.tables.tables import Tables
from pserver.updates.engine import ITERATIONS, Slots, UpdateEngine, scalar
from psrpc.core.encoding import Encoding
from psrpc.core.plan import MEAN_SQUARE, Plan
from psrpc.core.policy import Policy
from psrpc.core.tables import Rows

NDArray = npt.NDArray[Any]


class ShardPosition(NamedTuple):
    """Generation and version of a shard's parameters, and whether it has any."""

    generation: int
    version: int = 0
    initialized: bool = False


class Parameters:
    """The parameters and all state that belongs to them. Not thread-safe: the engine holds the
    shard's lock. Any thread may read ``standing``, since a change replaces the object.
    """

    def __init__(self, updates: UpdateEngine, generation: int, tables: Tables) -> None:
        self._updates = updates
        self.tables = tables
        self._touch = 0
        """The newest number that the tables have stamped rows with. It equals the version as long
        as the version only rises. A generation may continue with a smaller version. If rows were
        stamped with the smaller one, they would seem older than a checkpoint that does not contain
        them yet, or older than rows that it contains."""
        # Readers of one version share its values. A strong reference here would keep them alive and
        # make the next update copy.
        self._current: dict[Encoding, weakref.ref[Values]] = {}
        self.standing = ShardPosition(generation)
        self.applied = AppliedSet()
        self.rates = Rates()
        self.compensation: Compensation | None = None
        self._iterations = 0
        """Number of updates that the optimizer has made."""
        self.failure = ""
        """Why these parameters can no longer be trusted; empty if they can."""

    @property
    def version(self) -> int:
        """Number of updates since the initial parameters."""
        return self.standing.version

    @property
    def initialized(self) -> bool:
        """Whether there are parameters."""
        return self.standing.initialized

    def follow(self, policy: Policy, rates: Rates, plan: Plan, shard: int, keep: bool) -> None:
        """Applies ``policy`` from now on. With ``keep`` the parameters stay, and so does the state
        of their delay compensation."""
        self.rates = rates
        kept = self.compensation if keep else None
        if kept is None or not kept.follow(policy):
            # Released first: it may hold a copy of the parameters.
            kept = self.compensation = None
            if policy.delay_compensation is not None:
                kept = Compensation(plan, shard, policy)
        self.compensation = kept

    def keep(self, generation: int, version: int | None = None) -> None:
        """Keeps the parameters in another generation; ``version``, if given, becomes their
        version."""
        self._current.clear()
        if version is None:
            version = self.version
        self.standing = self.standing._replace(generation=generation, version=version)

    def forget(self, generation: int) -> None:
        """Drops all parameters."""
        self._current.clear()
        self.tables.forget()
        self._touch = 0
        self.applied = AppliedSet()
        self._iterations = 0
        self.standing = ShardPosition(generation)

    def initialize(self, values: Mapping[str, NDArray]) -> None:
        """Takes over all arenas, as ``UpdateEngine.load`` does, and resets the optimizer."""
        with self._fatal():
            self._updates.load(values)
        self.standing = self.standing._replace(initialized=True)

    def restore(self, restored: RestoredState, version: int | None = None) -> None:
        """Takes over the state of a checkpoint, after :meth:`forget`; ``version`` replaces its
        version.

        Takes a second per million rows. The caller need not hold the lock meanwhile: the shard
        counts as uninitialized until the end and refuses all requests.

        Raises:
            CheckpointError: the slots are of another optimizer. There are no parameters then.
        """
        slots = restored.slots
        elements = {name: a for name, a in slots.elements.items() if name != MEAN_SQUARE}
        self._updates.load(restored.values)
        self._updates.load_slots(Slots(elements, slots.variables, slots.scalars))
        if self.compensation is not None:
            self.compensation.load_slots(slots.elements)
        if restored.load_rows is not None:
            restored.load_rows(self.tables)
            self._touch = self.tables.version
        self._iterations = slots.iterations
        self.applied = restored.applied
        version = restored.version if version is None else version
        self.standing = ShardPosition(self.standing.generation, version, True)

    def compensated(
        self, gradients: Mapping[str, NDArray], pulled: Values | None
    ) -> Mapping[str, NDArray]:
        """See :meth:`pserver.engine.compensation.Compensation.correct`."""
        assert self.compensation is not None
        with self._fatal():
            now = None if pulled is None else self.values()
            return self.compensation.correct(gradients, now, pulled)

    def update(
        self,
        gradients: Mapping[str, NDArray] | None,
        staleness: int = 0,
        rows: Mapping[int, Rows] | None = None,
        decided: bool = False,
    ) -> None:
        """Makes one update from gradients that are ``staleness`` updates old; if they are None,
        only raises the version. The caller has checked ``rows``.

        Raises:
            ResourceExhausted: a table has no room for its rows. Nothing has changed. But if the
                update is ``decided``, the job has failed, because other shards apply it.
        """
        with self._fatal() if decided else nullcontext():
            prepared = self.tables.prepare(rows) if rows else None
        self._current.clear()
        if gradients is not None:
            with self._fatal():
                factor = self.rates.factor(self._iterations, staleness)
                self._updates.apply(gradients, factor)
                if prepared is not None:
                    self._touch = max(self._touch, self.version) + 1
                    prepared.apply(factor, self._iterations, self._touch)
            self._iterations += 1
        self.standing = self.standing._replace(version=self.version + 1)

    def values(self, encoding: Encoding = "plain") -> Values:
        """Returns the present values, shared by all readers of this version."""
        known = self._current.get(encoding)
        values = known() if known is not None else None
        if values is None:
            arrays = self._updates.snapshot(encoding)
            values = Values(self.version, self.standing.generation, arrays, encoding)
            self._current[encoding] = weakref.ref(values)
        return values

    def snapshot(self) -> Snapshot:
        """Returns the whole state, unaffected by later updates. Close its tables, if any, after
        use."""
        arrays, slots = self._updates.freeze()
        if self.tables.specs and slots.iterations != self._iterations:
            # In a job with tables only, the optimizer of the arenas has made no update.
            count = scalar(self._iterations, "int64")
            slots = replace(slots, scalars={**slots.scalars, ITERATIONS: count})
        if self.compensation is not None:
            slots = replace(slots, elements={**slots.elements, **self.compensation.slots()})
        values = Values(self.version, self.standing.generation, arrays, "plain")
        snapshot = Snapshot(values, slots, tuple(self.applied.to_epochs()))
        # The tables are frozen last: if a later step failed, nothing would close them.
        return replace(snapshot, tables=self.tables.freeze()) if self.tables.specs else snapshot

    @contextmanager
    def _fatal(self) -> Iterator[None]:
        """Records an error in the block as ``failure``, because a partial update leaves unusable
        parameters."""
        try:
            yield
        except Exception as error:
            self.failure = f"{type(error).__name__} in the update of the parameters: {error}"
            raise
