"""One gradient to all shards at once, and all parameters back."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from types import TracebackType
from typing import TypeVar

from pserver.client.client import PullInfo, Push, PushResult, RetryPolicy, ShardClient, Source
from pserver.transport.workspace import Workspace
from psrpc.core.batch import BatchId
from psrpc.core.encoding import Gradient
from psrpc.core.errors import CheckpointError, InvalidJob, PsError, SegmentLost
from psrpc.core.plan import Plan
from psrpc.core.tables import Rows
from psrpc.ops.tracing import span
from psrpc.v1 import coordinator_pb2, types_pb2
from psrpc.v1.coordinator_pb2 import Transport
from worker.data.source import Array
from worker.embedding.row_sets import ReceivedRows
from worker.loop.session import Standing

Result = TypeVar("Result")

KINDS = {
    "shared memory": Transport.KIND_SHARED_MEMORY,
    "data connection": Transport.KIND_DATA_CONNECTION,
    "calls": Transport.KIND_CALLS,
}


class Router:
    """The shards of one generation, as one worker sees them. One thread uses it.

    Every method calls all shards side by side and returns when all have answered. A call that
    fails is repeated on the shard that failed, for as long as the worker waits for a peer, with
    faster heartbeats meanwhile; when a shard says what no repetition can mend, the calls to the
    others are given up as well. What the standing says while a call is under way ends it, too.
    Parameters are the worker's whole arenas by name, ``[length]``; a gradient is one part for each
    shard. They stay in the worker's shared segment where a shard can attach it.

    Raises, from all methods:
        StaleGeneration: join the cluster anew, with another workspace.
        RoundPassed: lease again.
        ShardUnreachable, NotReady: a shard was awaited in vain; the message names it.
        OutcomeUnknown: so was the answer to a push; the message names shard and batch.
    """

    def __init__(
        self,
        cluster: coordinator_pb2.GetClusterResponse,
        plan: Plan,
        standing: Standing,
        workspace: Workspace | None = None,
        waiting: Callable[[bool], object] = lambda _now: None,
        connect: Callable[..., ShardClient] = ShardClient,
    ) -> None:
        """``waiting`` is called, by any thread, with True when the requests of a push or a pull of
        parameters have gone to all shards, and with False when all have answered. ``connect`` makes
        the client of a shard."""
        self._standing = standing
        self._abort = standing.threads.event()
        self._waiting = waiting
        # Shards whose requests have yet to go; changed under the lock.
        self._unsent: set[int] = set()
        self._sending = threading.Lock()
        # Why the shards' last calls had to be repeated.
        self._why: dict[int, str] = {}
        self._pending: set[int] = set()
        self._pulling = False
        retry = RetryPolicy(budget_s=standing.connect_timeout_s)
        self._clients = [
            connect(
                shard.address,
                shard.incarnation,
                plan,
                index,
                security=standing.security,
                workspace=workspace,
                retry=retry,
                stop=self._abort,
                announce=self._announcer(index),
                failed=partial(standing.routes.failed, index),
                sent=partial(self._sent, index),
                threads=standing.threads,
            )
            for index, shard in enumerate(cluster.shards)
        ]
        standing.routes.joined([(shard.address, shard.incarnation) for shard in cluster.shards])
        self.generation = cluster.generation
        self._fences = [
            client.fence(cluster.generation, cluster.policy, standing.session)
            for client in self._clients
        ]
        self._versions = [0] * len(self._clients)
        # The calling thread takes shard 0.
        self._pool = standing.threads.pool(max(1, len(self._clients) - 1), "shard")

    def __enter__(self) -> Router:
        self._standing.interrupt_with(self._interrupt)
        self._standing.transports = self.transports
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._standing.interrupt_with_no_longer(self._interrupt)
        self._standing.transports = list
        self._abort.set()
        for client in self._clients:
            client.close()
        self._pool.shutdown()

    def transports(self) -> list[Transport]:
        """How tensors travel, of each shard that they were exchanged with. Any thread may ask."""
        found = ((shard, client.transport) for shard, client in enumerate(self._clients))
        return [
            Transport(shard=shard, kind=KINDS[transport.kind], why=transport.why)
            for shard, transport in found
            if transport is not None
        ]

    @property
    def versions(self) -> tuple[int, ...]:
        """Of each shard, the version of the parameters that gradients are computed from: the newest
        or a round's, as received last."""
        return tuple(self._versions)

    @property
    def version(self) -> int:
        """The newest of :attr:`versions`."""
        return max(self._versions)

    def reach(self) -> None:
        """Returns once every shard has answered: a worker that cannot reach one holds up others
        if it is leased anything."""
        self._all(lambda shard: self._clients[shard].reach(), told=False)

    def initialize(self, values: Mapping[str, Array], grant: bytes) -> None:
        """Sets all parameters; shards that have some already keep them. ``grant`` came with the
        lease.

        Raises:
            InvalidJob: a shard cannot read the rows that its tables begin with.
        """

        def initialize(shard: int) -> bool:
            return self._clients[shard].initialize(self._fences[shard], values, grant)

        try:
            self._all(initialize)
        except CheckpointError as error:
            raise InvalidJob(
                f"init_from, of which shards load the rows of tables by themselves: {error}"
            ) from None

    def pull(
        self,
        source: Source,
        into: Mapping[str, Array] | None,
        decision: types_pb2.SignedDecision | None = None,
        *,
        rows: ReceivedRows | None = None,
    ) -> None:
        """Receives the newest parameters (None), those of a round (its number; ``decision`` is
        that of the round before) or of a kept snapshot (its name), and ``rows`` with them. Without
        ``into`` only rows are received."""

        def pull(shard: int) -> PullInfo:
            wanted = None if rows is None else rows.wanted(shard, rows_only=into is None)
            return self._clients[shard].pull(
                self._fences[shard], source, into or {}, decision, wanted
            )

        self._pulling = True
        try:
            with span("pull", source=source):
                # Rows by themselves may come while a gradient is computed.
                pulled = self._all(pull, told=into is not None)
        finally:
            self._pulling = False
        versions = [info.version for info in pulled]
        if rows is not None:
            rows.versions = tuple(versions)
        # Kept snapshots are for evaluations, which may come in the middle of a round.
        if into is not None and not isinstance(source, str):
            self._versions = versions

    def bases(self, rows: ReceivedRows | None = None) -> tuple[int, ...]:
        """Of each shard, the version that a gradient is computed from: of parameters and ``rows``
        the older one."""
        if rows is None:
            return self.versions
        return tuple(map(min, self._versions, rows.versions))

    def push(
        self,
        batch: BatchId,
        attempt: int,
        grant: bytes,
        gradients: Sequence[Gradient] | None,
        *,
        rows: Sequence[Mapping[int, Rows]] = (),
        bases: Sequence[int] = (),
        totals: Sequence[float] = (),
    ) -> list[PushResult]:
        """Stages a gradient on all shards (sync); None is one that is not finite. ``rows`` are
        what each shard gets for tables; ``bases`` as of :meth:`bases`, of the parameters by
        default. ``totals`` are what the batch adds to those of its epoch, which the first shard
        keeps. ``grant`` came with the lease of the attempt."""
        messages = self._pushes(batch, attempt, grant, gradients, rows, bases, totals)

        def push(shard: int) -> PushResult:
            return self._clients[shard].push(self._fences[shard], messages[shard])

        with span("push", batch=batch, attempt=attempt):
            return self._all(push, finishing=True)

    def push_pull(
        self,
        batch: BatchId,
        attempt: int,
        grant: bytes,
        gradients: Sequence[Gradient] | None,
        into: Mapping[str, Array],
        *,
        rows: Sequence[Mapping[int, Rows]] = (),
        bases: Sequence[int] = (),
        following: ReceivedRows | None = None,
        totals: Sequence[float] = (),
    ) -> list[PushResult]:
        """Applies a gradient on all shards (async) and receives the newest parameters, and rows for
        the batch that follows; None is a gradient that is not finite: the batch is recorded as
        skipped. See :meth:`push`."""
        messages = self._pushes(batch, attempt, grant, gradients, rows, bases, totals)

        def push_pull(shard: int) -> tuple[PushResult, PullInfo]:
            wanted = None if following is None else following.wanted(shard)
            client, fence = self._clients[shard], self._fences[shard]
            return client.push_pull(fence, messages[shard], into, wanted)

        with span("push_pull", batch=batch, attempt=attempt):
            answers = self._all(push_pull, finishing=True)
        self._versions = [info.version for _, info in answers]
        if following is not None:
            following.versions = self.versions
        return [result for result, _ in answers]

    @property
    def asked_again(self) -> frozenset[int]:
        """The shards whose last call had to be repeated: an earlier try may have had its effect."""
        return frozenset(self._why)

    def awaited(self) -> str:
        """The shards that have not answered, and what is known of why, which is a sentence."""
        # Copies: other threads change both.
        pending, why = sorted(self._pending), dict(self._why)
        found = ", ".join(why.get(shard, self._clients[shard].peer) for shard in pending)
        return f"the shards: {found}" if why.keys() & pending else found

    def _pushes(
        self,
        batch: BatchId,
        attempt: int,
        grant: bytes,
        gradients: Sequence[Gradient] | None,
        rows: Sequence[Mapping[int, Rows]],
        bases: Sequence[int],
        totals: Sequence[float],
    ) -> list[Push]:
        return [
            Push(
                batch,
                attempt,
                base,
                None if gradients is None else gradients[shard],
                rows[shard] if rows and gradients is not None else None,
                totals if shard == 0 else (),
                grant,
            )
            for shard, base in enumerate(bases or self._versions)
        ]

    def _sent(self, shard: int) -> None:
        with self._sending:
            # A request that is repeated goes twice.
            if shard not in self._unsent:
                return
            self._unsent.remove(shard)
            last = not self._unsent
        if last:
            self._waiting(True)

    def _announcer(self, shard: int) -> Callable[[str], None]:
        def announce(reason: str) -> None:
            self._why[shard] = reason
            self._standing.hurry(True)

        return announce

    def _interrupt(self, at_once: bool) -> None:
        self._abort.set()
        # A shard that stands still, or a round that does not end, would hold an exchange for a
        # minute; a push may still come to its end.
        if at_once or self._pulling:
            for client in self._clients:
                client.cancel()

    def _all(
        self, call: Callable[[int], Result], *, finishing: bool = False, told: bool = True
    ) -> list[Result]:
        """``call`` for each shard; none is under way any more on return. See Standing.check.
        ``told``: that this is waited for."""
        # In this order: an interrupt that comes in between is seen.
        self._abort.clear()
        self._standing.check(finishing=finishing)
        if self._standing.interrupted:
            self._abort.set()
        self._why.clear()
        shards = range(len(self._clients))
        self._pending.update(shards)
        self._unsent = set(shards if told else ())
        with self._standing.waits.on(self.awaited):
            futures = [self._pool.submit(self._one, call, shard) for shard in shards[1:]]
            first: Future[Result] = Future()
            try:
                first.set_result(self._one(call, 0))
            except PsError as error:
                first.set_exception(error)
            try:
                return _results([first, *futures], self._standing)
            finally:
                self._standing.hurry(False)
                if told:
                    self._waiting(False)

    def _one(self, call: Callable[[int], Result], shard: int) -> Result:
        routes = self._standing.routes
        routes.asked(shard)
        try:
            result = call(shard)
        except PsError as error:
            self._abort.set()
            if error.retryable or isinstance(error, SegmentLost):
                routes.given_up(shard)
            elif routes.answered(shard):
                self._standing.flush()
            raise
        finally:
            self._pending.discard(shard)
        if routes.answered(shard):
            self._standing.flush()
        return result


def _results(futures: Sequence[Future[Result]], standing: Standing) -> list[Result]:
    """What all calls came to, once all have ended.

    Of several errors the one that no repetition can mend counts: the others were given up
    because of it.
    """
    errors = [error for future in futures if (error := future.exception()) is not None]
    if errors:
        # A retry that a signal or the end of the job cut short ends as that.
        standing.check()
        raise min(errors, key=lambda error: isinstance(error, PsError) and error.retryable)
    return [future.result() for future in futures]
