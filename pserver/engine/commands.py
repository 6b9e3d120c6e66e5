"""Carries out the coordinator's commands to a shard (generations, revocations, decided rounds,
snapshots) and makes the shard's reports."""

from __future__ import annotations

import threading
from dataclasses import replace

from pserver.core.counters import Counters, Rates, ShardReport
from pserver.core.requests import Begun, RestoredState
from pserver.core.step_clocks import StepClocks
from pserver.engine.gate import Gate
from pserver.engine.held_snapshots import SnapshotShelf
from pserver.engine.intake import Intake
from pserver.engine.parameters import Parameters, ShardPosition
from pserver.engine.pulls import Pushes
from pserver.engine.rounds import StagedRounds
from psrpc.core.commands import (
    AwaitedWorkers,
    Begin,
    Decision,
    Revocation,
    RoundsAhead,
    SnapshotOrder,
)
from psrpc.core.plan import Plan
from psrpc.core.policy import Policy


class ShardCommands:
    """Carries out commands. A command may arrive more than once; repeating it is harmless.
    Thread-safe: takes the shard's lock."""

    def __init__(
        self,
        changed: threading.Condition,
        plan: Plan,
        gate: Gate,
        held: Parameters,
        rounds: StagedRounds,
        pushes: Pushes,
        shelf: SnapshotShelf,
        intake: Intake,
        clocks: StepClocks,
    ) -> None:
        """Configures the other parts for the policy of the gate's identity.

        Args:
            changed: notified of each round and generation; its lock, reentrant, is the shard's.
        """
        self._changed = changed
        self._plan = plan
        self._gate = gate
        self._held = held
        self._rounds = rounds
        self._pushes = pushes
        self._shelf = shelf
        self._intake = intake
        self._clocks = clocks
        self._follow(gate.identity.settings, keep=False)

    def wake(self) -> None:
        """Lets waits for a round notice that their caller has gone."""
        with self._changed:
            self._changed.notify_all()

    @property
    def begun(self) -> int:
        """The generation of the last ``Begin`` that was carried out."""
        return self._gate.begun

    def begin(self, order: Begin, restored: RestoredState | None = None) -> Begun | None:
        """Enters another generation and refuses messages of older ones from then on.

        A repeated order changes nothing and returns the report again. An order of an older
        generation changes nothing either and returns None, since the coordinator no longer expects
        a report for it.

        Args:
            restored: contents of the checkpoint that the order names.

        Raises:
            NotReady: the decision in the order cannot be applied. Nothing has changed.
            CheckpointError: the checkpoint is of another optimizer. The shard has no parameters
                then.
        """
        with self._changed:
            self._gate.need_sound()
            if order.generation < self._gate.identity.generation:
                return None
            if order.generation > self._gate.begun:
                self._begin(order)
            restores = order.generation > self._gate.begun
        if restores:
            # Without the lock, so that requests that arrive meanwhile get NotReady at once instead
            # of waiting.
            assert restored is not None, "the caller has read the checkpoint"
            self._held.restore(restored, order.version)
        with self._changed:
            if restores:
                self._gate.begun = order.generation
                self._wake()
            return Begun(*self._held.standing, tuple(self._held.applied.to_epochs()))

    def revoke(self, revocation: Revocation) -> None:
        """Refuses a worker's pushes in this generation and drops its named staged attempts.

        Raises:
            ResourceExhausted: too many revocations; this shard cannot go on.
        """
        with self._changed:
            revocations = self._gate.revocations
            if revocation.number <= revocations.number:
                return
            revocations.refuse(revocation.worker)
            self._pushes.forget(revocation.worker)
            self._clocks.leave(revocation.worker)
            for attempt in revocation.attempts:
                self._rounds.drop(attempt)
            if revocation.ends_ahead:
                self._rounds.forget_ahead()
            revocations.number = revocation.number
            self._wake()

    def decide(self, decision: Decision) -> None:
        """Applies a decided round; a repeated decision changes nothing.

        Raises:
            StaleGeneration: the decision is of another generation.
            NotReady: the round is not the next one, or attempts that it names are not staged.
        """
        with self._changed:
            if self._rounds.decide(decision):
                for order in decision.snapshots:
                    self._shelf.take(order, self._held)
                self._changed.notify_all()

    def plan(self, ahead: RoundsAhead) -> None:
        """Takes in rounds that are decided ahead, and applies those that are complete.

        Raises:
            StaleGeneration, ResourceExhausted: see :meth:`StagedRounds.plan`.
        """
        with self._changed:
            self._rounds.plan(ahead)
            self.advance()

    def advance(self) -> None:
        """Applies rounds that were decided ahead and are complete. The caller holds the lock."""
        if self._rounds.advance():
            self._changed.notify_all()

    def report(self, counters: Counters) -> ShardReport:
        """Returns the shard's present state.

        Does not take the lock, because a status request must not wait for an update of a gigabyte;
        so the values may be of different moments. Reads the revocation number before the version:
        after a revocation that ends the rounds decided ahead the version no longer rises, so the
        coordinator may take the reported version as final."""
        revocations = self._gate.revocations
        revoked = revocations.number
        standing = self._held.standing
        return ShardReport(
            generation=standing.generation,
            version=standing.version,
            initialized=standing.initialized,
            revoked=revoked if revocations.generation == standing.generation else 0,
            nbytes=self._plan.shard_nbytes(self._gate.identity.shard),
            counters=counters.reported(),
            staged_now=len(self._rounds),
            waiting_for=self._gate.waiting_for(),
        )

    def await_workers(self, awaited: AwaitedWorkers) -> None:
        """Records the workers that other workers wait for in ssp mode."""
        with self._changed:
            if self._clocks.follow(awaited):
                self._changed.notify_all()

    def stand(self) -> ShardPosition:
        """Forgets the rounds that were decided ahead and returns the shard's present position. From
        then on only commands change the position. Call this before opening a command stream."""
        with self._changed:
            self._rounds.forget_ahead()
            return self._held.standing

    def take_snapshot(self, order: SnapshotOrder) -> None:
        """Takes the snapshot that ``order`` asks for and passes it to the sink. A repeated order
        takes no second snapshot."""
        with self._changed:
            self._shelf.take(order, self._held)

    def release_snapshot(self, name: str) -> None:
        """Releases a kept snapshot; ignores a name that is not kept."""
        with self._changed:
            self._shelf.release(name)

    def _begin(self, order: Begin) -> None:
        """Carries out ``order``, except for restoring a checkpoint."""
        decision = order.decision
        if decision is not None and decision.generation == self._gate.identity.generation:
            # Nothing would read its snapshots: they would be of an older generation.
            self.decide(replace(decision, snapshots=()))
        self._gate.turn(order)
        try:
            policy = self._gate.identity.settings
            self._follow(policy, order.keep, order.rate_scale, order.warmup_updates)
            self._intake.follow(policy)
            self._shelf.begin(order.generation)
            if order.keep:
                self._held.keep(order.generation, order.version)
            else:
                self._held.forget(order.generation)
            if order.keep or not order.restore:
                self._gate.begun = order.generation
        finally:
            self._wake()

    def _follow(
        self, policy: Policy, keep: bool, rate_scale: float = 1.0, warmup_updates: int = 0
    ) -> None:
        """Applies ``policy`` from now on. With ``keep`` the parameters stay, and so does the state
        of their delay compensation."""
        self._rounds.begin(policy)
        self._pushes.begin(policy)
        self._clocks.begin(policy.staleness)
        rates = Rates(rate_scale, warmup_updates, policy.staleness_lr == "inverse")
        self._held.follow(policy, rates, self._plan, self._gate.identity.shard, keep)

    def _wake(self) -> None:
        self._changed.notify_all()
        self._intake.pool.wake()
