"""The work ledger of async and ssp training: which batches are done, leased and open.

Pure: time is passed in, and nothing locks; the engine's loop is the only caller.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from coordinator.core.work import Report, Train, TrainingPosition, Wait
from coordinator.schedule.clocks import Clocks
from coordinator.schedule.micro_batch import Tally
from coordinator.schedule.open_batches import NOTHING_BELOW, NOTHING_NEW, BatchSchedule, OpenBatches
from coordinator.schedule.pace import LeaseHolder
from psrpc.core.batch import BatchId
from psrpc.core.commands import Attempt, WorkerClock
from psrpc.core.intervals import IntervalSet
from psrpc.core.policy import ASYNC, Policy
from psrpc.core.text import first_names


class Ledger(BatchSchedule):
    """Leases batches in position order, one epoch after another, and counts each once. They are cut
    from the grid of their epoch, so a batch's id is the same on every lease. Epochs overlap: the
    next one is leased while the last batches of the present one are still out. Under ssp,
    :class:`Clocks` limits how many batches a worker gets. Not thread-safe."""

    def __init__(
        self,
        *,
        records: int,
        batch_size: int,
        epochs: int,
        policy: Policy = ASYNC,
        first_attempt: int = 1,
        done: Mapping[int, IntervalSet] | None = None,
        skipped: Mapping[int, IntervalSet] | None = None,
        partial: Mapping[int, IntervalSet] | None = None,
        step_offset: int = 0,
        until_epoch: int | None = None,
        limit: int | None = None,
        tally: Tally | None = None,
    ) -> None:
        """``done``, ``skipped`` and ``partial`` are positions per epoch, as the shards of a resumed
        job report them: applied by all shards, skipped among those, and applied by only some. The
        last are leased before anything new. The global step is ``step_offset`` plus the number of
        batches done. New batches come only from epochs before ``until_epoch``, and at most
        ``limit`` are done in all."""
        done = done or {}
        super().__init__(
            OpenBatches(
                records=records,
                batch_size=batch_size,
                epochs=epochs,
                done=done,
                partial=partial,
                until_epoch=until_epoch,
                limit=limit,
            )
        )
        self._next_attempt = first_attempt
        self._step_offset = step_offset
        self._tally = tally if tally is not None else Tally()
        self.clocks = Clocks(policy.staleness or 0) if policy.mode == "ssp" else None
        self._holders: dict[str, LeaseHolder] = {}
        self._leased: dict[BatchId, str] = {}
        self._reopened: dict[BatchId, str | None] = {}
        """Batches that were leased and are open again, with the worker whose gradient was
        refused."""
        self._busy_next: set[str] = set()
        """Workers that do something else once they have done the batches that they hold."""
        self._draining = False
        lost = sum(len(positions) for positions in (skipped or {}).values())
        self._examples = sum(len(positions) for positions in done.values()) - lost
        self._finished_epochs: list[int] = []

    @property
    def idle(self) -> bool:
        """Whether no worker holds a batch."""
        return not self._leased

    @property
    def drained(self) -> bool:
        """Whether draining is complete: nothing is in flight, all shards have the same batches."""
        under_way = self._leased or self._reopened or self._todo.has_partial
        return self._draining and not under_way

    @property
    def held(self) -> bool:
        """Whether every batch below the limit is done and nothing is in flight: all shards have the
        same batches."""
        under_way = self._leased or self._reopened or self._todo.has_partial
        return self._todo.limited and not under_way

    @property
    def span(self) -> TrainingPosition:
        """The training position; the epoch is the oldest unfinished one."""
        done = self._todo.batches
        step, total = done + self._step_offset, self._todo.total + self._step_offset
        return TrainingPosition(step, total, self._todo.epoch, done, self._examples)

    def drain(self) -> None:
        """Leases no new batches; those that only some shards may have are still completed."""
        self._draining = True

    def tick(self, _now: float) -> None:
        """Does nothing: time alone changes nothing here."""

    def stragglers(self, _now: float) -> list[str]:
        """Returns nothing: no batch waits for another."""
        return []

    def idle_worker(self, worker: str) -> None:
        """Notes that ``worker`` does something else, such as an evaluation: clocks stop waiting for
        it once it has reported the batches that it holds."""
        if self.clocks is None:
            return
        if self._holds(worker):
            self._busy_next.add(worker)
        else:
            self.clocks.idle(worker)

    def lease(
        self,
        worker: str,
        now: float,
        received: int,
        workers: int,
        clocks: bool = False,
        devices: int = 1,
    ) -> Train | Wait:
        """Returns a task for ``worker``: attempts above ``received``, which did not reach it, or
        else open batches. ``workers`` share the rest, so tasks shrink towards the end. ``clocks``:
        shards hold it back, see :class:`Clocks`. ``devices`` as in LeaseWork."""
        holder = self._holders.setdefault(worker, LeaseHolder())
        if not holder.leases:
            holder.pace.since = now  # the time before was not work
        lost = [Attempt(batch, n) for batch, n in holder.leases.items() if n > received]
        if lost:
            return self._train(worker, lost, now, clocks)
        if not self._has_open():
            if not holder.leases:
                self.idle_worker(worker)
            return Wait(self.waiting_for())
        left = self._todo.end - self._todo.batches - len(self._leased)
        size = holder.task_size(workers, left, max(1, devices))
        if self.clocks is not None:
            self._busy_next.discard(worker)
            self._enter(self.clocks, worker, now, clocks)
            if not clocks:
                size = min(size, self.clocks.allowed(worker, len(holder.leases)))
            if not size:
                return Wait(self.clocks.reason(worker))
        batches: list[Attempt] = []
        while len(batches) < size and (batch := self._next_open(worker)) is not None:
            attempt = Attempt(batch, self._next_attempt)
            self._next_attempt += 1
            holder.leases[batch] = attempt.number
            self._leased[batch] = worker
            batches.append(attempt)
        return self._train(worker, batches, now, clocks)

    def report(self, worker: str, reports: Sequence[Report], now: float) -> list[Report]:
        """Records batches that are done (or skipped) on all shards; returns those that count now.
        A batch that was too stale is open to all workers again. A batch counts once, and only if it
        is leased to ``worker``. Repeated reports change nothing, nor do reports of work under an
        earlier name: such a batch is leased again, and shards answer that they have it.

        Raises:
            InvalidArgument: a report names no batch of this job; nothing is recorded.
        """
        for report in reports:
            self._todo.check(report.batch)
        counted = []
        steps = 0
        for report in reports:
            batch = report.batch
            if self._leased.get(batch) != worker:
                continue
            if self._holders[worker].leases[batch] != report.attempt:
                continue
            self._give_back(batch)
            if report.too_stale:
                self._reopened[batch] = worker
                self._tally.too_stale += 1
                steps += 1
                continue
            if self.clocks is not None:
                self.clocks.tick(worker)
            if self._todo.is_done(batch):
                continue
            self._examples += 0 if report.skipped else batch.count
            if self._todo.finish(batch):
                self._finished_epochs.append(batch.epoch)
            counted.append(report)
        if worker in self._busy_next and not self._holders[worker].leases:
            self._busy_next.discard(worker)
            self.idle_worker(worker)
        steps += len(counted)
        if steps and worker in self._holders:
            self._holders[worker].pace.measure(steps, now)
        return counted

    def revoke(self, worker: str) -> list[Attempt]:
        """Returns the attempts of ``worker``; others get the batches only after :meth:`release`."""
        self._busy_next.discard(worker)
        if self.clocks is not None:
            self.clocks.leave(worker)
        holder = self._holders.get(worker)
        if holder is None:
            return []
        return [Attempt(batch, number) for batch, number in holder.leases.items()]

    def release(self, worker: str) -> int:
        """Reopens the batches of ``worker``, which shards refuse by now, to all workers; they are
        leased before anything new. Returns their number."""
        if self.clocks is not None:
            self.clocks.leave(worker)
        holder = self._holders.pop(worker, None)
        if holder is None:
            return 0
        batches = sorted(holder.leases)
        for batch in batches:
            del self._leased[batch]
            self._reopened[batch] = None
        return len(batches)

    def hand_over(self, stuck: Collection[str]) -> list[str]:
        """Returns the ``stuck`` workers that hold batches, to be revoked: some shards may have
        applied such a batch, and may get another gradient of it only once they refuse the stuck
        worker. Clocks stop waiting for the other stuck workers."""
        holding = [worker for worker in stuck if self._holds(worker)]
        for worker in stuck:
            if worker not in holding:
                self.idle_worker(worker)
        return holding

    def take_finished_epochs(self) -> list[int]:
        """Returns the epochs that were finished since the last call, in rising order."""
        epochs, self._finished_epochs = sorted(self._finished_epochs), []
        return epochs

    def waiting_for(self) -> str:
        """Names the event that the next step waits for; empty when there are open batches."""
        if self.finished or self._has_open():
            return ""
        if not self._leased:
            return NOTHING_BELOW if self._todo.limited else NOTHING_NEW
        held = (f"{name} ({len(self._holders[name].leases)})" for name in self._leased.values())
        return f"batches that are under way: {first_names(held)}"

    def _holds(self, worker: str) -> bool:
        holder = self._holders.get(worker)
        return holder is not None and bool(holder.leases)

    def _train(self, worker: str, batches: Sequence[Attempt], now: float, clocks: bool) -> Train:
        if self.clocks is None:
            return Train(tuple(batches))
        entered = self._enter(self.clocks, worker, now, clocks)
        if clocks:
            return Train(tuple(batches), clock=entered)
        return Train(tuple(batches), fresh=True)

    def _enter(self, clocks: Clocks, worker: str, now: float, counted: bool) -> WorkerClock:
        entered = clocks.entered(worker)
        if entered is not None:
            return entered
        holders = self._holders
        expected = [c + holders[w].expected(now) for w, c in clocks.holding.items() if w in holders]
        return clocks.enter(worker, counted, min(expected, default=0) if counted else 0)

    def _has_open(self) -> bool:
        if self._reopened or self._todo.has_partial:
            return True
        return self._begins and self._todo.next_epoch is not None

    @property
    def _begins(self) -> bool:
        """Whether batches that no worker has had yet may be leased."""
        return not (self._draining or self._todo.limited)

    def _next_open(self, worker: str) -> BatchId | None:
        """Takes an open batch, first one that some shards may have, and last one that shards have
        refused from this worker: its parameters may be too old again."""
        batch = next((b for b, refused in self._reopened.items() if refused != worker), None)
        if batch is None:
            batch = self._todo.take_partial()
        if batch is None and self._begins:
            batch = self._todo.take()
        if batch is None:
            batch = next(iter(self._reopened), None)
        if batch is not None:
            self._reopened.pop(batch, None)
        return batch

    def _give_back(self, batch: BatchId) -> None:
        holder = self._leased.pop(batch, None)
        if holder is not None:
            del self._holders[holder].leases[batch]
