"""Decides rounds before their gradients are there, so that no commit stands between two rounds.

Where rounds are short, several are decided at a time: which micro-batches each has, and which
worker's attempt counts. Shards get these decisions ahead and workers all their attempts, so that a
step takes one exchange with each shard and nothing of the coordinator. The reports come later,
several at a time, and the rounds are counted as they come.

Such a decision is never changed. If a worker leaves that has an attempt in one, all shards first
forget what they have not applied, and then another generation begins.

Pure: time is passed in, and nothing locks; the engine's loop is the only caller.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from coordinator.core.work import Report, RoundsLease
from coordinator.schedule.micro_batch import Held, MicroBatch
from coordinator.schedule.open_batches import OpenBatches
from coordinator.schedule.open_round import OpenRound
from coordinator.schedule.pace import TASK_S, Pace
from coordinator.schedule.round_leases import RoundLeases
from psrpc.core.batch import BatchId
from psrpc.core.commands import Attempt, Decision, RoundsAhead
from psrpc.core.policy import Policy

LEAST_ROUNDS = 2
"""Rounds that have to fit into :data:`coordinator.schedule.pace.TASK_S`: in longer ones, workers
that are done take what others have not begun."""

LONG_ROUND_S = 2.0
"""Longest round of which no worker has more than one micro-batch that is decided ahead."""

MOST_ATTEMPTS = 2048
"""Most attempts that are decided at once: they go into one message."""


@dataclass(frozen=True, slots=True)
class RoundAhead:
    """A round that is decided ahead, with its micro-batches in batch-id order."""

    decision: Decision
    micros: tuple[MicroBatch, ...]

    @property
    def number(self) -> int:
        """The version that its attempts are computed from."""
        return self.decision.round


class Crew:
    """The workers of a generation that train. Not thread-safe."""

    def __init__(self, needed: int) -> None:
        """``needed`` workers can do without the others."""
        self._needed = needed
        self._asked: dict[str, bool] = {}
        """Whether those that have asked for work can compute rounds that are decided ahead."""
        self._worked: set[str] = set()

    @property
    def names(self) -> list[str]:
        """Those among which rounds are divided; empty while one cannot take part, or is needed and
        has not done a micro-batch yet, which may take long."""
        worked = self._asked.keys() & self._worked
        ready = len(worked) >= min(len(self._asked), self._needed)
        return sorted(worked) if ready and all(self._asked.values()) else []

    def asks(self, worker: str, able: bool) -> None:
        """Notes that ``worker`` asks for work; ``able``: of rounds that are decided ahead."""
        self._asked[worker] = able

    def worked(self, worker: str) -> None:
        """Notes that ``worker`` has done a micro-batch."""
        self._worked.add(worker)

    def left(self, worker: str) -> None:
        """Forgets a worker."""
        self._asked.pop(worker, None)
        self._worked.discard(worker)


class DecidedAhead:
    """The rounds after the open one that are decided already, and whether the open one is. Not
    thread-safe.

    Attributes:
        crew: among which they are divided.
        opened: the open round, if it was decided ahead.
    """

    def __init__(self, policy: Policy, generation: int) -> None:
        self.crew = Crew(policy.taken)
        self.opened: RoundAhead | None = None
        self._generation = generation
        self._taken = policy.taken
        # The others choose by the time at which workers come.
        self._allowed = not (policy.backups or policy.balance or policy.speculate)
        self._queue: deque[RoundAhead] = deque()
        self._pace = Pace()
        self._closed = 0
        self._due: dict[str, float] = {}
        """When each worker's next micro-batch is due, in a time that passes with its speed."""
        self._micros: dict[BatchId, MicroBatch] = {}
        self._held: dict[str, list[tuple[int, Attempt, MicroBatch]]] = {}
        """By worker, the round of each of its attempts."""

    def __bool__(self) -> bool:
        """Whether there are such rounds."""
        return self.opened is not None or bool(self._queue)

    def __iter__(self) -> Iterator[RoundAhead]:
        """The open round, if it is one, and those after it."""
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
        """Decides more rounds if that is possible now: from the open one on, of that ``number``,
        if no worker has begun it.

        Args:
            todo: has the batches of later rounds.
            leases: numbers attempts.
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
        """Decides that many rounds from the ``first`` on, of ``batches`` and then those of
        ``todo``, with attempts from number ``attempt`` on."""
        given = deque(batches)
        decisions = []
        for later in range(first, first + rounds):
            micros, attempts = [], []
            for worker in self._divide(weights):
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

    def closed(self) -> None:
        """Notes that a round is closed, for the pace."""
        self._closed += 1

    def next(self) -> RoundAhead | None:
        """Opens the next of these rounds, if there is one."""
        for micro in self.opened.micros if self.opened is not None else ():
            del self._micros[micro.batch]
        self.opened = self._queue.popleft() if self._queue else None
        return self.opened

    def lease(self, worker: str, received: int) -> RoundsLease | None:
        """Returns the attempts of ``worker`` above ``received``, those that have not reached it."""
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
        """Returns those of the workers that hold an attempt."""
        return sorted(worker for worker in workers if self._uncommitted(worker))

    def _uncommitted(self, worker: str) -> list[tuple[int, Attempt, MicroBatch]]:
        held = [one for one in self._held.get(worker, ()) if one[2].committed is None]
        if held:
            self._held[worker] = held
        else:
            self._held.pop(worker, None)
        return held

    def _divide(self, weights: Mapping[str, float]) -> list[str]:
        """Returns the worker of each micro-batch of a round: over many rounds each has its share of
        the speed of all."""
        names = self.crew.names
        known = [weights[name] for name in names if name in weights]
        usual = sum(known) / len(known) if known else 1.0
        began = min((self._due[name] for name in names if name in self._due), default=0.0)
        due = [(self._due.get(name, began), name) for name in names]
        heapq.heapify(due)
        divided = []
        for _ in range(self._taken):
            at, name = due[0]
            heapq.heapreplace(due, (at + usual / weights.get(name, usual), name))
            divided.append(name)
        self._due = {name: at for at, name in due}
        return divided

    def room(self, left: int, now: float) -> int:
        """Returns how many more rounds may be decided now, of ``left`` batches of an epoch."""
        self._measure(now)
        workers = len(self.crew.names)
        if not self._allowed or not workers:
            return 0
        size, round_s = self._pace.next_size(workers), self._pace.batch_s
        if self._taken <= workers and round_s is not None and round_s <= LONG_ROUND_S:
            # A worker has one micro-batch of a round at most, so none could help another.
            size = max(size, LEAST_ROUNDS)
        # A checkpoint, a change and a stop wait for what is decided.
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
