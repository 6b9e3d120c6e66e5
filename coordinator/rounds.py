"""Rounds of synchronous training: the barrier, defined by the data and not by who computes.

Round r turns version r into r + 1 on every shard. It is made of the next K micro-batches of the
epoch's permutation; rounds never cross an epoch, so an epoch's last round may have fewer, and are
numbered through the whole job. Whoever asks gets a micro-batch of the open round. The first
attempt of a micro-batch that all shards hold and that is committed counts; when every micro-batch
has one, the round is decided by naming them.

Pure: time comes in, and nothing here locks; the engine's loop is the only caller.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from coordinator.work import Attempt, Decision, Report, Round, SnapshotOrder, Span, Wait
from psrpc.batch import BatchId, batches_per_epoch, cut_batch
from psrpc.errors import InvalidArgument


@dataclass(slots=True)
class _MicroBatch:
    """``attempts``: number to the worker that holds it. Those that were taken back are in
    ``superseded``; ``revoked`` are the workers that shards may still take such a one from."""

    batch: BatchId
    attempts: dict[int, str] = field(default_factory=dict)
    superseded: set[int] = field(default_factory=set)
    revoked: set[str] = field(default_factory=set)
    committed: Report | None = None

    def attempt_of(self, worker: str) -> int | None:
        return next((n for n, holder in self.attempts.items() if holder == worker), None)

    @property
    def open(self) -> bool:
        return self.committed is None and not self.attempts and not self.revoked


@dataclass(frozen=True, slots=True)
class Committed:
    """What a commit did: ``counted`` is the report if it is the first of its micro-batch."""

    counted: Report | None
    reason: str


class Rounds:
    """The open round and its attempts. Not thread-safe.

    To decide: when ``complete``, make the decision with :meth:`decide`, store it, and only then
    :meth:`close` the round, which opens the next.
    """

    def __init__(
        self,
        *,
        records: int,
        batch_size: int,
        epochs: int,
        replicas: int,
        generation: int,
        first_round: int = 0,
        first_attempt: int = 1,
        skipped_records: int = 0,
    ) -> None:
        """``first_round`` is the version the shards start from; the rounds before it are done,
        and ``skipped_records`` records in them took no part."""
        self._records = records
        self._batch_size = batch_size
        self._epochs = epochs
        self._replicas = replicas
        self._generation = generation
        self._per_epoch = batches_per_epoch(records, batch_size)
        self._rounds_per_epoch = -(-self._per_epoch // replicas)
        self._next_attempt = first_attempt
        self._round = first_round
        self._last: Decision | None = None
        self._finished_epochs: list[int] = []
        epoch, within = divmod(first_round, self._rounds_per_epoch)
        in_epoch = min(within * replicas, self._per_epoch)
        self._batches = epoch * self._per_epoch + in_epoch
        self._examples = epoch * records + min(in_epoch * batch_size, records) - skipped_records
        self._open = self._cut()

    @property
    def round(self) -> int:
        """The open round; equals the version that its attempts are computed from."""
        return self._round

    @property
    def total_rounds(self) -> int:
        """Rounds of the whole job."""
        return self._epochs * self._rounds_per_epoch

    @property
    def idle(self) -> bool:
        """Whether nobody holds an attempt that is not committed."""
        return all(m.committed is not None or not m.attempts for m in self._open)

    @property
    def finished_epochs(self) -> list[int]:
        """All epochs whose rounds are decided."""
        return list(range(self._round // self._rounds_per_epoch))

    @property
    def finished(self) -> bool:
        """Whether every round of the job is decided."""
        return self._round == self.total_rounds

    @property
    def span(self) -> Span:
        """Where training stands; the global step counts rounds."""
        epoch = min(self._round // self._rounds_per_epoch, self._epochs - 1)
        return Span(self._round, self.total_rounds, epoch, self._batches, self._examples)

    @property
    def last_decision(self) -> Decision | None:
        """The decision before the open round, None in the first round of a generation."""
        return self._last

    @property
    def ends_epoch(self) -> bool:
        """Whether the open round is the last of its epoch."""
        return (self._round + 1) % self._rounds_per_epoch == 0

    @property
    def complete(self) -> bool:
        """Whether every micro-batch of the open round has a committed attempt."""
        return bool(self._open) and all(m.committed is not None for m in self._open)

    def lease(self, worker: str, _now: float, _received: int, _workers: int) -> Round | Wait:
        """A micro-batch of the open round: the one ``worker`` holds, or else an open one."""
        for micro in self._open:
            number = micro.attempt_of(worker)
            if number is not None and micro.committed is None:
                return self._work(micro, number)
        for micro in self._open:
            if micro.open:
                number = self._next_attempt
                self._next_attempt += 1
                micro.attempts[number] = worker
                return self._work(micro, number)
        return Wait(self.waiting_for())

    def commit(self, worker: str, round_number: int, report: Report) -> Committed:
        """All shards hold this attempt. The first one of a micro-batch counts; a commit of one
        that was taken back, or of a round that is decided already, changes nothing.

        Raises:
            InvalidArgument: no such round, micro-batch or attempt was handed out.
        """
        if round_number < self._round:
            return Committed(None, f"round {round_number} is decided already")
        micro = next((m for m in self._open if m.batch == report.batch), None)
        if micro is not None and report.attempt in micro.superseded:
            return Committed(None, f"attempt {report.attempt} was superseded")
        if round_number > self._round or micro is None or report.attempt not in micro.attempts:
            raise InvalidArgument(
                f"commit of attempt {report.attempt} of {report.batch} in round {round_number} "
                f"by {worker}: no such attempt was handed out; the open round is {self._round}"
            )
        if micro.committed is not None:
            return Committed(None, f"attempt {micro.committed.attempt} was committed first")
        micro.committed = report
        self._batches += 1
        self._examples += 0 if report.skipped else report.batch.count
        return Committed(report, self.waiting_for())

    def decide(self, snapshots: tuple[SnapshotOrder, ...] = ()) -> Decision:
        """The decision of the open round, which must be complete. Changes nothing."""
        assert self.complete
        attempts = tuple(
            Attempt(m.batch, m.committed.attempt) for m in self._open if m.committed is not None
        )
        return Decision(self._generation, self._round, attempts, snapshots)

    def reports(self) -> list[Report]:
        """The committed reports of the open round, in batch-id order."""
        return [m.committed for m in self._open if m.committed is not None]

    def close(self, decision: Decision) -> None:
        """Opens the next round, now that ``decision`` is stored."""
        assert decision == self.decide(decision.snapshots)
        if self.ends_epoch:
            self._finished_epochs.append(self._round // self._rounds_per_epoch)
        self._last = decision
        self._round += 1
        self._open = self._cut()

    def report(self, _worker: str, _reports: Sequence[Report], _now: float) -> list[Report]:
        """Nothing: in a round a batch is done by its commit."""
        return []

    def holds(self, worker: str) -> bool:
        """Whether ``worker`` has an attempt that is not committed."""
        return any(m.committed is None and m.attempt_of(worker) is not None for m in self._open)

    def revoke(self, worker: str) -> list[Attempt]:
        """Takes back the attempts that ``worker`` holds and has not committed. Nobody else gets
        their micro-batches before :meth:`release`."""
        taken = []
        for micro in self._open:
            number = micro.attempt_of(worker)
            if number is not None and micro.committed is None:
                del micro.attempts[number]
                micro.superseded.add(number)
                micro.revoked.add(worker)
                taken.append(Attempt(micro.batch, number))
        return taken

    def release(self, worker: str) -> int:
        """No shard takes anything from ``worker`` any more: others may get what it had. How many
        micro-batches that are."""
        taken = [micro for micro in self._open if worker in micro.revoked]
        for micro in taken:
            micro.revoked.remove(worker)
        return len(taken)

    def take_finished_epochs(self) -> list[int]:
        """Epochs whose last round was decided since the last call."""
        epochs, self._finished_epochs = self._finished_epochs, []
        return epochs

    def waiting_for(self) -> str:
        """Which commits the round waits for, in words; empty when a micro-batch is open."""
        if not self._open or any(m.open for m in self._open):
            return ""
        if self.complete:
            return f"the decision of round {self._round} to be stored"
        holders = sorted(
            {h for m in self._open if m.committed is None for h in m.attempts.values()}
            | {w for m in self._open if m.committed is None for w in m.revoked}
        )
        have = sum(m.committed is not None for m in self._open)
        return (
            f"round {self._round} has {have} of {len(self._open)} micro-batches; "
            f"awaited: {', '.join(holders)}"
        )

    def _cut(self) -> list[_MicroBatch]:
        if self.finished:
            return []
        epoch, within = divmod(self._round, self._rounds_per_epoch)
        first = within * self._replicas
        return [
            _MicroBatch(cut_batch(epoch, index, self._records, self._batch_size))
            for index in range(first, min(first + self._replicas, self._per_epoch))
        ]

    def _work(self, micro: _MicroBatch, number: int) -> Round:
        return Round(self._round, Attempt(micro.batch, number), self._last)
