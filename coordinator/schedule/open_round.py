"""The micro-batches of the open round: who may have one, which are committed, what it takes. Pure.

With ``aggregate`` M < K up to K are open and the round takes the first M that are committed; the
others stay open for the next one. With ``balance`` the round is cut into micro-batches as they are
asked for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import replace

from coordinator.core.work import Attempt, Report
from coordinator.schedule.balance import Uncut
from coordinator.schedule.micro_batch import LIVE_ATTEMPTS, MicroBatch
from coordinator.schedule.open_batches import OpenBatches
from psrpc.core.batch import BatchId
from psrpc.core.intervals import IntervalSet
from psrpc.core.policy import Policy


class OpenRound:
    """One round after another: :meth:`fill` opens it, :meth:`close` ends it. All its micro-batches
    are of one epoch. Not thread-safe."""

    def __init__(
        self, policy: Policy, batch_size: int, partial: Mapping[int, IntervalSet] | None
    ) -> None:
        """``partial`` are positions per epoch that some shards have and others lack."""
        self._policy = policy
        self._batch_size = batch_size
        self._partial = partial or {}
        self.micros: list[MicroBatch] = []
        """In batch-id order."""
        self._commits: list[MicroBatch] = []
        """Those of them that are committed, in the order of their commits."""
        self._cut: tuple[BatchId, ...] = ()
        self._uncut = Uncut((), batch_size)
        """With ``balance``, the batches that the round is made of, and what is left to be cut."""
        self._draining = False

    def __bool__(self) -> bool:
        """Whether there is a round."""
        return bool(self.micros or self._uncut)

    @property
    def epoch(self) -> int | None:
        """That of its micro-batches; None before the first."""
        return self.micros[0].batch.epoch if self.micros else None

    @property
    def commits(self) -> int:
        """How many of its micro-batches are committed."""
        return len(self._commits)

    @property
    def named(self) -> int:
        """How many micro-batches it takes, once all of it is cut."""
        return min(self._policy.taken, len(self.micros))

    @property
    def takes(self) -> int:
        """How many batches of the grid these are."""
        return len(self._cut) or self.named

    @property
    def complete(self) -> bool:
        """Whether as many micro-batches have a committed attempt as it takes."""
        return bool(self.micros) and not self._uncut and self.commits >= self.named

    @property
    def awaited(self) -> bool:
        """Whether somebody holds an attempt that is not committed."""
        return any(m.awaited for m in self.micros)

    @property
    def drained(self) -> bool:
        """Whether nothing of it is under way any more since :meth:`drain`."""
        return self._draining and not any(m.under_way for m in self.micros)

    @property
    def has_open(self) -> bool:
        """Whether there is a micro-batch for anyone who asks."""
        if self._draining:
            begun = sum(m.under_way for m in self.micros)
            if not begun or (begun >= self.named and not self._uncut):
                return False
        return bool(self._uncut) or any(m.open for m in self.micros)

    @property
    def holders(self) -> set[str]:
        """Whose commits may come, or who has to be refused before those of others may."""
        return {h for m in self.micros if m.committed is None for h in m.holders}

    def find(self, batch: BatchId) -> MicroBatch | None:
        """Its micro-batch of that name."""
        return next((m for m in self.micros if m.batch == batch), None)

    def take(self, ratio: float | None) -> MicroBatch:
        """An open micro-batch, of which there must be one; ``ratio`` as in :meth:`Uncut.cut`."""
        micro = next((m for m in self.micros if m.open), None)
        if micro is None:
            micro = MicroBatch(self._uncut.cut(ratio))
            self.micros.append(micro)
        return micro

    def commit(self, micro: MicroBatch) -> None:
        """One more of its micro-batches is committed."""
        self._commits.append(micro)

    def reports(self, number: int) -> list[Report]:
        """The committed reports that it takes, in batch-id order, with the staleness that they
        have in round ``number``."""
        return [
            replace(micro.committed, staleness=number - micro.base)
            for micro in sorted(self._commits[: self.named], key=lambda micro: micro.batch)
            if micro.committed is not None
        ]

    def close(self) -> tuple[list[MicroBatch], list[BatchId]]:
        """The micro-batches that it takes, which are no longer its own, and the batches of the
        grid that are done by them."""
        named, self._commits = self._commits[: self.named], self._commits[self.named :]
        self.micros = [micro for micro in self.micros if micro not in named]
        return named, list(self._cut) or [micro.batch for micro in named]

    def drain(self) -> None:
        """What is not under way is left alone from now on."""
        self._draining = True

    def fill(self, todo: OpenBatches) -> None:
        """Opens what a new round needs: up to K micro-batches of one epoch."""
        self._cut = ()
        if self._draining:
            self.micros = [micro for micro in self.micros if micro.under_way]
            return
        batches: list[BatchId] = []
        epoch = self.epoch if self.micros else todo.next_epoch
        while len(self.micros) + len(batches) < self._policy.open and (
            epoch is not None and todo.next_epoch == epoch
        ):
            batch = todo.take()
            assert batch is not None
            batches.append(batch)
        if self._policy.balance and not self._is_partial(batches):
            self._cut, self._uncut = tuple(batches), Uncut(batches, self._batch_size)
        else:
            self.micros += [MicroBatch(batch) for batch in batches]

    def holds(self, worker: str) -> bool:
        """Whether ``worker`` has an attempt that is not committed."""
        return any(m.committed is None and m.attempt_of(worker) is not None for m in self.micros)

    def left_by(self, stuck: Set[str]) -> MicroBatch | None:
        """A micro-batch that only workers which are ``stuck`` hold, and that another may have."""
        return next((m for m in self.micros if m.may_be_doubled and m.held_by(stuck)), None)

    def twice_left_by(self, stuck: Set[str]) -> list[str]:
        """The workers, all ``stuck``, whose attempt is in the way of another worker's."""
        full = [m for m in self.micros if len(m.attempts) >= LIVE_ATTEMPTS and m.held_by(stuck)]
        return sorted({m.attempts[max(m.attempts)].worker for m in full})

    def revoke(self, worker: str) -> list[Attempt]:
        """Takes back the attempts that ``worker`` holds and has not committed."""
        taken = [(micro.batch, micro.revoke(worker)) for micro in self.micros]
        return [Attempt(batch, number) for batch, number in taken if number is not None]

    def release(self, worker: str) -> int:
        """Others may get what was taken back from ``worker``; how many micro-batches that are."""
        taken = [micro for micro in self.micros if worker in micro.revoked]
        for micro in taken:
            micro.revoked.remove(worker)
        return len(taken)

    def _is_partial(self, batches: Sequence[BatchId]) -> bool:
        """Whether some shard has a part of a round, so that it must be cut as it was before."""
        return any(
            batch.epoch in self._partial
            and self._partial[batch.epoch].overlaps(batch.first, batch.first + batch.count)
            for batch in batches
        )
