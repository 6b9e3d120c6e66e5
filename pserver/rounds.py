"""The open round of a shard in sync mode: what was staged for it, and its decision."""

from __future__ import annotations

from collections.abc import Callable

from pserver.arrival import Arrived
from pserver.buffers import Buffers
from pserver.counters import Counters
from pserver.parameters import Parameters
from pserver.requests import Decision, PushRequest, PushResult
from pserver.staging import Attempt, Missing, Staged, Staging, weighted_mean
from psrpc.errors import NotReady, RoundPassed, StaleGeneration


class Rounds:
    """Round r turns version r of the parameters into r + 1, once. Not thread-safe: the shard's
    engine holds its lock."""

    def __init__(
        self,
        shard: int,
        replicas: int,
        held: Parameters,
        counters: Counters,
        release: Callable[[Buffers], None],
    ) -> None:
        """``release`` takes back the buffers in which a staged gradient arrived."""
        self._me = f"shard {shard}"
        self._replicas = replicas
        self._held = held
        self._counters = counters
        self._release = release
        self._staging = Staging(replicas)

    def __len__(self) -> int:
        """How many attempts are staged. Any thread may ask."""
        return len(self._staging)

    def stage(self, request: PushRequest, arrived: Arrived | None) -> PushResult:
        """Keeps a gradient, or that it was not finite, until the round is decided.

        Raises:
            RoundPassed: it is for a round that was decided.
            PsError: see :meth:`pserver.staging.Staging.admit`.
        """
        version = self._held.version
        if request.base_version < version:
            raise RoundPassed(
                f"a push of {request.batch} is for round {request.base_version};"
                f" {self._me} is at round {version}"
            )
        if self._staging.admit(request.attempt):
            self._staging.stage(request.attempt, self._staged(request.examples, arrived))
            self._counters.staged += 1
        return PushResult("staged", version)

    def _staged(self, examples: int, arrived: Arrived | None) -> Staged:
        if arrived is None:
            return Staged(examples, None)
        loan = arrived.loan
        assert loan is not None, "what is staged lies in our own memory"
        loan.keep = True
        return Staged(examples, arrived.arrays, lambda: self._release(loan.buffers))

    def decide(self, decision: Decision) -> bool:
        """Applies a decided round and records its batches; False if that was done before.

        Raises:
            StaleGeneration: the decision is of another generation.
            NotReady: the round is not the next one, or attempts it names are not here.
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
        found = self._staging.decide(decision.attempts)
        if isinstance(found, Missing):
            raise NotReady(
                f"{self._me} cannot apply round {decision.round}: it does not hold"
                f" {', '.join(map(str, found.attempts))}"
            )
        self._held.update(weighted_mean(found.parts) if found.parts else None)
        for attempt in decision.attempts:
            skipped = attempt.batch in found.skipped
            self._held.applied.add(attempt.batch, skipped=skipped)
            if skipped:
                self._counters.skipped += 1
            else:
                self._counters.count_applied(0)
        self.clear()
        return True

    def begin(self, replicas: int) -> None:
        """A generation with so many micro-batches a round: nothing is staged in it."""
        self.clear()
        self._replicas = replicas
        self._staging = Staging(replicas)

    def drop(self, attempt: Attempt) -> None:
        """Forgets an attempt; one that is not staged is no error."""
        dropped = self._staging.drop(attempt)
        if dropped is not None:
            dropped.release()

    def clear(self) -> None:
        """Forgets everything that is staged."""
        for dropped in self._staging.clear():
            dropped.release()

    def waiting_for(self) -> str:
        """What the open round waits for, in words. Any thread may ask."""
        return (
            f"the decision of round {self._held.version}; it holds"
            f" {self._staging.micro_batches} of {self._replicas} micro-batches"
        )
