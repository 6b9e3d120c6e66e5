"""Carries a worker's actions out, over its standing, its shards and its gradients."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, closing
from types import TracebackType
from typing import Any

from pserver.client import Outcome, PushResult
from pserver.workspace import Workspace
from psrpc.batch import BatchId
from psrpc.encoding import Gradient
from psrpc.errors import RoundPassed
from psrpc.logs import get_logger
from psrpc.plan import Plan
from psrpc.tables import Rows
from psrpc.v1 import coordinator_pb2 as pb
from worker.actions import (
    Action,
    Commit,
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
from worker.conduct import batch_id, conduct, drive
from worker.gradient_source import GradientSource
from worker.router import Router
from worker.row_fetcher import RowFetcher
from worker.row_sets import ReceivedRows
from worker.standing import TICK_S, Standing
from worker.step_times import StepTimes

log = get_logger()

POLL_S = 0.02
"""Least time between two requests for work while there is none. The coordinator holds a request
for a while; this is for one that does not."""


class Performer:
    """One worker that does what :func:`worker.conduct.conduct` says. One thread uses it.

    What is made when the worker joins (connections, memory, a thread that asks for work ahead of
    time) is given up when it has to join anew, and at the end of ``with``.
    """

    def __init__(
        self,
        source: GradientSource,
        standing: Standing,
        job_sha256: str,
        device: str,
        times: StepTimes | None = None,
        *,
        shm: bool = True,
        slow_down: float = 1.0,
        prefetch_rows: bool = False,
    ) -> None:
        """Args:
        source: of the gradients; this object's from now on.
        job_sha256: of the job file.
        device: what is computed on, in words.
        times: where it is kept how long everything takes.
        shm: share memory with shards on this host.
        slow_down: make every step take so many times as long to compute, at least 1.
        prefetch_rows: receive rows of tables for the next batch while one is computed (async).
        """
        self._source = source
        self._standing = standing
        self._job_sha256 = job_sha256
        self._device = device
        self._times = times or StepTimes()
        self._shm = shm
        self._slow_down = slow_down
        self._prefetch_rows = prefetch_rows
        self._built = False
        self._joined = ExitStack()
        self._router: Router | None = None
        self._ahead: ThreadPoolExecutor | None = None
        self._rows: RowFetcher | None = None
        # The lease that was asked for ahead of time, and whether its batches are expected.
        self._following: Future[pb.Lease] | None = None
        self._expected = False
        self._gradients: tuple[Gradient, ...] = ()
        self._row_gradients: Sequence[Mapping[int, Rows]] = ()
        # The round whose values were received last; None is the newest.
        self._round: int | None = None
        # What the gradient was computed from.
        self._used: ReceivedRows | None = None
        self._stepping = False
        self._perform: dict[type[Action], Callable[[Any], object]] = {
            Register: self._register,
            Join: self._join,
            Rejoin: self._rejoin,
            Lease: self._lease,
            LeaseAhead: self._lease_ahead,
            TakeLease: self._take_lease,
            Expect: self._expect,
            Pull: self._pull,
            Compute: self._compute,
            PushPull: self._push_pull,
            Push: self._push,
            Settle: self._settle,
            TakeBack: self._take_back,
            Done: self._done,
            Commit: self._commit,
            Initialize: self._initialize,
            Evaluate: self._evaluate,
            Merge: self._merge,
            ReportWork: self._report,
            Leave: self._leave,
        }

    def __enter__(self) -> Performer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._give_up(finish=False)

    def run(self) -> None:
        """Works until the job ends; it ends by raising, see :func:`worker.conduct.conduct`."""
        drive(conduct(), self.perform)

    def perform(self, action: Action) -> object:
        """Carries ``action`` out; see there for what it answers and raises."""
        return self._perform[type(action)](action)

    # -- joining ------------------------------------------------------------------------------

    def _register(self, _action: Register) -> None:
        self._standing.register(self._job_sha256, self._device)
        if not self._built:
            # Before the shards are asked for: they may still be starting.
            self._source.build()
            self._built = True

    def _join(self, _action: Join) -> None:
        cluster = self._standing.get_cluster()
        plan = Plan.from_json(cluster.plan)
        # Anew each time: a shard that was given up may still use the last one.
        rows_nbytes = self._source.rows_nbytes(plan) if plan.tables else 0
        workspace = self._joined.enter_context(
            closing(Workspace(plan, self._source.wire, self._shm, rows_nbytes))
        )
        if workspace.why:
            log.info("tensors go over the network", why=f"shared memory: {workspace.why}")
        self._source.prepare(plan, workspace)
        self._router = self._joined.enter_context(Router(cluster, plan, self._standing, workspace))
        self._ahead = ThreadPoolExecutor(1, "lease")
        self._rows = self._joined.enter_context(
            RowFetcher(
                self._source,
                self._router,
                tables=bool(plan.tables),
                prefetch=self._prefetch_rows,
            )
        )

    def _rejoin(self, action: Rejoin) -> None:
        log.info("joining again", reason=action.reason)
        # A request that is under way ends in seconds; the next must not overtake it.
        self._give_up(finish=True)
        # An error and the frames that it passed through, which know the workspace, refer to each
        # other; its memory has to be free before there is another.
        gc.collect()
        self._standing.begin_again()

    def _give_up(self, finish: bool) -> None:
        """Drops all that belongs to what was joined."""
        if self._ahead is not None:
            self._ahead.shutdown(wait=finish)
        self._ahead = self._following = self._router = self._rows = None
        self._drop_gradients()
        self._stepping = False
        self._joined.close()
        if self._built:
            self._source.leave()

    def _leave(self, action: Leave) -> None:
        self._standing.leave(action.reason, fatal=action.fatal)

    # -- work ---------------------------------------------------------------------------------

    def _lease(self, action: Lease) -> pb.Lease:
        with self._times.outside("barrier"):
            if not action.after:
                return self._standing.lease()
            return self._await_lease(action.after)

    def _await_lease(self, reason: str) -> pb.Lease:
        with self._standing.waits.on(reason):
            while True:
                self._standing.pause(POLL_S)
                lease = self._standing.lease()
                if lease.WhichOneof("work") != "wait":
                    return lease
                self._standing.waits.on(lease.wait.reason)

    def _lease_ahead(self, _action: LeaseAhead) -> None:
        assert self._ahead is not None  # conduct has joined
        self._following = self._ahead.submit(self._standing.lease)
        self._expected = False

    def _take_lease(self, _action: TakeLease) -> pb.Lease:
        following = self._following
        assert following is not None  # conduct has begun it
        if not following.done():
            # The request went out before the last batches were done: report them now, since
            # whether there is more work may depend on them.
            self._standing.flush()
        waits = self._standing.waits
        with self._times.outside("barrier"), waits.on("work from the coordinator"):
            while not following.done():
                wait([following], TICK_S)
                self._standing.check()
        self._look_ahead()
        self._following = None
        return following.result()

    def _look_ahead(self) -> None:
        """Has the batches of the next task read ahead as soon as they are known."""
        following = self._following
        if following is None or self._expected or not following.done():
            return
        self._expected = True
        if following.exception() is None:
            batches = following.result().train.batches
            self._source.expect([batch_id(attempt.batch) for attempt in batches])

    def _first_of_next(self) -> BatchId | None:
        """The batch that the next task begins with, if that is known."""
        following = self._following
        if following is None or not following.done():
            return None
        if following.exception() is not None or not following.result().train.batches:
            return None
        return batch_id(following.result().train.batches[0].batch)

    def _expect(self, action: Expect) -> None:
        if action.instead:
            self._source.forget()
        self._source.expect(action.batches)

    def _initialize(self, _action: Initialize) -> pb.InitializeDone:
        log.info("initializing the shards")
        values, rows_from = self._source.initial_values(), self._source.first_rows()
        self._shards.initialize(values, rows_from)
        return pb.InitializeDone()

    def _evaluate(self, action: Evaluate) -> pb.EvaluateDone:
        return self._source.evaluate(action.task, self._shards.generation, self._shards.pull)

    def _merge(self, action: Merge) -> pb.MergeDone:
        return self._source.merge(action.merge)

    def _report(self, action: ReportWork) -> None:
        self._standing.report(action.done)

    @property
    def _shards(self) -> Router:
        assert self._router is not None  # conduct has joined
        return self._router

    @property
    def _fetcher(self) -> RowFetcher:
        assert self._rows is not None  # conduct has joined
        return self._rows

    # -- steps --------------------------------------------------------------------------------

    def _pull(self, action: Pull) -> None:
        if action.round is None and action.decision is None:
            with self._times.outside("network"):
                self._receive(action)
            return
        self._begin_step()
        self._receive(action)
        self._times.took("pull")

    def _receive(self, action: Pull) -> None:
        fetcher = self._fetcher
        # Whatever has come before is older.
        fetcher.drop()
        rows = fetcher.ahead(action.batch)
        try:
            # The spare set holds anything until the pull has succeeded.
            self._shards.pull(action.round, self._source.spare, action.decision, rows=rows)
        except RoundPassed as passed:
            self._passed(passed)
            raise
        fetcher.came(action.batch, rows)
        self._round = action.round
        self._source.swap(self._shards.version)

    def _compute(self, action: Compute) -> Computed:
        self._standing.check()
        if not self._stepping:
            self._begin_step()
        self._stepping = False
        times = self._times
        given = self._source.read(action.batch)
        times.took("data")
        rows = self._fetch_rows(action.batch, given)
        with self._fetcher.prefetching(action.following):
            result = self._source.gradient(action.batch, given, rows)
        computed_s = times.took("compute")
        if self._slow_down > 1:
            self._standing.pause((self._slow_down - 1) * computed_s)
            times.took("compute")
        if not result.finite:
            log.warning(
                "the gradient is NaN or infinite; the batch is skipped", batch=str(action.batch)
            )
        self._gradients = result.gradients
        if rows is not None:
            self._row_gradients = result.rows
        return Computed(result.loss, result.finite)

    def _fetch_rows(self, batch: BatchId, given: object) -> ReceivedRows | None:
        """The rows of embedding tables that ``batch`` needs."""
        try:
            self._used = self._fetcher.of(batch, given, self._round)
        except RoundPassed as passed:
            self._passed(passed)
            raise
        if self._used is not None:
            self._times.took("pull")
        return self._used

    def _push_pull(self, action: PushPull) -> Pushed:
        gradients = None if action.skip else self._gradients
        following = action.following or self._first_of_next()
        rows = self._fetcher.ahead(following)
        results = self._shards.push_pull(
            action.batch,
            action.attempt,
            gradients,
            self._source.spare,
            rows=self._row_gradients,
            bases=self._shards.bases(self._used),
            following=rows,
        )
        self._fetcher.came(following, rows)
        self._round = None
        self._source.swap(self._shards.version)
        return self._pushed(results, max([result.staleness for result in results]))

    def _push(self, action: Push) -> Pushed:
        gradients = None if action.skip else self._gradients
        bases = self._shards.bases(self._used)
        try:
            results = self._shards.push(
                action.batch, action.attempt, gradients, rows=self._row_gradients, bases=bases
            )
        except RoundPassed as passed:
            self._passed(passed)
            raise
        self._times.took("push")
        # Of a gradient of older parameters than the open round's, which backup workers may stage.
        ages = [result.version - base for result, base in zip(results, bases, strict=True)]
        return self._pushed(results, max(0, *ages))

    def _pushed(self, results: Sequence[PushResult], staleness: int) -> Pushed:
        self._drop_gradients()
        # The exchanges were side by side.
        apply_s = max([result.apply_us for result in results]) * 1e-6
        self._times.applied(apply_s)
        outcomes = [result.outcome for result in results]
        return Pushed(
            staleness,
            _places(outcomes, "already_applied"),
            self._shards.asked_again,
            _places(outcomes, "too_stale"),
            apply_s,
        )

    def _settle(self, action: Settle) -> None:
        self._source.settle(action.unused)

    def _take_back(self, _action: TakeBack) -> None:
        self._source.take_back()

    def _done(self, action: Done) -> None:
        self._times.took("push_pull")
        self._times.end()
        self._standing.done(action.batch)
        self._look_ahead()

    def _commit(self, action: Commit) -> pb.Lease:
        with self._standing.waits.on(f"the other micro-batches of round {action.round}"):
            lease = self._standing.commit(action.round, action.batch)
        self._times.took("commit")
        self._times.end()
        return lease

    def _begin_step(self) -> None:
        self._times.begin()
        self._stepping = True

    def _drop_gradients(self) -> None:
        self._gradients = self._row_gradients = ()
        self._used = None

    def _passed(self, passed: RoundPassed) -> None:
        self._stepping = False
        self._drop_gradients()
        log.info("the round went on without this micro-batch", reason=str(passed))


def _places(outcomes: Sequence[Outcome], outcome: Outcome) -> tuple[int, ...]:
    """The shards that have answered ``outcome``."""
    if outcome not in outcomes:
        return ()
    return tuple([shard for shard, answered in enumerate(outcomes) if answered == outcome])
