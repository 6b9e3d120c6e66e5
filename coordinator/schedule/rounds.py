"""Rounds of synchronous training: a barrier defined by the data, not by the workers.

Round r turns version r into r + 1 on every shard. It has the next K undone micro-batches of the
epoch's permutation; an epoch's last round may have fewer. Rounds are numbered through the job. Each
worker that asks gets a micro-batch of the open round. An attempt is committed once all shards hold
it, and the first committed attempt of a micro-batch counts. Once every micro-batch has one, the
round's decision names them.

Stragglers. With ``speculate`` an idle worker gets a second attempt of a micro-batch that another
worker has held for longer than attempts usually take; the first commit counts, so the result is the
same bit for bit. With ``aggregate`` M < K (Chen et al. 2016, "Revisiting Distributed Synchronous
SGD", section 3) a round takes the first M commits of K open micro-batches. Unlike there, the others
stay open and count in a later round, with the staleness that they have by then. No more than K are
ever open, so a round waits again once more than K - M of them are late.

Pure: time is passed in, and nothing locks; the engine's loop is the only caller.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping, Sequence

from coordinator.core.work import Report, Round, TrainingPosition, TrainingWork, Wait
from coordinator.schedule.crew import Crew
from coordinator.schedule.decided_ahead import DecidedAhead
from coordinator.schedule.micro_batch import Tally
from coordinator.schedule.open_batches import NOTHING_BELOW, BatchSchedule, OpenBatches
from coordinator.schedule.open_round import OpenRound
from coordinator.schedule.round_commits import RoundCommits
from coordinator.schedule.round_leases import RoundLeases
from coordinator.schedule.speculation import SlowAttempts
from psrpc.core.commands import Attempt, Decision, RoundsAhead, SnapshotOrder
from psrpc.core.intervals import IntervalSet
from psrpc.core.policy import Policy


class Rounds(BatchSchedule):
    """The open round and its attempts. Not thread-safe.

    To decide: while ``complete``, make the decision with :meth:`decide`, store it, and only then
    :meth:`close` the round. That opens the next, which may be complete at once."""

    def __init__(
        self,
        *,
        records: int,
        batch_size: int,
        epochs: int,
        policy: Policy,
        generation: int,
        done: Mapping[int, IntervalSet] | None = None,
        partial: Mapping[int, IntervalSet] | None = None,
        first_round: int = 0,
        first_attempt: int = 1,
        skipped_records: int = 0,
        until_epoch: int | None = None,
        limit: int | None = None,
        tally: Tally | None = None,
        exact: bool = True,
    ) -> None:
        """``first_round`` is the version the shards start from, ``done`` the positions per epoch
        that all shards have, ``partial`` those that only some have. ``skipped_records`` of the
        ``done`` records took no part. Only rounds of epochs before ``until_epoch`` are opened, and
        none once ``limit`` batches are done or under way; the last round may exceed the limit. For
        ``exact`` see :class:`DecidedAhead`."""
        done = done or {}
        super().__init__(
            OpenBatches(
                records=records,
                batch_size=batch_size,
                epochs=epochs,
                done=done,
                until_epoch=until_epoch,
                limit=limit,
            )
        )
        self._policy = policy
        self._generation = generation
        self._open = OpenRound(policy, batch_size, partial)
        self._tally = tally if tally is not None else Tally()
        self._round = first_round
        self._rounds_left = sum(self._rounds_of(epoch) for epoch in range(epochs))
        self._decided: deque[Decision] = deque(maxlen=policy.open if policy.backups else 1)
        self._finished_epochs: list[int] = []
        self._slow = SlowAttempts(policy, self._tally)
        self.ahead = DecidedAhead(policy, generation, crew := Crew(policy.taken), exact)
        self._leases = RoundLeases(self._open, self._slow, policy, self._tally, first_attempt, crew)
        examples = sum(len(positions) for positions in done.values()) - skipped_records
        self._commits = RoundCommits(
            self._open, self.ahead, self._slow, self._tally, examples, backups=policy.backups
        )
        self._open.fill(self._todo)

    @property
    def round(self) -> int:
        """The open round; equals the version that its attempts are computed from."""
        return self._round

    @property
    def total_rounds(self) -> int:
        """Rounds of the whole job if the policy stays in force."""
        return self._round + self._rounds_left

    @property
    def idle(self) -> bool:
        """Whether no worker holds an uncommitted attempt."""
        return not self._open.awaited and not self.ahead

    @property
    def drained(self) -> bool:
        """Whether no round is in flight and none will begin."""
        return self._open.drained and not self.ahead

    @property
    def held(self) -> bool:
        """Whether every round that begins below the limit is decided."""
        return self._todo.limited and not (self._open or self.ahead)

    @property
    def span(self) -> TrainingPosition:
        """The training position; the global step counts rounds."""
        batches = self._todo.batches + self._open.commits
        return TrainingPosition(
            self._round, self.total_rounds, self._epoch, batches, self._commits.examples
        )

    @property
    def decisions(self) -> list[Decision]:
        """The decisions of this generation that a shard may lack, oldest first. With backup
        workers, several rounds may be decided before a shard applies the first. All of their
        attempts are staged on all shards, so there are no more rounds than a shard stages
        micro-batches."""
        return list(self._decided)

    @property
    def ends_epoch(self) -> bool:
        """Whether the open round is the last of its epoch."""
        return bool(self._open) and self._open.takes == self._todo.left(self._epoch)

    @property
    def ends_job(self) -> bool:
        """Whether the open round is the last of the job."""
        return self.ends_epoch and self._todo.total - self._todo.batches == self._open.takes

    @property
    def complete(self) -> bool:
        """Whether the open round has as many committed micro-batches as it takes."""
        return self._open.complete

    def drain(self) -> None:
        """Begins no more rounds; a round in flight is still decided."""
        self._open.drain()

    def idle_worker(self, worker: str) -> None:
        """Does nothing: rounds wait for micro-batches."""

    def tick(self, now: float) -> None:
        """Counts the open round as overdue, once, if it exceeds its deadline."""
        if self._open.awaited:
            self._slow.deadline.begin(now)
        if not self.complete:
            self._slow.deadline.look(now)

    def stragglers(self, now: float) -> list[str]:
        """Names the workers that are late with the open round, and their micro-batches; empty
        before its deadline."""
        return [] if self.complete else self._slow.deadline.stragglers(self._open.micros, now)

    def look_ahead(
        self, before: int | None, weights: Mapping[str, float], now: float
    ) -> RoundsAhead | None:
        """Decides rounds ahead if possible, but none from number ``before`` on; see
        :meth:`DecidedAhead.extend`. The caller stores them before it leases any part of them."""
        decided = self.ahead.extend(
            self._round, self._open, self._todo, self._leases, before, weights, now
        )
        if decided is not None and self._open.untouched:
            self._open_next()
        return decided

    def lease(self, worker: str, now: float, received: int, workers: int) -> TrainingWork:
        """Leases attempts of rounds that are decided ahead, if there are any and the open round has
        nothing else for ``worker``; otherwise see :meth:`RoundLeases.lease`."""
        opened = self.ahead.opened is not None
        if self.ahead and (opened or not (self._open.has_open or self._open.holds(worker))):
            return self.ahead.lease(worker, received) or Wait(self.waiting_for())
        chosen = self._leases.lease(worker, now, self._round, workers)
        if chosen.attempt is None:
            return Wait(self.waiting_for(), chosen.until)
        decision, newest = self._decided[-1] if self._decided else None, self._policy.backups
        more = newest, chosen.last, chosen.ahead, chosen.beside
        return Round(self._round, chosen.attempt, decision, *more)

    def commit(self, worker: str, round_number: int, report: Report, now: float) -> Report | None:
        """Commits an attempt that all shards hold, and returns its report if it counts. The first
        commit of a micro-batch counts; one of a revoked attempt or of a decided round does not.
        With backup workers, a commit of a decided round counts if its micro-batch is still open;
        ``round_number`` is then the newest round that the worker knew.

        Raises:
            InvalidArgument: no such round, micro-batch or attempt was handed out.
        """
        self.tick(now)
        return self._commits.commit(worker, round_number, report, self._round, now)

    def decide(self, snapshots: tuple[SnapshotOrder, ...] = ()) -> Decision:
        """Returns the decision of the open round, which must be complete. Changes nothing; later
        commits do not change the decision."""
        assert self.complete
        attempts = tuple(Attempt(report.batch, report.attempt) for report in self.reports())
        return Decision(self._generation, self._round, attempts, snapshots)

    def reports(self) -> list[Report]:
        """Returns the committed reports that the open round takes, in batch-id order, with their
        staleness in it."""
        return self._open.reports(self._round)

    def close(self, decision: Decision) -> None:
        """Closes the round, whose ``decision`` is stored, and opens the next."""
        assert decision == self.decide(decision.snapshots)
        epoch = self._epoch
        before = self._rounds_of(epoch)
        named, done = self._open.close()
        for batch in done:
            if self._todo.finish(batch):
                self._finished_epochs.append(batch.epoch)
        self._rounds_left += self._rounds_of(epoch) - before
        for micro in named:
            self._slow.left(micro)
        self._decided.append(decision)
        self._round += 1
        self._slow.deadline.restart()
        self._tally.summed += self.ahead.closed()
        self._open_next()

    def report(self, worker: str, reports: Sequence[Report], now: float) -> list[Report]:
        """Commits attempts of rounds that are decided ahead; returns the reports that count."""
        self.tick(now)
        return self._commits.report(worker, reports)

    def holds(self, worker: str) -> bool:
        """Whether ``worker`` has an uncommitted attempt."""
        return self._open.holds(worker) or bool(self.ahead.held_by([worker]))

    def revoke(self, worker: str) -> list[Attempt]:
        """Takes back the uncommitted attempts of ``worker``; others get their micro-batches only
        after :meth:`release`."""
        self._slow.forget(worker)
        self.ahead.crew.left(worker)
        return self._open.revoke(worker)

    def release(self, worker: str) -> int:
        """Reopens the micro-batches taken back from ``worker``, which shards refuse by now, to
        other workers; returns their number."""
        return self._open.release(worker)

    def hand_over(self, stuck: Collection[str]) -> list[str]:
        """Allows second attempts of the micro-batches of ``stuck`` workers; the first commit
        counts. Returns the workers to dismiss: with rounds decided ahead, all stuck ones that hold
        an attempt; else, where stuck workers hold both attempts that shards have room for, the one
        with the newer attempt."""
        self._leases.stuck = stuck = frozenset(stuck)
        if self.ahead:
            return sorted(worker for worker in stuck if self.holds(worker))
        return self._open.twice_left_by(stuck)

    def take_finished_epochs(self) -> list[int]:
        """Returns the epochs whose last round was decided since the last call."""
        epochs, self._finished_epochs = self._finished_epochs, []
        return epochs

    def waiting_for(self) -> str:
        """Says which commits the round waits for; empty when a micro-batch is open."""
        if self.finished:
            return ""
        if self.held:
            return NOTHING_BELOW
        return self._open.waiting_for(self._round)

    def _allowed(self) -> None:
        if not self._open:
            self._open_next()

    def _open_next(self) -> None:
        ahead = self.ahead.next()
        if ahead is not None:
            self._open.adopt(ahead.micros)
        else:
            self._open.fill(self._todo)

    @property
    def _epoch(self) -> int:
        """The epoch of the open round, or of the next one."""
        epoch = self._open.epoch
        return self._todo.epoch if epoch is None else epoch

    def _rounds_of(self, epoch: int) -> int:
        """Returns how many rounds are left in ``epoch``."""
        return -(-self._todo.left(epoch) // self._policy.taken)
