"""A shard's service for workers: the real engine, call by call."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from pserver.core.assembly import Extent, Seen
from pserver.core.requests import PullRequest, PushRequest, PushResult, RowsRequest, Values
from pserver.core.table_ids import TableIds
from psrpc.core.commands import WorkerClock
from psrpc.core.errors import AccessDenied, NotReady, PsError, Unreachable
from psrpc.core.plan import Plan
from psrpc.v1 import parameter_server_pb2 as pb
from tests.sim.network import Respond
from tests.sim.witness import ARENA

if TYPE_CHECKING:
    from tests.sim.cluster import Cluster
    from tests.sim.shard import Shard

NDArray = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class Tensors:
    """Tensors after the header of an ``Initialize`` or a push: values or a gradient, the gradients
    of the rows that the header names, and the ids of rows that a ``PushPull`` wants: of the newest
    version, with ``clock`` once the worker is not too far ahead, or of ``round``. For both it waits
    ``patience_s``."""

    arena: NDArray | None
    rows: tuple[NDArray, ...] = ()
    wanted: TableIds = ()
    round: int | None = None
    clock: WorkerClock | None = None
    patience_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Sent:
    """A gradient on its way: a :class:`pserver.transport.transport.Arrival`."""

    tensors: Tensors
    meanwhile: Callable[[], object]

    def in_place(self, plan: Plan, extents: Sequence[Extent], tables: int) -> None:
        return

    def receive(
        self,
        plan: Plan,
        extents: Sequence[Extent],
        into: Mapping[str, NDArray],
        rows: Mapping[int, NDArray] | None = None,
        seen: Seen | None = None,
    ) -> None:
        self.meanwhile()
        if self.tensors.arena is not None:
            np.copyto(into[ARENA], self.tensors.arena.view(into[ARENA].dtype))
        for array, given in zip((rows or {}).values(), self.tensors.rows, strict=True):
            np.copyto(array, given)


@dataclass(slots=True, eq=False)
class _Parked:
    request: PullRequest
    respond: Respond
    until: float


class Service:
    """Answers the calls that come to one shard's address."""

    def __init__(self, cluster: Cluster, shard: Shard) -> None:
        self.process = shard.process
        self.meanwhile: Callable[[], object] = lambda: None
        """Called while a gradient arrives, which in a shard is on a thread of its own."""
        self._cluster = cluster
        self._shard = shard
        self._schedule = cluster.schedule
        self._parked: list[_Parked] = []
        self._clocks = cluster.invariants.clocks

    def handle(self, method: str, request: Any, respond: Respond) -> None:
        engine = self._shard.engine
        if engine is None:
            respond(NotReady(f"shard {self._shard.index} builds its update engine"))
            return
        try:
            answer: Any
            if method == "Pull":
                request, patience_s = request
                request = engine.credentials.pull(request, "")
                if request.clock is not None:
                    self._clocks.came(self._shard, request, request.clock)
                waits = isinstance(request.source, int) or request.clock is not None
                if waits or request.decision is not None:
                    self._park(request, respond, patience_s)
                    return
                answer = engine.pull(request, 0.0)
            elif method == "GetStatus":
                answer = pb.GetStatusResponse()
            else:
                header, tensors = request
                sent = Sent(tensors, self.meanwhile)
                if method == "Initialize":
                    header = engine.credentials.initialize(header, "")
                    answer = engine.initialize(header, sent, 0.0)
                elif method == "Push":
                    header = engine.credentials.push(header, "")
                    answer = engine.credentials.vouch(header, engine.push(header, sent, 0.0))
                    self._cluster.invariants.check_accepted(self._shard, header, answer)
                elif tensors.round is not None:
                    header = engine.credentials.push(header, "")
                    pull = PullRequest(
                        header.fence, header.worker, tensors.round, None, rows=tensors.wanted
                    )
                    result, values = engine.push_round(header, sent, 0.0, pull, None)
                    result = engine.credentials.vouch(header, result)
                    self._cluster.invariants.check_accepted(self._shard, header, result)
                    self._cluster.counts["rounds pulled with a push"] += 1
                    if values is None:
                        self._park_with(result, pull, respond, tensors.patience_s)
                        return
                    self._cluster.counts["rounds completed by a push"] += 1
                    answer = result, values
                else:
                    assert method == "PushPull"
                    header = engine.credentials.push(header, "")
                    wanted = RowsRequest(tensors.wanted) if tensors.wanted else None
                    clock = engine.credentials.clock_of(header, tensors.clock)
                    if clock is not None:
                        self._clocks.came(self._shard, header, clock)
                    result, values = engine.push_pull(header, sent, 0.0, "plain", wanted, clock)
                    result = engine.credentials.vouch(header, result)
                    self._cluster.invariants.check_accepted(self._shard, header, result)
                    if result.behind:
                        self._wait(header, tensors, result, values, respond)
                        return
                    answer = result, values
                    if clock is not None:
                        self._clocks.check_served(self._shard, header, values, clock)
        except AccessDenied as error:
            # Every worker is honest here, whatever is lost, late or repeated.
            self._cluster.invariants.fail(f"{self._shard.address} denied {method}: {error}")
        except PsError as error:
            self.changed()
            respond(error)
        else:
            self.changed()
            respond(answer)

    def _wait(
        self, push: PushRequest, tensors: Tensors, result: PushResult, old: Values, respond: Respond
    ) -> None:
        """Answers a push once its worker is not too far ahead, or with ``old`` values."""
        self._cluster.counts["waits for slower workers"] += 1
        rows, clock = tensors.wanted, tensors.clock
        pull = PullRequest(push.fence, push.worker, None, rows=rows, clock=clock)

        def both(values: Any) -> None:
            if isinstance(values, NotReady):
                self._cluster.counts["slower workers not awaited"] += 1
                respond((result, old))
            elif isinstance(values, PsError):
                respond(values)
            else:
                respond((replace(result, behind=False), values))

        self._park(pull, both, tensors.patience_s)
        self.changed()

    def _park_with(
        self, result: PushResult, pull: PullRequest, respond: Respond, patience_s: float
    ) -> None:
        """Answers a push together with the pull that came with it."""

        def both(values: Any) -> None:
            respond(values if isinstance(values, PsError) else (result, values))

        self._park(pull, both, patience_s)
        self.changed()

    def _park(self, request: PullRequest, respond: Respond, patience_s: float) -> None:
        parked = _Parked(request, respond, self._schedule.now() + patience_s)
        self._pull(parked)
        if parked in self._parked:
            self._schedule.after(patience_s, self.process, self.changed)

    def _pull(self, parked: _Parked) -> None:
        assert self._shard.engine is not None
        try:
            values = self._shard.engine.pull(parked.request, 0.0)
        except NotReady as error:
            if self._schedule.now() < parked.until:
                self._parked.append(parked)
            else:
                parked.respond(error)
        except PsError as error:
            parked.respond(error)
        else:
            if parked.request.clock is not None:
                request = parked.request
                self._clocks.check_served(self._shard, request, values, request.clock)
            parked.respond(values)
            if parked.request.decision is not None or parked.request.staged:
                self.changed()

    def close(self) -> None:
        """It has ended, and its process goes on: who waits loses the connection."""
        parked, self._parked = self._parked, []
        for one in parked:
            one.respond(Unreachable(f"{self._shard} has ended"))

    def changed(self, begun: bool = False) -> None:
        """Something may have changed in the engine: looks at it, and lets the parked look again."""
        self._cluster.invariants.check_shard(self._shard, begun)
        if self._parked:
            parked, self._parked = self._parked, []
            for one in parked:
                self._pull(one)
