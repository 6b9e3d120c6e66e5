"""Decides rounds before their gradients are there, so that no round waits for commits.

Where rounds are short, several are decided at a time: which micro-batches each has, and which
worker's attempt of them counts. Shards receive these decisions in advance, and workers all their
attempts, so that a step takes one exchange with each shard and no call of the coordinator. Workers
report later, several attempts at a time, and rounds are closed as the reports arrive.

Such a decision never changes. If a worker with an attempt in one of these rounds leaves, all shards
first drop the rounds that they have not applied, and then another generation begins.

Pure: time is passed in, and nothing locks; the engine's loop is the only caller.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from coordinator.core.work import Report, RoundsLease
from coordinator.schedule.crew import Crew
from coordinator.schedule.micro_batch import Held, MicroBatch
from coordinator.schedule.open_batches import OpenBatches
from coordinator.schedule.open_round import OpenRound
from coordinator.schedule.pace import TASK_S, Pace
from coordinator.schedule.round_leases import RoundLeases
from psrpc.core.batch import BatchId
from psrpc.core.commands import Attempt, Decision, RoundsAhead
from psrpc.core.policy import Policy

LEAST_ROUNDS = 2
"""Rounds that must fit into :data:`coordinator.schedule.pace.TASK_S` to be decided ahead. Longer
rounds are divided as workers ask: one that is done takes micro-batches that others have not
begun."""

LONG_ROUND_S = 2.0
"""Longest round, in seconds, that is decided ahead where no worker has two of its micro-batches, or
where workers sum those that they have."""

MOST_ATTEMPTS = 2048
"""Most attempts that are decided at once: they go into one message."""


@dataclass(frozen=True, slots=True)
class RoundAhead:
    """A round that is decided ahead, with its micro-batches in batch-id order."""

    decision: Decision
    micros: tuple[MicroBatch, ...]

    @property
    def number(self) -> int:
        """The round's number, which is also the version that its attempts are computed from."""
        return self.decision.round


class DecidedAhead:
    """The rounds that are decided ahead: some after the open one, and perhaps the open one itself.
    Not thread-safe.

    Attributes:
        crew: the workers among which rounds are divided.
        opened: the open round if it was decided ahead, or None.
    """

    def __init__(
        self, policy: Policy, generation: int, crew: Crew | None = None, exact: bool = True
    ) -> None:
        """Unless ``exact``, workers sum their gradients of a round that is decided ahead."""
        self.crew = crew or Crew(policy.taken)
        self.opened: RoundAhead | None = None
        self._generation = generation
        self._taken = policy.taken
        # These settings assign micro-batches by the time at which workers ask or commit.
        self._allowed = not (policy.backups or policy.balance or policy.speculate)
        self._exact = exact
        self._queue: deque[RoundAhead] = deque()
        self._pace = Pace()
        self._closed = 0
        self._micros: dict[BatchId, MicroBatch] = {}
        self._held: dict[str, list[tuple[int, Attempt, MicroBatch]]] = {}
        """By worker, its attempts: round, attempt, micro-batch."""

    def __bool__(self) -> bool:
        """Whether any round is decided ahead."""
        return self.opened is not None or bool(self._queue)

    def __iter__(self) -> Iterator[RoundAhead]:
        """Iterates over these rounds in order, the open one first if it is one of them."""
        if self.opened is not None:
            yield self.opened
        yield from self._queue

    @property
    def batches(self) -> int:
        """Number of micro-batches of the rounds after the open one."""
        return sum(len(ahead.micros) for ahead in self._queue)

    @property
    def decisions(self) -> RoundsAhead:
        """The decisions that a shard may have missed."""
        return RoundsAhead(tuple(ahead.decision for ahead in self))

    def extend(
        self,
        number: int,
        opened: OpenRound,
        todo: OpenBatches,
        leases: RoundLeases,
        before: int | None,
        weights: Mapping[str, float],
        now: float,
    ) -> RoundsAhead | None:
        """Decides more rounds if that is possible now, and returns their decisions, or None. If no
        worker has begun the open round, which has this ``number``, it is the first of them.

        Args:
            todo: has the batches of later rounds.
            leases: gives numbers to attempts.
            before: the first round that must not be decided ahead, or None.
            weights: the speeds of workers, in any unit, where known.
        """
        epoch, fresh = opened.epoch, opened.untouched
        if epoch is None or opened.drains or (opened.has_open and not fresh) or opened.revoked:
            return None
        first = number + len(self._queue) + (not fresh)
        left = todo.left(epoch) - self.batches - (0 if fresh else len(opened.micros))
        # The last round may go beyond the limit, and none begins after it.
        rounds = min(self.room(left, now), -(-todo.room // self._taken) + fresh)
        if before is not None:
            rounds = min(rounds, before - first)
        if rounds <= 0:
            return None
        attempt = leases.reserve(rounds * self._taken)
        batches = [micro.batch for micro in opened.micros] if fresh else []
        return self.decide(rounds, first, batches, todo, attempt, weights, now)

    def decide(
        self,
        rounds: int,
        first: int,
        batches: Sequence[BatchId],
        todo: OpenBatches,
        attempt: int,
        weights: Mapping[str, float],
        now: float,
    ) -> RoundsAhead:
        """Decides this many rounds. They have the numbers from ``first`` on, the micro-batches of
        ``batches`` and then of ``todo``, and attempts numbered from ``attempt`` on."""
        given = deque(batches)
        decisions = []
        for later in range(first, first + rounds):
            micros, attempts = [], []
            for worker in self.crew.divide(self._taken, weights):
                batch = given.popleft() if given else todo.take()
                assert batch is not None
                micro = MicroBatch(batch, {attempt: Held(worker, now, later)})
                attempts.append(Attempt(batch, attempt))
                self._held.setdefault(worker, []).append((later, attempts[-1], micro))
                self._micros[batch] = micro
                micros.append(micro)
                attempt += 1
            decisions.append(Decision(self._generation, later, tuple(attempts)))
            self._queue.append(RoundAhead(decisions[-1], tuple(micros)))
        return RoundsAhead(tuple(decisions))

    def closed(self) -> bool:
        """Notes that the open round is closed, for the pace. Returns whether a worker was to sum
        gradients of it."""
        self._closed += 1
        if self._exact or self.opened is None:
            return False
        held = [one.worker for micro in self.opened.micros for one in micro.attempts.values()]
        return len(held) > len(set(held))

    def next(self) -> RoundAhead | None:
        """Opens and returns the next of these rounds; None if there is none."""
        for micro in self.opened.micros if self.opened is not None else ():
            del self._micros[micro.batch]
        self.opened = self._queue.popleft() if self._queue else None
        return self.opened

    def lease(self, worker: str, received: int) -> RoundsLease | None:
        """Returns the uncommitted attempts of ``worker`` numbered above ``received``, which have
        not reached it; None if there are none."""
        attempts = tuple(
            (number, attempt)
            for number, attempt, _ in self._uncommitted(worker)
            if attempt.number > received
        )
        return RoundsLease(attempts) if attempts else None

    def commit(self, worker: str, report: Report) -> MicroBatch | None:
        """Marks the reported attempt as committed and returns its micro-batch; None if the attempt
        is unknown, another worker's, or too late."""
        micro = self._micros.get(report.batch)
        if micro is None or micro.committed is not None:
            return None
        held = micro.attempts.get(report.attempt)
        if held is None or held.worker != worker:
            return None
        micro.committed, micro.base = replace(report, staleness=0), held.round
        return micro

    def held_by(self, workers: Collection[str]) -> list[str]:
        """Returns those of ``workers`` that hold an uncommitted attempt, sorted."""
        return sorted(worker for worker in workers if self._uncommitted(worker))

    def _uncommitted(self, worker: str) -> list[tuple[int, Attempt, MicroBatch]]:
        held = [one for one in self._held.get(worker, ()) if one[2].committed is None]
        if held:
            self._held[worker] = held
        else:
            self._held.pop(worker, None)
        return held

    def room(self, left: int, now: float) -> int:
        """Returns how many more rounds may be decided now, of ``left`` batches of an epoch."""
        self._measure(now)
        workers = len(self.crew.names)
        if not self._allowed or not workers:
            return 0
        size, round_s = self._pace.next_size(workers), self._pace.batch_s
        # A worker has one micro-batch of a round at most, so none could help another. Or the bytes
        # that a sum saves count for more than such help.
        fixed = self._taken <= self.crew.lanes(workers) or not self._exact
        if fixed and round_s is not None and round_s <= LONG_ROUND_S:
            size = max(size, LEAST_ROUNDS)
        # A checkpoint, a policy change and a stop wait for all decided rounds: few if they are
        # long.
        most = size if round_s is None or round_s * LEAST_ROUNDS <= TASK_S else 0
        if size < LEAST_ROUNDS or len(self._queue) > most:
            return 0
        # The last round of an epoch may order a snapshot.
        return min(size, MOST_ATTEMPTS // self._taken, (left - 1) // self._taken)

    def _measure(self, now: float) -> None:
        if self._pace.since is None:
            self._pace.since, self._closed = now, 0
        elif self._closed:
            self._pace.measure(self._closed, now)
            self._closed = 0
