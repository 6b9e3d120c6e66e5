"""The micro-batches of the open round: which are open, committed, and taken by it. Pure.

With ``aggregate`` M < K up to K are open and the round takes the first M commits; the others stay
open for the next one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import replace

from coordinator.core.wording import of
from coordinator.core.work import Report
from coordinator.schedule.cuts import Uncut
from coordinator.schedule.micro_batch import LIVE_ATTEMPTS, MicroBatch
from coordinator.schedule.open_batches import OpenBatches
from psrpc.core.batch import BatchId
from psrpc.core.commands import Attempt
from psrpc.core.intervals import IntervalSet
from psrpc.core.policy import Policy
from psrpc.core.text import first_names


class OpenRound:
    """The open round, one after another: :meth:`fill` opens a round, :meth:`close` ends it. All
    micro-batches of a round are of one epoch. Not thread-safe."""

    def __init__(
        self, policy: Policy, batch_size: int, partial: Mapping[int, IntervalSet] | None
    ) -> None:
        """``partial`` are the positions per epoch that only some shards have."""
        self._policy = policy
        self._batch_size = batch_size
        self._partial = partial or {}
        self.micros: list[MicroBatch] = []
        """In batch-id order."""
        self._commits: list[MicroBatch] = []
        """Its committed micro-batches, in the order of their commits."""
        self._cut: tuple[BatchId, ...] = ()
        self._uncut = Uncut((), batch_size)
        """With ``balance``, the batches of the round, and the records of them that are not cut
        yet."""
        self._draining = False

    def __bool__(self) -> bool:
        """Whether there is a round."""
        return bool(self.micros or self._uncut)

    @property
    def epoch(self) -> int | None:
        """The epoch of its micro-batches; None before the first."""
        return self.micros[0].batch.epoch if self.micros else None

    @property
    def commits(self) -> int:
        """Number of its committed micro-batches."""
        return len(self._commits)

    @property
    def named(self) -> int:
        """Number of micro-batches that it takes, once all of it is cut."""
        return min(self._policy.taken, len(self.micros))

    @property
    def takes(self) -> int:
        """Number of batches of the grid that it takes."""
        return len(self._cut) or self.named

    @property
    def complete(self) -> bool:
        """Whether as many micro-batches are committed as it takes."""
        return bool(self.micros) and not self._uncut and self.commits >= self.named

    @property
    def awaited(self) -> bool:
        """Whether a worker holds an uncommitted attempt."""
        return any(m.awaited for m in self.micros)

    @property
    def untouched(self) -> bool:
        """Whether no worker has had an attempt of it."""
        return not self._uncut and not any(m.under_way for m in self.micros)

    @property
    def revoked(self) -> bool:
        """Whether it has a micro-batch that reopens once shards refuse the revoked worker that had
        it."""
        return any(m.revoked for m in self.micros)

    @property
    def drains(self) -> bool:
        """Whether no more rounds are to begin."""
        return self._draining

    @property
    def drained(self) -> bool:
        """Whether :meth:`drain` was called and no micro-batch is in flight."""
        return self._draining and not any(m.under_way for m in self.micros)

    @property
    def has_open(self) -> bool:
        """Whether there is a micro-batch for any worker that asks."""
        if self._draining:
            begun = sum(m.under_way for m in self.micros)
            if not begun or (begun >= self.named and not self._uncut):
                return False
        return bool(self._uncut) or any(m.open for m in self.micros)

    @property
    def left(self) -> float:
        """Number of open micro-batches; unknown and infinite until the round is cut."""
        return math.inf if self._uncut else sum(m.open for m in self.micros)

    @property
    def holders(self) -> set[str]:
        """The workers that may commit, or that shards must refuse before others may commit."""
        return {h for m in self.micros if m.committed is None for h in m.holders}

    @property
    def uncommitted(self) -> int:
        """Number of its micro-batches that no worker has committed; valid only without
        ``balance``."""
        return sum(m.committed is None for m in self.micros)

    def held_by(self, worker: str) -> list[Attempt]:
        """Returns the uncommitted attempts of ``worker``, in batch-id order."""
        numbers = [(m.batch, m.attempt_of(worker)) for m in self.micros if m.committed is None]
        return [Attempt(batch, number) for batch, number in numbers if number is not None]

    def begin_again(self, worker: str, now: float) -> None:
        """Restarts, at ``now``, the time of the uncommitted attempts that ``worker`` holds."""
        for micro in self.micros:
            number = micro.attempt_of(worker)
            if number is not None and micro.committed is None:
                micro.attempts[number] = replace(micro.attempts[number], since=now)

    def waiting_for(self, number: int) -> str:
        """Says which commits round ``number`` waits for; empty when a micro-batch is open."""
        if self.drained or not self:
            return "the policy to change; no round is begun under the present one"
        if self.has_open:
            return ""
        if self.complete:
            return f"the decision of round {number} to be stored"
        done = of(self.commits, self.named, "micro-batch", "micro-batches")
        holders = first_names(
            h for m in self.micros if m.committed is None for h in sorted(m.holders)
        )
        return f"{holders} to finish round {number} ({done} done)"

    def find(self, batch: BatchId) -> MicroBatch | None:
        """Returns its micro-batch of that id, or None."""
        return next((m for m in self.micros if m.batch == batch), None)

    def take(self, ratio: float | None) -> MicroBatch:
        """Returns an open micro-batch; there must be one. ``ratio`` is as in :meth:`Uncut.cut`."""
        micro = next((m for m in self.micros if m.open), None)
        if micro is None:
            micro = MicroBatch(self._uncut.cut(ratio))
            self.micros.append(micro)
        return micro

    def commit(self, micro: MicroBatch) -> None:
        """Notes that one of its micro-batches is committed."""
        self._commits.append(micro)

    def reports(self, number: int) -> list[Report]:
        """Returns the committed reports that it takes, in batch-id order, with their staleness in
        round ``number``."""
        return [
            replace(micro.committed, staleness=number - micro.base)
            for micro in sorted(self._commits[: self.named], key=lambda micro: micro.batch)
            if micro.committed is not None
        ]

    def close(self) -> tuple[list[MicroBatch], list[BatchId]]:
        """Removes and returns the micro-batches that it takes; returns also the batches of the grid
        that they finish."""
        named, self._commits = self._commits[: self.named], self._commits[self.named :]
        self.micros = [micro for micro in self.micros if micro not in named]
        return named, list(self._cut) or [micro.batch for micro in named]

    def drain(self) -> None:
        """Begins no more micro-batches than are needed for a round in flight."""
        self._draining = True

    def fill(self, todo: OpenBatches) -> None:
        """Opens a new round: up to K micro-batches of one epoch. At the limit of ``todo`` it has
        only micro-batches left over from earlier rounds, if any."""
        self._cut = ()
        if self._draining:
            self.micros = [micro for micro in self.micros if micro.under_way]
            return
        batches: list[BatchId] = []
        # With backup workers, micro-batches of rounds below the limit may still be open.
        most = len(self.micros) if todo.limited else self._policy.open
        epoch = self.epoch if self.micros else todo.next_epoch
        while len(self.micros) + len(batches) < most and (
            epoch is not None and todo.next_epoch == epoch
        ):
            batch = todo.take()
            assert batch is not None
            batches.append(batch)
        if self._policy.balance and not self._is_partial(batches):
            self._cut, self._uncut = tuple(batches), Uncut(batches, self._batch_size)
        else:
            self.micros += [MicroBatch(batch) for batch in batches]

    def adopt(self, micros: Sequence[MicroBatch]) -> None:
        """Opens a round that was decided ahead; some of its ``micros`` may be committed already."""
        self._cut = ()
        self.micros = list(micros)
        self._commits = [micro for micro in micros if micro.committed is not None]

    def holds(self, worker: str) -> bool:
        """Whether ``worker`` has an attempt that is not committed."""
        return bool(self.held_by(worker))

    def left_by(self, stuck: Set[str]) -> MicroBatch | None:
        """Returns a micro-batch that only ``stuck`` workers hold, and that may be doubled."""
        return next((m for m in self.micros if m.may_be_doubled and m.held_by(stuck)), None)

    def twice_left_by(self, stuck: Set[str]) -> list[str]:
        """Returns the ``stuck`` workers that must make room, sorted: where stuck workers hold as
        many attempts of a micro-batch as shards have room for, the worker of the newest attempt."""
        full = [m for m in self.micros if len(m.attempts) >= LIVE_ATTEMPTS and m.held_by(stuck)]
        return sorted({m.attempts[max(m.attempts)].worker for m in full})

    def revoke(self, worker: str) -> list[Attempt]:
        """Takes back the uncommitted attempts of ``worker``."""
        taken = [(micro.batch, micro.revoke(worker)) for micro in self.micros]
        return [Attempt(batch, number) for batch, number in taken if number is not None]

    def release(self, worker: str) -> int:
        """Reopens the micro-batches taken back from ``worker``; returns their number."""
        taken = [micro for micro in self.micros if worker in micro.revoked]
        for micro in taken:
            micro.revoked.remove(worker)
        return len(taken)

    def _is_partial(self, batches: Sequence[BatchId]) -> bool:
        """Whether some shard has applied a part of ``batches``, which are then not cut anew."""
        return any(
            batch.epoch in self._partial
            and self._partial[batch.epoch].overlaps(batch.first, batch.first + batch.count)
            for batch in batches
        )
