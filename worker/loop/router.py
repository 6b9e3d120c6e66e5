"""Sends one gradient to all shards in parallel and receives all parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from pserver.client.client import PushResult, RetryPolicy, ShardClient, StagedEverywhere
from pserver.client.requests import GradientPush, PullInfo, Source
from pserver.transport.workspace import Workspace
from psrpc.core.errors import (
    CheckpointError,
    InvalidJob,
    NotReady,
    PsError,
    RoundPassed,
)
from psrpc.core.plan import Plan
from psrpc.ops.tracing import span
from psrpc.v1 import coordinator_pb2, types_pb2
from psrpc.v1.coordinator_pb2 import Transport
from worker.data.source import Array
from worker.embedding.row_sets import ReceivedRows
from worker.loop.fan_out import FanOut
from worker.loop.session import WorkerSession

SOON_S = 0.2
"""How many seconds a pull of the next round may wait while a worker commits: longer than most
rounds take, but short, since the commit may bring another micro-batch of the present round."""

KINDS = {
    "own process": Transport.KIND_OWN_PROCESS,
    "shared memory": Transport.KIND_SHARED_MEMORY,
    "data connection": Transport.KIND_DATA_CONNECTION,
    "calls": Transport.KIND_CALLS,
}


class Router:
    """The shards of one generation. One thread uses it.

    Every method calls all shards in parallel and returns when all have answered. A failed call is
    repeated on the shard that failed, within the worker's waiting time and with faster heartbeats.
    An error that no retry can fix, or an interrupt from :class:`WorkerSession`, also ends the calls
    to the other shards. Parameters are the worker's whole arenas by name, ``[length]``; a gradient
    has one part per shard. Both stay in the worker's shared segment if a shard can attach it.

    All methods raise:
        StaleGeneration: the worker must join anew, with another workspace.
        RoundPassed: the worker must lease again.
        ShardUnreachable, NotReady: a shard did not answer in time; the message names it.
        OutcomeUnknown: a push was not answered in time; the message names shard and batch.
    """

    def __init__(
        self,
        cluster: coordinator_pb2.GetClusterResponse,
        plan: Plan,
        standing: WorkerSession,
        workspace: Workspace | None = None,
        waiting: Callable[[bool], object] = lambda _now: None,
        connect: Callable[..., ShardClient] = ShardClient,
    ) -> None:
        """``waiting(True)`` is called from any thread when the requests of a push or a pull of
        parameters have gone to all shards, ``waiting(False)`` when all have answered."""
        self.plan = plan
        self._standing = standing
        self._calls = FanOut(
            standing, len(cluster.shards), lambda shard: self._clients[shard].peer, waiting
        )
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
                stop=self._calls.abort,
                announce=partial(self._calls.repeated, index),
                failed=partial(standing.routes.failed, index),
                sent=partial(self._calls.sent, index),
                threads=standing.threads,
            )
            for index, shard in enumerate(cluster.shards)
        ]
        # After the requests to peers have left, since the call may wait for the round.
        own = (shard for shard, client in enumerate(self._clients) if client.local is not None)
        self._calls.own = next(own, 0)
        standing.routes.joined([(shard.address, shard.incarnation) for shard in cluster.shards])
        self.generation = cluster.generation
        self._fences = [
            client.fence(cluster.generation, cluster.policy, standing.membership.session)
            for client in self._clients
        ]
        self._versions = [0] * len(self._clients)

    def __enter__(self) -> Router:
        self._standing.interrupt_with(self._interrupt)
        self._standing.transports = self.transports
        return self

    def __exit__(self, *_exception: object) -> None:
        self._standing.interrupt_with_no_longer(self._interrupt)
        self._standing.transports = list
        self._calls.abort.set()
        for client in self._clients:
            client.close()
        self._calls.close()

    def transports(self) -> list[Transport]:
        """Returns how tensors travel to each shard that exchanged any. Any thread may ask."""
        return [
            Transport(shard=shard, kind=KINDS[transport.kind], why=transport.why)
            for shard, client in enumerate(self._clients)
            if (transport := client.transport) is not None
        ]

    @property
    def count(self) -> int:
        """Number of shards."""
        return len(self._clients)

    @property
    def versions(self) -> tuple[int, ...]:
        """The version, per shard, of the parameters received last (newest or of a round), which
        gradients are computed from."""
        return tuple(self._versions)

    @property
    def version(self) -> int:
        """The newest of :attr:`versions`."""
        return max(self._versions)

    def reach(self) -> None:
        """Returns once every shard has answered. A worker that leases work but cannot reach a
        shard would delay the other workers."""
        self._calls.call(lambda shard: self._clients[shard].reach(), report_wait=False)

    def initialize(self, values: Mapping[str, Array], grant: bytes) -> None:
        """Sets all parameters; shards that have some already keep theirs. ``grant`` comes from the
        lease. Raises InvalidJob if a shard cannot read the first rows of its tables."""
        clients, fences = self._clients, self._fences
        try:
            self._calls.call(lambda shard: clients[shard].initialize(fences[shard], values, grant))
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
        staged: Sequence[StagedEverywhere] = (),
        clock: types_pb2.WorkerClock | None = None,
        others: str = "",
    ) -> None:
        """Receives parameters into ``into`` and table rows into ``rows``; without ``into`` only
        rows. ``source`` is None for the newest, a round's number (``decision`` is that of the
        round before), or the name of a kept snapshot. ``staged`` are attempts that all shards
        hold, for rounds that were decided ahead; ``clock`` is this worker's (ssp); ``others``
        describes, for the log, the workers that shards wait for before they answer."""

        def pull(shard: int) -> PullInfo:
            wanted = None if rows is None else rows.wanted(shard, rows_only=into is None)
            return self._clients[shard].pull(
                self._fences[shard],
                source,
                into or {},
                decision,
                wanted,
                staged=staged,
                clock=clock,
            )

        # Slices have no rows, so one that has nothing to hear either is not called.
        alone = into is None and decision is None and not staged
        shards = range(self.plan.row_shards if alone else self.count)
        self._pulling = True
        try:
            with span("pull", source=source):
                # A pull of rows alone may overlap with the computation of a gradient.
                pulled = self._calls.call(
                    pull, shards=shards, report_wait=into is not None, others=others
                )
        finally:
            self._pulling = False
        versions = [info.version for info in pulled]
        if rows is not None:
            rows.versions = (*versions, *self._versions[len(versions) :])
        # Snapshots are for evaluations, which may come in the middle of a round.
        if into is not None and not isinstance(source, str):
            self._versions = versions

    def pull_soon(self, round_number: int, into: Mapping[str, Array]) -> bool:
        """Receives the parameters of a round into ``into`` if all shards have decided the round
        before it within :data:`SOON_S`. Returns whether they came; the content of ``into`` is
        undefined otherwise. Does not retry, since a :meth:`pull` can follow."""

        def pull(shard: int) -> int | None:
            fence, client = self._fences[shard], self._clients[shard]
            try:
                return client.pull(fence, round_number, into, patience_s=SOON_S).version
            except (NotReady, RoundPassed):
                return None

        self._pulling = True
        try:
            with span("pull", source=round_number):
                pulled = self._calls.call(pull)
        except PsError as error:
            if error.retryable:
                return False
            raise
        finally:
            self._pulling = False
        versions = [version for version in pulled if version is not None]
        if len(versions) < len(pulled):
            return False
        self._versions = versions
        return True

    def bases(self, rows: ReceivedRows | None = None) -> tuple[int, ...]:
        """Returns the base version of a gradient per shard: that of the parameters or that of
        ``rows``, whichever is older."""
        if rows is None:
            return self.versions
        return tuple(map(min, self._versions, rows.versions))

    def push(self, pushes: Sequence[GradientPush]) -> list[PushResult]:
        """Stages a gradient on all shards, one part on each (sync)."""

        def push(shard: int) -> PushResult:
            return self._clients[shard].push(self._fences[shard], pushes[shard])

        with span("push", batch=pushes[0].batch, attempt=pushes[0].attempt):
            return self._calls.call(push, finishing=True)

    def confirm(self, staged: Sequence[StagedEverywhere]) -> None:
        """Tells all shards which attempts all of them hold."""
        clients, fences = self._clients, self._fences
        self._calls.call(
            lambda shard: clients[shard].confirm(fences[shard], staged),
            finishing=True,
            report_wait=False,
        )

    def push_pull(
        self,
        pushes: Sequence[GradientPush],
        into: Mapping[str, Array],
        following: ReceivedRows | None = None,
        round_number: int | None = None,
        clock: types_pb2.WorkerClock | None = None,
        others: str = "",
    ) -> list[PushResult]:
        """Applies a gradient on all shards, one part on each (async), or stages it (sync), and
        receives the newest parameters, or those of a round, and the rows for the ``following``
        batch. With ``clock`` (ssp), a result that is ``behind`` came without parameters that are
        new enough: pull again. ``others`` is as in :meth:`pull`."""

        def push_pull(shard: int) -> tuple[PushResult, PullInfo]:
            wanted = None if following is None else following.wanted(shard)
            client, fence = self._clients[shard], self._fences[shard]
            return client.push_pull(fence, pushes[shard], into, wanted, round_number, clock)

        with span("push_pull", batch=pushes[0].batch, attempt=pushes[0].attempt):
            self._pulling = round_number is not None or clock is not None
            try:
                answers = self._calls.call(push_pull, finishing=True, others=others)
            finally:
                self._pulling = False
        self._versions = [info.version for _, info in answers]
        if following is not None:
            following.versions = self.versions
        return [result for result, _ in answers]

    @property
    def asked_again(self) -> frozenset[int]:
        """Shards whose last call was repeated; an earlier try may have taken effect."""
        return self._calls.asked_again

    def _interrupt(self, at_once: bool) -> None:
        self._calls.abort.set()
        # A stalled shard or an endless round would hold a pull for a minute. A push may finish
        # unless its result no longer matters.
        if at_once or self._pulling:
            for client in self._clients:
                client.cancel()
