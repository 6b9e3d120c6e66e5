"""Carries out the actions that ``worker.protocol.conduct`` yields."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pserver.client.client import Outcome, PushResult, ShardClient
from psrpc.core.batch import BatchId
from psrpc.core.encoding import Gradient
from psrpc.core.errors import RoundPassed
from psrpc.core.tables import Rows
from psrpc.ops.logs import get_logger
from psrpc.ops.retry import BUILDING
from psrpc.v1 import coordinator_pb2 as pb
from worker.embedding.row_sets import ReceivedRows
from worker.loop.leases import Joined, join
from worker.loop.session import WorkerSession
from worker.loop.step_times import StepTimes
from worker.protocol.actions import (
    Action,
    Commit,
    Committed,
    Compute,
    Computed,
    Done,
    Evaluate,
    Expect,
    Initialize,
    Join,
    Lease,
    LeaseAhead,
    Leave,
    Merge,
    Pull,
    Push,
    Pushed,
    PushPull,
    Register,
    Rejoin,
    ReportWork,
    Settle,
    TakeBack,
    TakeLease,
)
from worker.protocol.conduct import conduct, drive
from worker.step.gradient_source import GradientResult, GradientSource

log = get_logger()


class Performer:
    """Performs the actions of one worker. One thread uses it.

    Joining makes connections, memory and a thread that leases ahead of time; rejoining and leaving
    the ``with`` block release them.
    """

    def __init__(
        self,
        source: GradientSource,
        standing: WorkerSession,
        job_sha256: str,
        device: str,
        times: StepTimes | None = None,
        *,
        shm: bool = True,
        slow_down: float = 1.0,
        prefetch_rows: bool = False,
        connect: Callable[..., ShardClient] = ShardClient,
    ) -> None:
        """Args:
        source: computes the gradients; only this object uses it from now on.
        job_sha256: of the job file.
        device: a description of the compute device.
        times: records how long each part of a step takes.
        shm: share memory with shards on this host.
        slow_down: multiplies the compute time of every step; at least 1.
        prefetch_rows: receive table rows for the next batch during the computation (async).
        connect: makes the client of a shard.
        """
        self._source = source
        self._standing = standing
        self._job_sha256 = job_sha256
        self._device = device
        self._times = times or StepTimes()
        standing.position = self._times.position
        self._sizes: set[int] = set()
        """Numbers of records of computed batches; the first batch of a size may compile."""
        self._shm = shm
        self._slow_down = slow_down
        self._prefetch_rows = prefetch_rows
        self._connect = connect
        self._built = False
        self._joined: Joined | None = None
        self._gradients: tuple[Gradient, ...] = ()
        self._row_gradients: Sequence[Mapping[int, Rows]] = ()
        self._totals: tuple[float, ...] = ()
        # The round of the parameters that were received last; None means the newest.
        self._round: int | None = None
        # The table rows that the gradient was computed from.
        self._used: ReceivedRows | None = None
        self._stepping = False
        self._perform: dict[type[Action], Callable[[Any], object]] = {
            Register: self._register,
            Join: self._join,
            Rejoin: self._rejoin,
            Lease: self._lease,
            LeaseAhead: lambda _action: self._here.leases.ask_ahead(),
            TakeLease: self._take_lease,
            Expect: self._expect,
            Pull: self._pull,
            Compute: self._compute,
            PushPull: self._push_pull,
            Push: self._push,
            Settle: lambda action: self._source.settle(action.unused),
            TakeBack: lambda _action: self._source.take_back(),
            Done: self._done,
            Commit: self._commit,
            Initialize: self._initialize,
            Evaluate: self._evaluate,
            Merge: lambda action: self._source.merge(action.merge),
            ReportWork: lambda action: standing.report(action.done),
            Leave: lambda action: standing.leave(action.reason, fatal=action.fatal),
        }

    def __enter__(self) -> Performer:
        return self

    def __exit__(self, *_exception: object) -> None:
        self._give_up(finish=False)

    def run(self) -> None:
        """Works until the job ends; raises as :func:`worker.protocol.conduct.conduct` does."""
        drive(conduct(), self.perform)

    def perform(self, action: Action) -> object:
        """Carries out ``action``; its class documents the answer and the errors."""
        return self._perform[type(action)](action)

    # -- joining ------------------------------------------------------------------------------

    def _register(self, _action: Register) -> None:
        self._standing.register(self._job_sha256, self._device)
        if not self._built:
            # Build before asking for the shards, which may still be starting.
            with self._standing.waits.on(f"{BUILDING} the model"):
                self._source.build()
            self._built = True

    def _join(self, _action: Join) -> None:
        self._joined = join(
            self._standing.get_cluster(),
            self._source,
            self._standing,
            self._times,
            shm=self._shm,
            prefetch_rows=self._prefetch_rows,
            connect=self._connect,
        )

    def _rejoin(self, action: Rejoin) -> None:
        log.info("joining again", reason=action.reason)
        # A request in flight ends within seconds; the next one must not overtake it.
        self._give_up(finish=True)
        # Error and traceback frames refer to each other and to the workspace. Its memory must be
        # free before the next workspace is allocated.
        gc.collect()
        self._standing.begin_again()

    def _give_up(self, finish: bool) -> None:
        """Releases everything that belongs to the joined generation."""
        joined, self._joined = self._joined, None
        self._drop_gradients()
        self._stepping = False
        if joined is not None:
            joined.close(finish=finish)
        if self._built:
            self._source.leave()

    # -- work ---------------------------------------------------------------------------------

    def _lease(self, action: Lease) -> pb.Lease:
        self._times.at(pb.WorkerPosition.PHASE_WAITING)
        return self._here.leases.get(action.after)

    def _take_lease(self, _action: TakeLease) -> pb.Lease:
        self._times.at(pb.WorkerPosition.PHASE_WAITING)
        return self._here.leases.take()

    def _expect(self, action: Expect) -> None:
        if action.instead:
            self._source.forget()
        self._source.expect(action.batches)

    def _initialize(self, action: Initialize) -> pb.InitializeDone:
        log.info("initializing the shards")
        values = self._source.initial_values(action.first_rows)
        self._here.shards.initialize(values, action.grant)
        return pb.InitializeDone()

    def _evaluate(self, action: Evaluate) -> pb.EvaluateDone:
        self._times.at(pb.WorkerPosition.PHASE_WAITING)
        return self._source.evaluate(
            action.task, self._here.shards.generation, self._here.shards.pull
        )

    @property
    def _here(self) -> Joined:
        assert self._joined is not None  # conduct joins first
        return self._joined

    # -- steps --------------------------------------------------------------------------------

    def _pull(self, action: Pull) -> None:
        self._times.at(pb.WorkerPosition.PHASE_EXCHANGING)
        if action.round is None and action.decision is None:
            with self._times.outside("network"):
                self._receive(action)
            return
        self._begin_step()
        self._receive(action)
        self._times.took("pull")

    def _receive(self, action: Pull) -> None:
        fetcher = self._here.rows
        # Rows received earlier are older than this pull.
        fetcher.drop()
        rows = fetcher.ahead(action.batch)
        try:
            # The content of the spare set is undefined until the pull succeeds.
            self._here.shards.pull(action.round, self._source.spare, action.decision, rows=rows)
        except RoundPassed as passed:
            self._passed(passed)
            raise
        fetcher.came(action.batch, rows)
        self._round = action.round
        self._source.swap(self._here.shards.version)

    def _compute(self, action: Compute) -> Computed:
        self._standing.check()
        if not self._stepping:
            self._begin_step()
        self._stepping = False
        times = self._times
        times.at(pb.WorkerPosition.PHASE_DATA)
        given = self._source.read(action.batch)
        times.took("data")
        times.at(pb.WorkerPosition.PHASE_EXCHANGING)
        rows = self._fetch_rows(action.batch, given)
        known = action.batch.count in self._sizes
        times.at(pb.WorkerPosition.PHASE_COMPUTING if known else pb.WorkerPosition.PHASE_COMPILING)
        with self._here.rows.prefetching(action.following):
            result = self._source.gradient(action.batch, given, rows)
        self._sizes.add(action.batch.count)
        computed_s = times.took("compute")
        if self._slow_down > 1:
            self._standing.pause((self._slow_down - 1) * computed_s)
            times.took("compute")
        not_finite = ""
        if not result.finite:
            not_finite = self._source.not_finite(action.batch)
            log.warning(
                "the gradient is NaN or infinite; the batch is skipped",
                batch=str(action.batch),
                **({"data": not_finite} if not_finite else {}),
            )
        self._gradients = result.gradients
        self._totals = _totals(result, action.batch.count)
        if rows is not None:
            self._row_gradients = result.rows
        return Computed(result.loss, result.finite, not_finite)

    def _fetch_rows(self, batch: BatchId, given: object) -> ReceivedRows | None:
        """Returns the table rows that ``batch`` needs; pulls them unless they came ahead."""
        try:
            self._used = self._here.rows.of(batch, given, self._round)
        except RoundPassed as passed:
            self._passed(passed)
            raise
        if self._used is not None:
            self._times.took("pull")
        return self._used

    def _push_pull(self, action: PushPull) -> Pushed:
        self._times.at(pb.WorkerPosition.PHASE_EXCHANGING)
        gradients = None if action.skip else self._gradients
        following = action.following or self._here.leases.first_of_next()
        rows = self._here.rows.ahead(following)
        results = self._here.shards.push_pull(
            action.batch,
            action.attempt,
            action.grant,
            gradients,
            self._source.spare,
            rows=self._row_gradients,
            bases=self._here.shards.bases(self._used),
            following=rows,
            totals=self._totals,
        )
        self._here.rows.came(following, rows)
        self._round = None
        self._source.swap(self._here.shards.version)
        return self._pushed(results, max([result.staleness for result in results]))

    def _push(self, action: Push) -> Pushed:
        self._times.at(pb.WorkerPosition.PHASE_EXCHANGING)
        gradients = None if action.skip else self._gradients
        bases = self._here.shards.bases(self._used)
        try:
            results = self._here.shards.push(
                action.batch,
                action.attempt,
                action.grant,
                gradients,
                rows=self._row_gradients,
                bases=bases,
                totals=self._totals,
            )
        except RoundPassed as passed:
            self._passed(passed)
            raise
        self._times.took("push")
        # Backup workers may stage gradients of parameters older than the open round's.
        ages = [result.version - base for result, base in zip(results, bases, strict=True)]
        return self._pushed(results, max(0, *ages))

    def _pushed(self, results: Sequence[PushResult], staleness: int) -> Pushed:
        self._drop_gradients()
        # The exchanges with the shards run in parallel, so the slowest one counts.
        apply_s = max([result.apply_us for result in results]) * 1e-6
        self._times.applied(apply_s)
        outcomes = [result.outcome for result in results]
        return Pushed(
            staleness,
            _places(outcomes, "already_applied"),
            self._here.shards.asked_again,
            _places(outcomes, "too_stale"),
            apply_s,
            tuple([result.receipt for result in results]),
        )

    def _done(self, action: Done) -> None:
        self._times.took("push_pull")
        self._times.end()
        self._standing.done(action.batch)
        self._here.leases.look_ahead()

    def _commit(self, action: Commit) -> Committed:
        self._times.at(pb.WorkerPosition.PHASE_WAITING)
        commit = self._standing.committing(action.round, action.batch)
        with self._standing.waits.on(f"the other micro-batches of round {action.round}"):
            if action.pull_next and not self._here.rows.tables:
                committed = self._commit_and_pull(commit, action.round + 1)
            else:
                committed = Committed(commit())
        self._times.took("commit")
        self._times.end()
        return committed

    def _commit_and_pull(self, commit: Callable[[], pb.Lease], following: int) -> Committed:
        """Commits on another thread and meanwhile waits for the round ``following``: shards hear
        the decision from the coordinator at the time that the commit is answered."""
        committing = self._here.leases.run(commit)
        pulled = False
        try:
            pulled = self._here.shards.pull_soon(following, self._source.spare)
        finally:
            # Whatever became of the pull, the commit must be known to be over.
            lease = committing.result()
        if pulled:
            self._round = following
            self._source.swap(self._here.shards.version)
        return Committed(lease, pulled)

    def _begin_step(self) -> None:
        self._times.begin()
        self._stepping = True

    def _drop_gradients(self) -> None:
        self._gradients = self._row_gradients = ()
        self._totals = ()
        self._used = None

    def _passed(self, passed: RoundPassed) -> None:
        self._stepping = False
        self._drop_gradients()
        log.info("the round went on without this micro-batch", reason=str(passed))


def _totals(result: GradientResult, records: int) -> tuple[float, ...]:
    """Returns what a batch adds to its epoch's totals; empty if any of it is not finite."""
    totals = (result.loss * records, float(records), *result.metrics)
    return totals if result.finite and all(map(math.isfinite, totals)) else ()


def _places(outcomes: Sequence[Outcome], outcome: Outcome) -> tuple[int, ...]:
    """Returns the indices of the shards that answered ``outcome``."""
    if outcome not in outcomes:
        return ()
    return tuple([shard for shard, answered in enumerate(outcomes) if answered == outcome])
