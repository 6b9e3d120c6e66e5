"""Carries out the actions that ``worker.protocol.conduct`` yields."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pserver.client.client import ShardClient
from psrpc.core.batch import BatchId
from psrpc.core.errors import RoundPassed
from psrpc.ops.logs import get_logger
from psrpc.ops.retry import BUILDING
from psrpc.v1 import coordinator_pb2 as pb
from worker.embedding.row_sets import ReceivedRows
from worker.loop.commits import Commits
from worker.loop.gradient_sender import GradientSender
from worker.loop.joined import Joined, Joining
from worker.loop.session import WorkerSession
from worker.loop.step_times import StepTimes
from worker.protocol import actions as does
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
        self._commits = Commits(source, standing, self._times, self._end_step)
        self._joining = Joining(source, standing, self._times, shm, prefetch_rows, connect)
        self._slow_down = slow_down
        self._built = False
        self._joined: Joined | None = None
        self._sender = GradientSender(source, standing, self._times)
        self._stepping = False
        self._perform: dict[type[does.Action], Callable[[Any], object]] = {
            does.Register: self._register,
            does.Join: self._join,
            does.Rejoin: self._rejoin,
            does.Lease: lambda action: self._here.leases.get(action.after),
            does.LeaseAhead: lambda _action: self._here.leases.ask_ahead(),
            does.TakeLease: lambda _action: self._here.leases.take(),
            does.Expect: self._expect,
            does.Pull: self._pull,
            does.Compute: self._compute,
            does.PushPull: lambda action: self._sender.push_pull(action, self._here),
            does.Push: lambda action: self._sender.push(action, self._here),
            does.Confirm: lambda _action: self._sender.confirm(self._here),
            does.PushNext: lambda action: self._sender.push_next(action, self._here),
            does.Settle: lambda action: self._source.settle(action.unused, action.batch),
            does.TakeBack: self._take_back,
            does.Done: self._done,
            does.Commit: self._commit,
            does.BeginCommit: lambda action: self._commits.begin(action, self._here),
            does.TakeCommit: lambda _action: self._commits.take(self._here),
            does.Initialize: self._initialize,
            does.Evaluate: self._evaluate,
            does.Merge: lambda action: self._source.merge(action.merge),
            does.ReportWork: lambda action: standing.report(action.done),
            does.Leave: lambda action: standing.leave(action.reason, fatal=action.fatal),
        }

    def __enter__(self) -> Performer:
        return self

    def __exit__(self, *_exception: object) -> None:
        self._give_up(finish=False)

    def run(self) -> None:
        """Works until the job ends; raises as :func:`worker.protocol.conduct.conduct` does."""
        drive(conduct(sums=self._source.sums, exact=self._source.exact), self.perform)

    def perform(self, action: does.Action) -> object:
        """Carries out ``action``; its class documents the answer and the errors."""
        try:
            return self._perform[type(action)](action)
        except RoundPassed as passed:
            if not isinstance(action, does.Evaluate):
                self._stepping = False
                self._times.drop()
                self._sender.drop()
                log.info("the round went on without this micro-batch", reason=str(passed))
            raise

    def _register(self, _action: does.Register) -> None:
        self._standing.register(self._job_sha256, self._device)
        if not self._built:
            # Build before asking for the shards, which may still be starting.
            with self._standing.waits.on(f"{BUILDING} the model"):
                self._source.build()
            self._built = True

    def _join(self, _action: does.Join) -> int:
        self._joined = self._joining.join(self._standing.get_cluster())
        devices = self._standing.membership.devices = self._source.at_once
        return devices

    def _rejoin(self, action: does.Rejoin) -> None:
        log.info("joining again", reason=action.reason)
        # A request in flight ends within seconds; the next one must not overtake it.
        self._give_up(finish=True)
        # Frames of the traceback refer to the workspace, whose memory the next one needs.
        gc.collect()
        self._standing.begin_again()

    def _give_up(self, finish: bool) -> None:
        """Releases everything that belongs to the joined generation."""
        joined, self._joined = self._joined, None
        self._sender.leave()
        self._stepping = False
        self._times.drop()
        if joined is not None:
            joined.close(finish=finish)
        if self._built:
            self._source.leave()

    def _expect(self, action: does.Expect) -> None:
        if action.instead:
            self._source.forget()
        self._source.expect(action.batches)

    def _initialize(self, action: does.Initialize) -> pb.InitializeDone:
        log.info("initializing the shards")
        self._here.shards.initialize(self._source.initial_values(action.first_rows), action.grant)
        return pb.InitializeDone()

    def _evaluate(self, action: does.Evaluate) -> pb.EvaluateDone:
        self._times.at(pb.WorkerPosition.PHASE_WAITING)
        shards = self._here.shards
        return self._source.evaluate(action.task, shards.generation, shards.pull)

    @property
    def _here(self) -> Joined:
        assert self._joined is not None  # conduct joins first
        return self._joined

    def _pull(self, action: does.Pull) -> None:
        self._times.at(pb.WorkerPosition.PHASE_EXCHANGING)
        if action.round is None and action.decision is None:
            with self._times.outside("network"):
                self._sender.pull(action, self._here)
        else:
            self._begin_step()
            self._sender.pull(action, self._here)
            self._times.took("pull")

    def _compute(self, action: does.Compute) -> does.Computed | tuple[does.Computed, ...]:
        self._standing.check()
        if not self._stepping:
            if action.add:
                # The one before, of the same sum, is not pushed by itself.
                self._times.end()
            self._begin_step()
        self._stepping = False
        if action.beside:
            return self._compute_at_once((action.batch, *action.beside), action.add)
        times = self._times
        times.at(pb.WorkerPosition.PHASE_DATA)
        given = self._source.read(action.batch)
        times.took("data")
        times.at(pb.WorkerPosition.PHASE_EXCHANGING)
        used = self._here.rows.of(action.batch, given, self._sender.round)
        if used is not None:
            times.took("pull")
        known = action.batch.count in self._sizes
        times.at(pb.WorkerPosition.PHASE_COMPUTING if known else pb.WorkerPosition.PHASE_COMPILING)
        with self._here.rows.prefetching(action.following):
            result = self._source.gradient(action.batch, given, used)
        self._sizes.add(action.batch.count)
        self._took_to_compute()
        (computed,) = self._computed({action.batch: result}, used, action.add)
        return computed

    def _compute_at_once(self, batches: Sequence[BatchId], add: bool) -> tuple[does.Computed, ...]:
        times, position = self._times, pb.WorkerPosition
        times.at(position.PHASE_DATA)
        given = [self._source.read(batch) for batch in batches]
        times.took("data")
        sizes = {batch.count for batch in batches}
        known = sizes <= self._sizes
        times.at(position.PHASE_COMPUTING if known else position.PHASE_COMPILING)
        results = self._source.gradients(batches, given)
        self._sizes |= sizes
        self._took_to_compute()
        return self._computed(dict(zip(batches, results, strict=True)), None, add)

    def _took_to_compute(self) -> None:
        computed_s = self._times.took("compute")
        if self._slow_down > 1:
            self._standing.pause((self._slow_down - 1) * computed_s)
            self._times.took("compute")

    def _computed(
        self, results: Mapping[BatchId, GradientResult], used: ReceivedRows | None, add: bool
    ) -> tuple[does.Computed, ...]:
        """Keeps gradients that were computed at once for their pushes, or adds them to the sum."""
        if add:
            self._sender.add(results, used, self._here)
        else:
            self._sender.results.update((b, (r, used)) for b, r in results.items())
        return tuple([self._described(batch, result) for batch, result in results.items()])

    def _described(self, batch: BatchId, result: GradientResult) -> does.Computed:
        not_finite = "" if result.finite else self._source.not_finite(batch)
        if not result.finite:
            data = {"data": not_finite} if not_finite else {}
            text = "the gradient is NaN or infinite; the batch is skipped"
            log.warning(text, batch=str(batch), **data)
        return does.Computed(result.loss, result.finite, not_finite)

    def _take_back(self, action: does.TakeBack) -> None:
        if action.batch is None:
            self._sender.drop()
        self._source.take_back(action.batch)

    def _done(self, action: does.Done) -> None:
        self._times.took("push_pull" if self._sender.round is None else "commit")
        self._end_step()
        self._standing.done(action.batch)
        self._here.leases.look_ahead()

    def _commit(self, action: does.Commit) -> does.Committed:
        committed = self._commits.commit(action, self._here)
        if committed.pulled:
            self._sender.round = action.round + 1
        return committed

    def _end_step(self) -> None:
        # A step of several devices ends with the push of its last gradient, or of their sum.
        if not self._sender.results:
            self._times.end()

    def _begin_step(self) -> None:
        self._times.begin()
        self._stepping = True
