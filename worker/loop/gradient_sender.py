"""Sends the gradient of a worker to the shards, and receives parameters."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from pserver.client.client import PushResult, StagedEverywhere
from pserver.client.requests import GradientPush
from psrpc.core.batch import BatchId
from psrpc.core.commands import Attempt
from psrpc.core.errors import NotReady
from psrpc.v1 import coordinator_pb2 as pb
from psrpc.wire.commands import from_batch
from worker.embedding.row_sets import ReceivedRows
from worker.loop.joined import Joined
from worker.loop.session import WorkerSession
from worker.loop.step_times import StepTimes
from worker.loop.sums import RoundSum, sum_pushes, summed_attempts
from worker.protocol import actions as does
from worker.step.gradient_source import GradientResult, GradientSource

_BEHIND = "workers that are behind to catch up"


class GradientSender:
    """Performs the pulls and pushes of one worker. One thread uses it.

    Attributes:
        results: by batch, the gradients that are not pushed yet, each with the table rows that it
            was computed from.
        round: the round of the parameters received last; None if they were the newest.
    """

    def __init__(self, source: GradientSource, standing: WorkerSession, times: StepTimes) -> None:
        self.results: dict[BatchId, tuple[GradientResult, ReceivedRows | None]] = {}
        self.round: int | None = None
        self._source = source
        self._standing = standing
        self._times = times
        self._staged: list[StagedEverywhere] = []
        """Attempts that all shards hold. Each shard knows only that it holds them itself, until a
        pull or :meth:`confirm` tells it the rest."""
        self._sum = RoundSum()

    def drop(self) -> None:
        """Drops the gradients."""
        self.results.clear()
        self._sum.clear()

    def leave(self) -> None:
        """Drops all that belongs to the joined generation."""
        self.drop()
        self._staged.clear()

    def pull(self, action: does.Pull, here: Joined) -> None:
        """Performs :class:`worker.protocol.actions.Pull`."""
        # Rows received earlier are older than this pull.
        here.rows.drop()
        rows = here.rows.ahead(action.batch)

        def pull() -> None:
            # The content of the spare set is undefined until the pull succeeds.
            spare, staged = self._source.spare, self._staged
            here.shards.pull(
                action.round,
                spare,
                action.decision,
                rows=rows,
                staged=staged,
                clock=action.clock,
                others=others,
            )

        others = _before(action.round) if action.ahead else _BEHIND if action.clock else ""
        if others:
            # Those workers may need long. Report that this one waits, so that it is not taken for
            # the slow one.
            self._times.at(pb.WorkerPosition.PHASE_WAITING)
            self._patiently(pull)
        else:
            pull()
        self._staged.clear()
        here.rows.came(action.batch, rows)
        self._received(action.round, here)

    def push_pull(
        self, action: does.PushPull, here: Joined
    ) -> does.Pushed | tuple[does.Pushed, ...]:
        """Performs :class:`worker.protocol.actions.PushPull`."""
        clock, shards = action.clock, here.shards
        # The shards may wait long for slower workers; meanwhile this one counts as waiting.
        position = pb.WorkerPosition
        self._times.at(position.PHASE_WAITING if clock else position.PHASE_EXCHANGING)
        following = action.following or here.leases.first_of_next()
        rows = here.rows.ahead(following)
        spare = self._source.spare
        others = _BEHIND if clock else ""
        pushes = self._pushes(action, here)
        if action.summed:
            results_of = {b: (r, _totals(r, b.count)) for b, (r, _) in self.results.items()}
            summed = sum_pushes(self._source.add, action, pushes, results_of)
            if summed is None:
                return (does.Pushed(one_by_one=True),) * (1 + len(action.summed))
            pushes = summed
        if not action.pull:
            results = shards.push(pushes)
            greatest = max([result.staleness for result in results])
            return self._pushed(action.batch, results, greatest, shards.asked_again)
        results = shards.push_pull(pushes, spare, rows, clock=clock, others=others)
        self._times.waited(max([result.waited_us for result in results]) * 1e-6)
        asked_again = shards.asked_again
        if any(result.behind for result in results):
            self._patiently(lambda: shards.pull(None, spare, rows=rows, clock=clock, others=others))
        here.rows.came(following, rows)
        self._received(None, here)
        greatest = max([result.staleness for result in results])
        pushed = self._pushed(action.batch, results, greatest, asked_again)
        return (pushed, *self._pushed_beside(action, pushed, results)) if action.summed else pushed

    def _pushed_beside(
        self,
        action: does.PushPull | does.Push | does.PushNext,
        first: does.Pushed,
        results: Sequence[PushResult],
    ) -> list[does.Pushed]:
        answers = []
        for place, attempt in enumerate(action.summed):
            self.results.pop(from_batch(attempt.batch), None)
            receipts = [r.summed_receipts[place] if r.summed_receipts else b"" for r in results]
            answers.append(replace(first, receipts=tuple(receipts)))
        return answers

    def add(
        self, batch: BatchId, result: GradientResult, used: ReceivedRows | None, here: Joined
    ) -> None:
        """Adds a finite gradient to the sum that the next push of one of its batches carries."""
        self._sum.add(here.shards.plan, batch, result, _totals(result, batch.count), used)

    def _of_round(
        self, action: does.Push | does.PushNext, here: Joined
    ) -> list[GradientPush] | None:
        """Returns each shard's part of a gradient or of the sum; None if that has to be refused."""
        if action.skip or action.batch not in self._sum:
            return self._pushes(action, here)
        bases = here.shards.bases(self._sum.used)
        return self._sum.pushes(here.shards.plan, action, bases)

    def push(self, action: does.Push, here: Joined) -> does.Pushed | tuple[does.Pushed, ...]:
        """Performs :class:`worker.protocol.actions.Push`."""
        self._times.at(pb.WorkerPosition.PHASE_EXCHANGING)
        pushes = self._of_round(action, here)
        if pushes is None:
            return _refused(action)
        results = here.shards.push(pushes)
        self._times.took("push")
        # Backup workers may stage gradients of parameters older than the open round's.
        answers = zip(results, pushes, strict=True)
        staleness = max(0, *[r.version - p.base_version for r, p in answers])
        pushed = self._pushed(action.batch, results, staleness, here.shards.asked_again)
        staged = self._answers(action, pushed, results)
        if action.ahead and len(results) > 1 and not pushed.one_by_one:
            attempts = [Attempt(action.batch, action.attempt), *summed_attempts(action)]
            for attempt, each in zip(attempts, staged, strict=True):
                self._staged.append(StagedEverywhere(attempt, each.receipts))
        return staged if action.summed else pushed

    def _answers(
        self,
        action: does.Push | does.PushNext,
        pushed: does.Pushed,
        results: Sequence[PushResult],
    ) -> tuple[does.Pushed, ...]:
        """Returns the answer for each attempt of a push, and begins another sum if it was one."""
        if not action.skip:
            self._sum.clear()
        return (pushed, *self._pushed_beside(action, pushed, results))

    def confirm(self, here: Joined) -> None:
        """Performs :class:`worker.protocol.actions.Confirm`."""
        if self._staged:
            here.shards.confirm(self._staged)
            self._staged.clear()

    def push_next(
        self, action: does.PushNext, here: Joined
    ) -> does.Pushed | tuple[does.Pushed, ...]:
        """Performs :class:`worker.protocol.actions.PushNext`. With a single shard this is one
        exchange. Several shards must hear that all of them hold the gradient, so a push comes
        first, and the pull after it carries that message."""
        if here.shards.count > 1:
            push = does.Push(
                action.batch, action.attempt, action.skip, action.grant, True, action.summed
            )
            pushed = self.push(push, here)
            if (pushed[0] if isinstance(pushed, tuple) else pushed).one_by_one:
                return pushed
            self.pull(does.Pull(action.round, batch=action.following, ahead=True), here)
            self._times.took("commit")
            return pushed
        self._times.at(pb.WorkerPosition.PHASE_WAITING)
        rows = here.rows.ahead(action.following)
        pushes, spare = self._of_round(action, here), self._source.spare
        if pushes is None:
            return _refused(action)
        tries: list[list[PushResult]] = []

        def push_pull() -> None:
            tries.append([])
            others = _before(action.round)
            tries[-1] += here.shards.push_pull(pushes, spare, rows, action.round, others=others)

        self._patiently(push_pull)
        self._times.took("commit")
        # If a try ended because the round was not ready, the shard has the gradient from that try.
        asked_again = frozenset([0]) if len(tries) > 1 else here.shards.asked_again
        answer = self._pushed(action.batch, tries[-1], 0, asked_again)
        if not answer.one_by_one:
            here.rows.came(action.following, rows)
            self._received(action.round, here)
        answers = self._answers(action, answer, tries[-1])
        return answers if action.summed else answer

    def _patiently(self, exchange: Callable[[], None]) -> None:
        """Repeats ``exchange`` until the shards are ready to answer it: the workers that they wait
        for may need long."""
        while True:
            try:
                return exchange()
            except NotReady:
                self._standing.check()

    def _received(self, number: int | None, here: Joined) -> None:
        self.round = number
        self._source.swap(here.shards.version)

    def _pushes(
        self, action: does.PushPull | does.Push | does.PushNext, here: Joined
    ) -> list[GradientPush]:
        """Returns each shard's part of the gradient."""
        batch, attempt, grant = action.batch, action.attempt, action.grant
        result, used = self.results.get(batch, (None, None))
        bases = here.shards.bases(used)
        if action.skip:
            return [GradientPush(batch, attempt, base, None, grant=grant) for base in bases]
        assert result is not None  # Compute comes first
        totals = _totals(result, batch.count)
        return [
            GradientPush(
                batch,
                attempt,
                base,
                result.gradients[shard],
                result.rows[shard] if result.rows else None,
                # Shard 0 keeps the totals of the epoch.
                totals if shard == 0 else (),
                grant,
            )
            for shard, base in enumerate(bases)
        ]

    def _pushed(
        self,
        batch: BatchId,
        results: Sequence[PushResult],
        staleness: int,
        asked_again: frozenset[int],
    ) -> does.Pushed:
        self.results.pop(batch, None)
        # The shards update in parallel, so the slowest one determines the time.
        apply_s = max([result.apply_us for result in results]) * 1e-6
        self._times.applied(apply_s)
        outcomes = [*enumerate(result.outcome for result in results)]
        return does.Pushed(
            staleness,
            tuple([shard for shard, outcome in outcomes if outcome == "already_applied"]),
            asked_again,
            tuple([shard for shard, outcome in outcomes if outcome == "too_stale"]),
            any(outcome == "one_by_one" for _, outcome in outcomes),
            apply_s,
            tuple([result.receipt for result in results]),
        )


def _refused(action: does.Push | does.PushNext) -> does.Pushed | tuple[does.Pushed, ...]:
    refused = does.Pushed(one_by_one=True)
    return (refused,) * (1 + len(action.summed)) if action.summed else refused


def _totals(result: GradientResult, records: int) -> tuple[float, ...]:
    """Returns what a batch adds to its epoch's totals; empty if any of it is not finite."""
    totals = (result.loss * records, float(records), *result.metrics)
    return totals if result.finite and all(map(math.isfinite, totals)) else ()


def _before(number: int | None) -> str:
    """Describes, for the log, the work that must end before a round decided ahead begins."""
    return f"the other micro-batches before round {number}"
