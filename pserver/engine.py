"""One shard: its parameters, its applied-set and the rules for changing either."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy.typing as npt

from pserver.admission import check_push
from pserver.applied import AppliedSet
from pserver.arrival import Arrival, Arrived, arriving
from pserver.assembly import PLAIN, check_extents, check_values
from pserver.buffers import BufferPool, pool_size
from pserver.counters import Counters, ShardReport
from pserver.fence import Fence, ShardIdentity, admit
from pserver.parameters import Parameters
from pserver.requests import (
    Decision,
    InitializeRequest,
    PullRequest,
    PushRequest,
    PushResult,
    SnapshotOrder,
    Values,
)
from pserver.shelf import SnapshotShelf, SnapshotSink
from pserver.staging import Missing, Staged, Staging, weighted_mean
from pserver.updates.engine import Slots, UpdateEngine
from psrpc.encoding import Encoding
from psrpc.errors import (
    InvalidArgument,
    JobFailed,
    NotReady,
    PsError,
    RoundPassed,
    StaleGeneration,
)
from psrpc.plan import Plan

NDArray = npt.NDArray[Any]


class ShardEngine:
    """Thread-safe. One lock guards everything that changes, the update engine included.

    Streams are assembled in buffers of their own before the lock is taken, so pushes arrive side
    by side and only the update itself is done one at a time.
    """

    def __init__(
        self, identity: ShardIdentity, plan: Plan, updates: UpdateEngine, sink: SnapshotSink
    ) -> None:
        self.identity = identity
        self.plan = plan
        self._held = Parameters(updates, identity.generation)
        self._pool = BufferPool(
            plan,
            identity.shard,
            pool_size(plan.shard_nbytes(identity.shard), identity.replicas),
        )
        self._changed = threading.Condition()  # its lock is the lock
        self._staging = Staging(identity.replicas)
        self._shelf = SnapshotShelf(sink)
        self._counters = Counters()
        self._closed = False

    # -- parameters come in ------------------------------------------------------------------

    def restore(
        self, values: Mapping[str, NDArray], slots: Slots, applied: AppliedSet, version: int
    ) -> None:
        """Takes over the state of a checkpoint; before anyone is served.

        Raises:
            CheckpointError: the slots are another optimizer's.
        """
        with self._changed:
            self._held.restore(values, slots, applied, version)

    def initialize(
        self, request: InitializeRequest, arrival: Arrival, timeout_s: float
    ) -> tuple[int, bool]:
        """Sets all values, once. Returns the version and whether the shard had some already."""
        self._admit(request.fence)
        check_extents(self.plan, self.identity.shard, request.extents, PLAIN)
        extents = request.extents
        arriving_values = arriving(arrival, self.plan, extents, self._pool, timeout_s, staged=False)
        with arriving_values as arrived, self._changed:
            self._admit(request.fence)
            if self._held.initialized:
                return self._held.version, True
            if arrived.loan is not None:
                # What came becomes the parameters.
                arrived.loan.keep = True
                self._pool.forget()
            self._held.initialize(arrived.arrays)
            self._changed.notify_all()
            return self._held.version, False

    # -- gradients come in -------------------------------------------------------------------

    def push(self, request: PushRequest, arrival: Arrival, timeout_s: float) -> PushResult:
        """Async: applies the gradient; sync: stages it. A repeated push changes nothing.

        Args:
            arrival: read to its end before anything is changed.
            timeout_s: how long to wait for a buffer.
        """
        return self._push(request, arrival, timeout_s, None)[0]

    def push_pull(
        self, request: PushRequest, arrival: Arrival, timeout_s: float, encoding: Encoding
    ) -> tuple[PushResult, Values]:
        """:meth:`push` and the newest values, with nothing in between. Async only."""
        if self.identity.mode != "async":
            raise InvalidArgument(
                "a pull with a push is for async jobs and this one is sync; pull the next round"
            )
        check_values(encoding)
        result, values = self._push(request, arrival, timeout_s, encoding)
        assert values is not None
        return result, values

    def _push(
        self, request: PushRequest, arrival: Arrival, timeout_s: float, pull: Encoding | None
    ) -> tuple[PushResult, Values | None]:
        self._check(request)
        staged = self.identity.mode == "sync"
        extents = request.extents
        arriving_gradient = arriving(
            arrival, self.plan, extents, self._pool, timeout_s, staged=staged
        )
        # A skipped push announces nothing, and nothing may arrive.
        with arriving_gradient as arrived, self._changed:
            result = self._accept(request, None if request.skipped else arrived)
            return result, None if pull is None else self._held.values(pull)

    def _check(self, request: PushRequest) -> None:
        """All that can be said of a push before its data; refuses before anything is allocated.

        Without the lock, or nothing would arrive during an update; what can change in between is
        looked at again with it. The version only rises.
        """
        self._admit(request.fence)
        self._need_values()
        check_push(request, self.plan, self.identity.shard, self._held.version)

    def _accept(self, request: PushRequest, arrived: Arrived | None) -> PushResult:
        """Everything has arrived: dedup, then apply or stage, then record. Holds the lock."""
        self._admit(request.fence)
        if self._held.applied.contains(request.batch):
            self._counters.already_applied += 1
            return PushResult("already_applied", self._held.version)
        if self.identity.mode == "sync":
            return self._stage(request, arrived)
        if arrived is None:
            self._held.applied.add(request.batch, skipped=True)
            self._counters.skipped += 1
            return PushResult("skipped", self._held.version)
        staleness = self._held.version - request.base_version
        self._held.update(arrived.arrays)
        self._held.applied.add(request.batch)
        self._counters.count_applied(staleness)
        return PushResult("applied", self._held.version, staleness)

    def _stage(self, request: PushRequest, arrived: Arrived | None) -> PushResult:
        if request.base_version < self._held.version:
            raise RoundPassed(
                f"a push of {request.batch} is for round {request.base_version};"
                f" shard {self.identity.shard} is at round {self._held.version}"
            )
        if self._staging.admit(request.attempt):
            self._staging.stage(request.attempt, self._staged(request.examples, arrived))
            self._counters.staged += 1
        return PushResult("staged", self._held.version)

    def _staged(self, examples: int, arrived: Arrived | None) -> Staged:
        if arrived is None:
            return Staged(examples, None)
        loan = arrived.loan
        assert loan is not None, "what is staged lies in our own memory"
        loan.keep = True
        return Staged(examples, arrived.arrays, lambda: self._pool.release(loan.buffers))

    def decide(self, decision: Decision) -> None:
        """Applies a decided round, once: a round that was applied before changes nothing.

        Raises:
            StaleGeneration: the decision is of another generation.
            NotReady: the round is not the next one, or attempts it names are not here.
        """
        with self._changed:
            self._decide(decision)

    def _decide(self, decision: Decision) -> None:
        me = f"shard {self.identity.shard}"
        if decision.generation != self.identity.generation:
            raise StaleGeneration(
                f"the decision of round {decision.round} is of generation {decision.generation};"
                f" {me} is in {self.identity.generation}"
            )
        if decision.round < self._held.version:
            return
        if decision.round > self._held.version:
            raise NotReady(
                f"{me} cannot apply round {decision.round}: it waits for the decision of round"
                f" {self._held.version}"
            )
        found = self._staging.decide(decision.attempts)
        if isinstance(found, Missing):
            raise NotReady(
                f"{me} cannot apply round {decision.round}: it does not hold"
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
        for dropped in self._staging.clear():
            dropped.release()
        for order in decision.snapshots:
            self._shelf.take(order, self._held)
        self._changed.notify_all()

    # -- parameters go out -------------------------------------------------------------------

    def pull(self, request: PullRequest, timeout_s: float) -> Values:
        """The values asked for; a round is waited for, ``timeout_s`` at most."""
        check_values(request.encoding)
        with self._changed:
            self._admit(request.fence)
            if isinstance(request.source, str):
                if request.encoding != "plain":
                    raise InvalidArgument(
                        f"snapshot {request.source!r} was asked for as {request.encoding};"
                        " snapshots are kept plain"
                    )
                return self._shelf.get(request.source)
            self._need_values()
            if request.decision is not None:
                self._decide(request.decision)
            if request.source is not None:
                self._await_round(request.source, timeout_s)
            return self._held.values(request.encoding)

    def _await_round(self, wanted: int, timeout_s: float) -> None:
        if self.identity.mode != "sync":
            raise InvalidArgument(
                f"round {wanted} was asked for and this job is async; ask for the newest values"
            )
        self._changed.wait_for(lambda: self._held.version >= wanted or self._closed, timeout_s)
        if self._held.version > wanted:
            raise RoundPassed(
                f"round {wanted} was asked for; shard {self.identity.shard} is at round"
                f" {self._held.version}"
            )
        if self._held.version < wanted:
            raise NotReady(f"shard {self.identity.shard} waits for {self._waiting_for()}")

    # -- snapshots ---------------------------------------------------------------------------

    def take_snapshot(self, order: SnapshotOrder) -> None:
        """Freezes the present state by ``order``; the sink is told. An order counts once."""
        with self._changed:
            self._shelf.take(order, self._held)

    def release_snapshot(self, name: str) -> None:
        """Forgets a kept snapshot; one that is not kept is no error."""
        with self._changed:
            self._shelf.release(name)

    # -- what it is doing --------------------------------------------------------------------

    def report(self) -> ShardReport:
        """The figures of this moment.

        Without the lock, and so maybe of two moments: whoever asks how the shard is doing must
        not wait for the update of a gigabyte.
        """
        return ShardReport(
            version=self._held.version,
            initialized=self._held.initialized,
            nbytes=self.plan.shard_nbytes(self.identity.shard),
            counters=replace(self._counters, staleness=self._counters.staleness_counts()),
            staged_now=len(self._staging),
            waiting_for=self._waiting_for(),
        )

    def applied(self) -> AppliedSet:
        """A copy of the applied-set."""
        with self._changed:
            return AppliedSet.from_epochs(self._held.applied.to_epochs())

    @property
    def failure(self) -> str:
        """Why this shard can no longer be trusted; empty when it can."""
        return self._held.failure

    def close(self) -> None:
        """Lets go of everybody who waits in here."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    @contextmanager
    def refusals_counted(self) -> Iterator[None]:
        """Counts a push that is refused; wraps the whole call, parsing included."""
        try:
            yield
        except NotReady:
            raise
        except PsError:
            with self._changed:
                self._counters.refused += 1
            raise

    # -- within ------------------------------------------------------------------------------

    def _admit(self, fence: Fence) -> None:
        if self._held.failure:
            raise JobFailed(f"shard {self.identity.shard} failed: {self._held.failure}")
        admit(fence, self.identity, self.plan.hash)

    def _need_values(self) -> None:
        if not self._held.initialized:
            raise NotReady(f"shard {self.identity.shard} waits for {self._waiting_for()}")

    def _waiting_for(self) -> str:
        if not self._held.initialized:
            return "a worker to initialize it"
        if self.identity.mode == "async":
            return ""
        return (
            f"the decision of round {self._held.version}; it holds"
            f" {self._staging.micro_batches} of {self.identity.replicas} micro-batches"
        )
