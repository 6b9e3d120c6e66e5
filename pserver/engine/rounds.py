"""The open round of a shard in sync mode: its staged attempts and its decision."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial

from pserver.core.counters import Counters
from pserver.core.requests import PushRequest, PushResult
from pserver.core.staging import Missing, Staged, Staging, mean_rows, weighted_mean
from pserver.engine.buffers import Arrived, Buffers
from pserver.engine.parameters import Parameters
from psrpc.core.commands import Attempt, Decision, RoundsAhead
from psrpc.core.errors import (
    InvalidArgument,
    NotReady,
    ResourceExhausted,
    RoundPassed,
    StaleGeneration,
)
from psrpc.core.policy import Policy
from psrpc.ops.clock import Clock
from psrpc.ops.tracing import span

MOST_AHEAD = 2048
"""Maximum number of rounds that may be decided ahead."""


class StagedRounds:
    """Stages the attempts of rounds and applies each decided round once. Round r turns version r of
    the parameters into version r + 1. Not thread-safe: the engine holds the shard's lock.

    With backup workers (Chen et al. 2016, "Revisiting Distributed Synchronous SGD") a round takes
    only some of the open micro-batches; the others stay staged for a later round, so gradients may
    be of older parameters."""

    def __init__(
        self,
        shard: int,
        held: Parameters,
        counters: Counters,
        policy: Policy,
        clock: Clock,
        release: Callable[[Buffers], None],
        shards: int,
    ) -> None:
        """``release`` returns the buffers of a staged gradient to their pool; ``shards`` is the
        number of shards in the job."""
        self._shard = shard
        self._me = f"shard {shard}"
        self._held = held
        self._counters = counters
        self._clock = clock
        self._release = release
        self._policy = policy
        self._staging = Staging(policy.open)
        self._alone = shards == 1
        self._ahead: dict[int, Decision] = {}
        """Round -> its decision, made ahead."""
        self._round_of: dict[Attempt, int] = {}
        """Attempt -> the round whose decision in ``_ahead`` names it."""

    def __len__(self) -> int:
        """Number of staged attempts. Any thread may call it."""
        return len(self._staging)

    def stage(self, request: PushRequest, arrived: Arrived | None) -> PushResult:
        """Keeps a gradient, or the note that it was not finite, until its round is decided. Of a
        sum of which it has some attempts already, it keeps nothing (``one_by_one``).

        Raises:
            RoundPassed: its round was decided before.
            PsError: see :meth:`pserver.core.staging.Staging.admit` and, for rows,
                :meth:`pserver.tables.tables.Tables.check`.
        """
        version = self._held.version
        if request.base_version < version and not self._policy.backups:
            raise RoundPassed(
                f"a push of {request.batch} is for round {request.base_version};"
                f" {self._me} is at round {version}"
            )
        for attempt in request.attempts:
            if self._round_of.get(attempt, version) != version or (
                version in self._ahead and attempt not in self._round_of
            ):
                raise InvalidArgument(
                    f"{attempt} is not of round {version}, as rounds were decided ahead"
                )
        known = [self._staging.holds(attempt) for attempt in request.attempts]
        if any(known) and not all(known):
            return PushResult("one_by_one", version)
        if not any(known):
            self._staging.admit(*request.attempts)
            if arrived is not None and arrived.rows:
                self._held.tables.check(arrived.rows)
            for attempt, staged in self._staged(request, arrived):
                self._staging.stage(attempt, staged, self._alone)
                self._counters.staged += 1
        held = map(self._staging.held, request.attempts)
        skipped, *others = [staged.gradients is None for staged in held]
        return PushResult("staged", version, skipped=skipped, summed_skipped=tuple(others))

    def _staged(
        self, request: PushRequest, arrived: Arrived | None
    ) -> Iterator[tuple[Attempt, Staged]]:
        """Yields what each attempt of a push is staged as. Of a sum, the first has the gradient."""
        examples = sum(batch.count for batch in request.batches)
        summed = tuple(request.attempts) if request.summed else ()
        first = Staged(
            examples,
            None if arrived is None else arrived.arrays,
            worker=request.worker,
            base=request.base_version,
            rows={} if arrived is None else arrived.rows,
            totals=request.totals,
            summed=summed,
        )
        if arrived is not None and arrived.loan is not None:
            arrived.loan.keep = True
            first = replace(first, release=partial(self._release, arrived.loan.buffers))
        else:
            assert arrived is None or not arrived.arrays, "staged gradients lie in our own memory"
        yield request.attempt, first
        other = replace(first, examples=0, gradients={}, rows={}, release=lambda: None)
        for each in request.summed:
            yield each.attempt, replace(other, totals=each.totals)

    def decide(self, decision: Decision) -> bool:
        """Applies a decided round and records its batches; returns False if it was applied before.

        Batches that the shard applied before the rounds began are left out of the mean and need not
        be staged. If no batch is left, the version rises without an update.

        Raises:
            StaleGeneration: the decision is of another generation.
            NotReady: the round is not the next one, or attempts that it names are not staged.
            InvalidArgument: a batch was applied in part, or is named twice.
            ResourceExhausted: a table has no room for the rows of all attempts together. The job
                has failed.
        """
        generation, version, _ = self._held.standing
        if decision.generation != generation:
            raise StaleGeneration(
                f"the decision of round {decision.round} is of generation {decision.generation};"
                f" {self._me} is in {generation}"
            )
        if decision.round < version:
            return False
        if decision.round > version:
            raise NotReady(
                f"{self._me} cannot apply round {decision.round}: it waits for the decision of"
                f" round {version}"
            )
        if self._ahead.pop(decision.round, None) is not None:
            for attempt in decision.attempts:
                self._round_of.pop(attempt, None)
        applied = self._held.applied
        lacking = tuple(a for a in decision.attempts if not applied.contains(a.batch))
        decided = self._staging.decide(lacking)
        if isinstance(decided, Missing):
            raise NotReady(
                f"{self._me} cannot apply round {decision.round}: it does not hold"
                f" {', '.join(map(str, decided.attempts))}"
            )
        with span("apply", shard=self._shard, round=decision.round):
            rows = mean_rows(decided.parts)
            began = self._clock.now()
            mean = weighted_mean(decided.parts) if decided.parts else None
            self._held.update(mean, rows=rows, decided=True)
            self._counters.apply_s += self._clock.now() - began
        for attempt, staged in zip(sorted(lacking), decided.staged, strict=True):
            skipped = attempt.batch in decided.skipped
            applied.add(attempt.batch, skipped=skipped, totals=staged.totals)
        for staged in decided.staged:
            if staged.gradients is None:
                self._counters.skipped += 1
            else:
                self._counters.count_applied(staged.worker, version - staged.base)
        if self._policy.backups:
            for attempt in decision.attempts:
                for dropped in self._staging.drop_all(attempt.batch):
                    dropped.release()
        else:
            self.clear()
        return True

    def plan(self, ahead: RoundsAhead) -> None:
        """Takes in rounds that are decided ahead. Call :meth:`advance` next.

        Raises:
            StaleGeneration: they are of another generation.
            ResourceExhausted: more than :data:`MOST_AHEAD`.
        """
        generation, version, _ = self._held.standing
        for decision in ahead.decisions:
            if decision.generation != generation:
                raise StaleGeneration(
                    f"round {decision.round} was decided ahead in generation"
                    f" {decision.generation}; {self._me} is in {generation}"
                )
            if decision.round >= version:
                self._ahead[decision.round] = decision
                self._round_of.update(dict.fromkeys(decision.attempts, decision.round))
        for attempt in self._staging.attempts:
            # A worker has pushed this attempt before its round; it would take the place of another.
            if self._round_of.get(attempt, version) != version:
                self.drop(attempt)
        if len(self._ahead) > MOST_AHEAD:
            raise ResourceExhausted(
                f"{len(self._ahead)} rounds are decided ahead; expected at most {MOST_AHEAD}"
            )

    def confirm(self, attempts: Iterable[Attempt]) -> None:
        """Notes that all shards hold these attempts. Call :meth:`advance` next."""
        for attempt in attempts:
            self._staging.confirm(attempt)

    def advance(self) -> bool:
        """Applies the rounds that were decided ahead and are complete on all shards; returns
        whether it applied any."""
        advanced = False
        while (decision := self._ahead.get(self._held.version)) is not None:
            applied = self._held.applied
            if not all(
                self._staging.is_everywhere(attempt) or applied.contains(attempt.batch)
                for attempt in decision.attempts
            ):
                break
            advanced = self.decide(decision) or advanced
        return advanced

    def forget_ahead(self) -> None:
        """Forgets the rounds that were decided ahead: only a new decision of the coordinator
        applies a round from now on."""
        self._ahead.clear()
        self._round_of.clear()

    def begin(self, policy: Policy) -> None:
        """Starts a generation under ``policy`` with nothing staged."""
        self.clear()
        self.forget_ahead()
        self._policy = policy
        self._staging = Staging(policy.open)

    def drop(self, attempt: Attempt) -> None:
        """Drops an attempt; ignores one that is not staged."""
        dropped = self._staging.drop(attempt)
        if dropped is not None:
            dropped.release()

    def clear(self) -> None:
        """Drops all staged attempts."""
        for dropped in self._staging.clear():
            dropped.release()

    def waiting_for(self) -> str:
        """Describes for users what the open round waits for. Any thread may call it."""
        have, policy = self._staging.micro_batches, self._policy
        if policy.backups:
            return (
                f"the decision of round {self._held.version}, which takes {policy.taken}"
                f" micro-batches; it holds {have} of {policy.open} that are open"
            )
        return (
            f"the decision of round {self._held.version}; it holds {have} of {policy.open}"
            " micro-batches"
        )
