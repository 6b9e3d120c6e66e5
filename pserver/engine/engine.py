"""The engine of one shard: serves the requests that read and change its parameters."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt

from pserver.core.applied import AppliedSet
from pserver.core.assembly import check_values
from pserver.core.counters import Counters, ShardReport
from pserver.core.fence import ShardIdentity
from pserver.core.requests import (
    InitializeRequest,
    LookedUp,
    PullRequest,
    PushRequest,
    PushResult,
    RowsRequest,
    Values,
)
from pserver.engine.buffers import Arrived, BufferPool
from pserver.engine.commands import ShardCommands
from pserver.engine.first_rows import FirstRows
from pserver.engine.gate import Credentials, Gate, RoundWaits
from pserver.engine.held_snapshots import SnapshotShelf, SnapshotSink
from pserver.engine.intake import Intake, buffers_for
from pserver.engine.parameters import Parameters
from pserver.engine.pulls import Pulls, Pushes
from pserver.engine.rounds import StagedRounds
from pserver.engine.step_waits import StepWaits
from pserver.tables.tables import TableFigures, Tables
from pserver.transport.transport import Arrival
from pserver.updates.engine import UpdateEngine
from psrpc.core.commands import WorkerClock
from psrpc.core.encoding import Encoding
from psrpc.core.errors import InvalidArgument, NotReady, PsError
from psrpc.core.plan import Plan
from psrpc.core.shard_reports import EpochTotals
from psrpc.core.tables import Ids
from psrpc.ops.clock import Clock, MonotonicClock
from psrpc.ops.threads import THREADS, Threads
from psrpc.ops.tracing import span

_Into = tuple[npt.NDArray[np.float32], ...] | None


class ShardEngine:
    """Serves one shard. Thread-safe: one lock guards all mutable state and the update engine.

    Refuses every request until the command to begin arrives, unless ``identity`` already has a
    generation. Streams are assembled in separate buffers before the lock is taken, so pushes arrive
    in parallel and only the updates are serialized.

    Attributes:
        commands: carries out the coordinator's commands; shares the lock.
        credentials: checks each worker request first, and fills in its ``worker``.
    """

    def __init__(
        self,
        identity: ShardIdentity,
        plan: Plan,
        updates: UpdateEngine,
        sink: SnapshotSink,
        clock: Clock | None = None,
        first_rows: str = "",
        threads: Threads = THREADS,
    ) -> None:
        """Args:
        clock: measures the duration of updates.
        first_rows: directory or URL, from the coordinator, of the checkpoint with the tables' first
            rows; empty if tables begin without rows.
        """
        clock = clock or MonotonicClock()
        self.plan = plan
        policy = identity.settings
        self._held = Parameters(updates, identity.generation, Tables(plan, identity.shard))
        pool = BufferPool(plan, identity.shard, buffers_for(plan, identity.shard, policy), threads)
        self._changed = threads.condition()  # its lock, reentrant, is the shard's
        self._counters = Counters()
        self._rounds = StagedRounds(
            identity.shard, self._held, self._counters, policy, clock, pool.release, plan.shards
        )
        self._pushes = Pushes(self._held, self._counters, policy, clock)
        self._shelf = SnapshotShelf(sink, self._changed)
        self._gate = Gate(identity, plan.hash, self._held, self._rounds)
        self.credentials = Credentials(self._gate.admit, lambda: self._gate.identity, plan.shards)
        self._intake = Intake(plan, self._gate, self._held, pool)
        self._pulls = Pulls(plan, self._gate, self._held, self._shelf, self._pushes)
        self._waits = RoundWaits(self._changed, self._gate, self._held)
        self._steps = StepWaits(self._changed, self._gate, clock)
        self._first_rows = FirstRows(first_rows, plan, identity.shard)
        self.commands = ShardCommands(
            self._changed,
            plan,
            self._gate,
            self._held,
            self._rounds,
            self._pushes,
            self._shelf,
            self._intake,
            self._steps.clocks,
        )

    @property
    def identity(self) -> ShardIdentity:
        """The shard's present identity."""
        return self._gate.identity

    def initialize(
        self, request: InitializeRequest, arrival: Arrival, timeout_s: float
    ) -> tuple[int, bool]:
        """Sets the initial values of all arenas, once. Returns the version, and True if the shard
        had values already; then nothing changes.

        Raises:
            CheckpointError: the first rows of the tables cannot be read. As with any error, nothing
                has changed.
        """
        with self._changed:
            self._gate.admit(request.fence)
            _, version, initialized = self._held.standing
        if initialized:
            return version, True
        # Without the lock: reading files is slow.
        rows = self._first_rows.load(timeout_s)
        with self._intake.values(request, arrival, timeout_s) as arrived, self._changed:
            self._gate.admit(request.fence)
            if self._held.initialized:
                return self._held.version, True
            if rows is not None:
                self._held.tables = rows
                self._first_rows.forget()
            self._intake.become_parameters(arrived)
            self._held.initialize(arrived.arrays)
            self._changed.notify_all()
            return self._held.version, False

    def push(self, request: PushRequest, arrival: Arrival, timeout_s: float) -> PushResult:
        """Applies the gradient (async) or stages it (sync). A repeated push changes nothing.

        Args:
            arrival: read to its end before anything changes.
            timeout_s: how long to wait for a buffer.
        """
        return self._push(request, arrival, timeout_s, None)[0]

    def push_pull(
        self,
        request: PushRequest,
        arrival: Arrival,
        timeout_s: float,
        encoding: Encoding,
        rows: RowsRequest | None = None,
        clock: WorkerClock | None = None,
    ) -> tuple[PushResult, Values]:
        """Does :meth:`push` and also returns the newest values, atomically. Async only. With
        ``clock`` (ssp), first waits until the worker is not too far ahead of others. After
        ``timeout_s`` returns the values anyway, and sets ``behind`` in the result."""
        # First: a worker that does not know this generation's policy yet must get StaleGeneration.
        self._gate.admit_worker(request)
        if self.identity.settings.rounds:
            raise InvalidArgument(
                "the newest values were asked for with a push of a sync job; pull the next round"
            )
        check_values(encoding)
        if rows is not None:
            rows = self._pulls.check_rows(rows)
        result, values = self._push(request, arrival, timeout_s, encoding, rows, clock)
        if values is not None:
            return result, values
        # By now the gradient's buffers are free; the workers that this one waits for may need them.
        with self._changed:
            waited = self._steps.after(request, result, timeout_s)
            return waited, self._pulls.newest(request, encoding, rows)

    def push_round(
        self,
        request: PushRequest,
        arrival: Arrival,
        timeout_s: float,
        pull: PullRequest,
        into: _Into,
    ) -> tuple[PushResult, Values | None]:
        """Does :meth:`push`. Also returns the values that ``pull`` asks for if this push completes
        their round, the newest for a refused sum, else None: :meth:`pull` can wait for it."""
        rows = self._pulls.check(pull, into)
        return self._push(request, arrival, timeout_s, pull.encoding, rows, after=pull)

    def _push(
        self,
        request: PushRequest,
        arrival: Arrival,
        timeout_s: float,
        pull: Encoding | None,
        rows: RowsRequest | None = None,
        clock: WorkerClock | None = None,
        after: PullRequest | None = None,
    ) -> tuple[PushResult, Values | None]:
        with self._intake.gradient(request, arrival, timeout_s) as arrived, self._changed:
            self._counters.gradient_nbytes += sum(extent.nbytes for extent in request.extents)
            rounds, version = self.identity.settings.rounds, self._held.version
            try:
                result = self._accept(request, arrived, pulls=pull is not None)
                if self._steps.count(request, clock) or pull is None:
                    return result, None
                waits = after is not None and not (rounds and after.source == self._held.version)
                if waits and result.outcome != "one_by_one":
                    return result, None
                return result, self._pulls.newest(request, pull, rows)
            finally:
                # Last: a woken thread would only compete for the lock and the interpreter.
                if rounds and self._held.version != version:
                    self._changed.notify_all()

    def _accept(self, request: PushRequest, arrived: Arrived | None, pulls: bool) -> PushResult:
        """Rejects duplicates, then applies or stages, then records. The caller holds the lock."""
        self._gate.admit_worker(request)
        known = self._pushes.known(request)
        if known is not None:
            return known
        if self.identity.settings.rounds:
            result = self._rounds.stage(request, arrived)
            self._rounds.advance()
            return result
        with span("apply", shard=self.identity.shard, batch=request.batch):
            return self._pushes.apply(request, arrived, pulls)

    def pull(self, request: PullRequest, timeout_s: float, into: _Into = None) -> Values:
        """Returns the requested values; waits for a round at most ``timeout_s``.

        Args:
            into: arrays for the rows, see :class:`pserver.core.requests.RowsRequest`.
        """
        rows = self._pulls.check(request, into)
        with self._changed:
            # First, so that a revoked worker gets this error, not one about a missing snapshot.
            self._gate.admit_worker(request)
            if isinstance(request.source, str):
                return self._pulls.of_snapshot(request.source, request.encoding, rows)
            self._gate.need_values()
            self._steps.before(request, timeout_s)
            if request.decision is not None:
                self._waits.decided(request, request.decision.round, timeout_s)
                self.commands.decide(request.decision)
            if request.staged:
                self._rounds.confirm(one.attempt for one in request.staged)
                self.commands.advance()
            if request.source is not None:
                self._waits.reached(request, request.source, timeout_s)
            return self._pulls.newest(request, request.encoding, rows)

    def look_up(self, table: str, ids: Ids) -> LookedUp:
        """See :meth:`pserver.engine.pulls.Pulls.look_up`."""
        with self._changed:
            return self._pulls.look_up(table, ids)

    def report(self) -> ShardReport:
        """See :meth:`ShardCommands.report`."""
        return self.commands.report(self._counters)

    def table_figures(self) -> list[TableFigures]:
        """Returns the figures of embedding tables. Does not take the lock, see :meth:`report`."""
        return self._held.tables.figures()

    def applied(self) -> AppliedSet:
        """Returns a copy of the applied-set."""
        with self._changed:
            return AppliedSet.from_epochs(self._held.applied.to_epochs())

    def totals(self) -> list[EpochTotals]:
        """Returns the totals of the newest epochs. Does not take the lock, see :meth:`report`."""
        return self._held.applied.newest_totals()

    @property
    def failure(self) -> str:
        """Why the parameters can no longer be trusted; empty if they can."""
        return self._held.failure

    def close(self) -> None:
        """Ends all waits for a round or for other workers."""
        with self._changed:
            self._waits.close()
            self._steps.close()

    @contextmanager
    def refusals_counted(self) -> Iterator[None]:
        """Counts a push that fails, except with NotReady; wraps the whole call, including
        parsing."""
        try:
            yield
        except NotReady:
            raise
        except PsError:
            with self._changed:
                self._counters.refused += 1
            raise
