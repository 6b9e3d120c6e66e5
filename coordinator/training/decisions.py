"""Decides rounds: each decision is stored before a shard or a worker hears of it.

A round is decided once its micro-batches are committed or, where rounds are short, several are
decided ahead, see :mod:`coordinator.schedule.decided_ahead`. Deterministic: time is passed in,
commands go out through ``send``; the only other side effect is on the store.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Sequence

from coordinator.checkpoints.orders import Orders
from coordinator.core.work import Report
from coordinator.membership.progress import Progress, mean_loss
from coordinator.records.notes import JobWarnings
from coordinator.records.store import Store
from coordinator.schedule.rounds import Rounds
from coordinator.training.epochs import Epochs
from coordinator.training.step_watch import StepWatch
from psrpc.core.commands import Command, Decision, RoundsAhead


class Decisions:
    """The decisions of one generation after another. Not thread-safe.

    Attributes:
        closed: whether no more decisions are made, nor anything done that needs one.
        held: whether no more decisions are made because the generation ends as soon as no shard
            applies rounds any more.
    """

    def __init__(
        self,
        store: Store,
        send: Callable[[Command], None],
        warnings: JobWarnings,
        progress: Progress,
        epochs: Epochs,
        watch: StepWatch,
    ) -> None:
        """``send`` reaches every shard."""
        self._store = store
        self._send = send
        self._warnings = warnings
        self._progress = progress
        self._epochs = epochs
        self._watch = watch
        self.closed = False
        self.held = False
        self._undecided: Decision | RoundsAhead | None = None
        """A decision that waits for the disk."""

    @property
    def over(self) -> bool:
        """Whether this generation decides no more rounds."""
        return self.closed or self.held

    @property
    def waits(self) -> bool:
        """Whether a decision waits for the disk."""
        return self._undecided is not None

    def begin(self) -> None:
        """Begins a generation."""
        self._undecided, self.closed, self.held = None, False, False

    def halt(self) -> None:
        """Ends the generation."""
        self._undecided, self.closed = None, True

    def close(self, orders: Orders) -> None:
        """Stops deciding, so that the final state can be saved."""
        if isinstance(self._undecided, Decision):
            orders.withdraw(self._undecided.snapshots)
        self.halt()

    def hold(self, rounds: Rounds, worker: str) -> bool:
        """Stops deciding if rounds were decided ahead and a departed ``worker`` has an attempt in
        one, or in the open round, whose micro-batch no other worker would take; returns whether
        that is so."""
        held = bool(rounds.ahead) and rounds.holds(worker)
        self.held = self.held or held
        return held

    def missed(self, rounds: Rounds) -> list[Command]:
        """Returns the rounds decided ahead that a shard may have missed."""
        unsent = self._undecided.decisions if isinstance(self._undecided, RoundsAhead) else ()
        sent = tuple(one for one in rounds.ahead.decisions.decisions if one not in unsent)
        return [RoundsAhead(sent)] if sent and not self.held else []

    def retry(self, rounds: Rounds, orders: Orders, now: float) -> None:
        """Tries again to store the decision that the disk refused."""
        if isinstance(self._undecided, RoundsAhead):
            self._store_ahead()
        elif self._undecided is not None:
            self.decide(rounds, orders, now)

    def look_ahead(self, rounds: Rounds, orders: Orders, now: float) -> str:
        """Decides rounds ahead if that is possible. Returns why no round may be leased; empty if
        one may."""
        if self._undecided is None and not self.over and not orders.saving.owes:
            # A round that ends at a checkpoint's step is not decided ahead: its decision orders the
            # checkpoint.
            ends_at = orders.saving.orders_at(rounds.round)
            before = None if ends_at is None else ends_at - 1
            self._undecided = rounds.look_ahead(before, self._progress.speeds(), now)
            self._store_ahead()
        if isinstance(self._undecided, RoundsAhead):
            return "the decisions of the next rounds to be stored"
        return "another generation to begin" if self.held else ""

    def decide(self, rounds: Rounds, orders: Orders, now: float) -> None:
        """Decides the open round and those after it, for as long as they are complete."""
        while rounds.complete and not self.over:
            if not self._decide(rounds, orders):
                return
            step = rounds.round
            self._progress.stepped(1, now)
            self._epochs.finished(rounds.take_finished_epochs(), step)
            self._warnings.take(orders)

    def _decide(self, rounds: Rounds, orders: Orders) -> bool:
        """Decides the open round; returns False if its decision cannot be stored."""
        if isinstance(self._undecided, RoundsAhead):
            # Decisions are stored in the order in which they were made.
            self._store_ahead()
            if self._undecided is not None:
                return False
        step, opened = rounds.round + 1, rounds.ahead.opened
        if opened is not None:
            decision = opened.decision
            orders.saving.stepped(rounds.round, step, [])
        else:
            decision = self._made(rounds, orders, step)
            if not self._stored(decision):
                return False
            self._undecided = None
        reports: Sequence[Report] = rounds.reports()
        rounds.close(decision)
        if opened is None:
            self._send(decision)
        if any(not report.skipped for report in reports):
            self._watch.step_done(step, mean_loss(reports), 0)
        return True

    def _made(self, rounds: Rounds, orders: Orders, step: int) -> Decision:
        if not isinstance(self._undecided, Decision):
            trained = rounds.ends_job
            ended = [rounds.span.epoch] if rounds.ends_epoch else []
            orders.saving.stepped(rounds.round, step, ended)
            self._undecided = rounds.decide(orders.with_decision(step, trained))
        return self._undecided

    def _store_ahead(self) -> None:
        decided = self._undecided
        if isinstance(decided, RoundsAhead) and self._stored(decided):
            self._undecided = None
            self._send(decided)

    def _stored(self, decided: Decision | RoundsAhead) -> bool:
        """Stores a decision before it is sent: a restarted coordinator must not decide
        otherwise."""
        try:
            if isinstance(decided, Decision):
                self._store.put_decision(decided)
            else:
                self._store.put_ahead(decided)
        except sqlite3.Error as error:
            first = decided if isinstance(decided, Decision) else decided.decisions[0]
            self._warnings.add(f"round {first.round} waits: its decision cannot be stored: {error}")
            return False
        return True
