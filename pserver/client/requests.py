"""Fills and checks a worker's requests to one shard."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy.typing as npt

from pserver.core.assembly import GRADIENTS, VALUES, Extent, check_extents
from pserver.core.requests import StagedEverywhere
from pserver.core.requests import SummedBatch as SummedBatch
from pserver.core.table_ids import RowsWanted, add_table_ids, count, pushed_pairs, row_extents
from pserver.transport.transport import Outgoing, Target
from pserver.wire import streams
from psrpc.core.batch import BatchId
from psrpc.core.encoding import Encoding, Gradient
from psrpc.core.errors import InvalidArgument
from psrpc.core.plan import Plan
from psrpc.core.tables import MAX_IDS, Rows
from psrpc.v1 import parameter_server_pb2 as pb
from psrpc.v1 import types_pb2 as types
from psrpc.wire.commands import to_batch

NDArray = npt.NDArray[Any]
Arrays = Mapping[str, NDArray]
"""Arena name -> the worker's whole flat array of that arena, ``[arena length]``, contiguous. In a
mapping for received values, the dtype of the arrays selects the encoding on the wire: the arena's
own dtype, bfloat16 or float16. A mapping must keep the same arrays after it was passed, since
clients cache it."""

Source = int | str | None
"""The values to pull: None for the newest, a number for those of that round, a string for those of
the kept snapshot of that name."""

_TARGETS = 4
"""Maximum number of mappings that a client caches: a worker's two parameter sets and two more."""


@dataclass(frozen=True, slots=True)
class PullInfo:
    """The version and generation of pulled values."""

    version: int
    generation: int


@dataclass(frozen=True, slots=True)
class GradientPush:
    """A gradient to push: the shard's part of every arena, and of tables.

    ``gradients`` is None if the gradient is not finite; the shard then records the batch as
    skipped. ``rows`` contains row gradients by table: ascending ids of this shard, duplicates
    summed. ``totals`` are added to the totals of the epoch, see :mod:`psrpc.core.batch`; empty if
    the gradient is not finite. ``grant`` comes with the lease of the attempt. ``summed`` are
    further batches whose gradients are in the sum (async).
    """

    batch: BatchId
    attempt: int
    base_version: int
    gradients: Gradient | None
    rows: Mapping[int, Rows] | None = None
    totals: Sequence[float] = ()
    grant: bytes = b""
    summed: Sequence[SummedBatch] = ()


class Requests:
    """Fills the headers of requests, and cuts a worker's arrays to the shard's part.

    Not thread-safe.
    """

    def __init__(self, plan: Plan, shard: int) -> None:
        self._plan = plan
        self._shard = shard
        self._targets: dict[int, tuple[Arrays, Target]] = {}
        self._extents: list[Extent] = []
        self._extent_messages: list[types.Extent] = []

    def outgoing(
        self,
        header: pb.ExchangeHeader,
        into: Arrays | None,
        push: GradientPush | None,
        wanted: RowsWanted | None,
    ) -> Outgoing:
        """Returns the tensors of an exchange and fills the pull in ``header`` that asks for them.

        Args:
            into: receives the shard's part of every arena; None if no arenas are pulled.
            push: the gradient to push, if any; :meth:`fill_push` fills its header.
            wanted: the table rows to pull, if any. With ``rows_only``, ``into`` stays as it is.
        """
        target = None
        if wanted is not None:
            wanted.check(self._plan)
            add_table_ids(header.pull.rows, wanted.pairs)
            header.pull.rows_only = wanted.rows_only
            header.pull.encoding = types.ENCODING_PLAIN
        if into is not None and (wanted is None or not wanted.rows_only):
            target = self.target(into)
            header.pull.encoding = streams.to_encoding(target.encoding)
        if push is None:
            return Outgoing(into=target, wanted=wanted)
        return Outgoing(push.gradients, target, push.rows or {}, wanted)

    def fill_pull(
        self,
        header: pb.PullRequest,
        fence: types.Fence,
        source: Source,
        decision: types.SignedDecision | None,
    ) -> None:
        """Fills ``header`` in place, except for the fields that :meth:`outgoing` fills."""
        header.fence.CopyFrom(fence)
        if decision is not None:
            header.decision.CopyFrom(decision)
        self.fill_source(header, source)

    def fill_source(self, header: pb.PullRequest, source: Source) -> None:
        """Fills the source of values in ``header`` in place."""
        if source is None:
            header.newest = True
        elif isinstance(source, int):
            header.round = source
        else:
            header.snapshot = source

    def fill_staged(self, header: pb.PullRequest, staged: Sequence[StagedEverywhere]) -> None:
        """Adds attempts that all shards hold to ``header`` in place."""
        for one in staged:
            attempt = one.attempt
            batch = to_batch(attempt.batch)
            header.staged.add(batch=batch, attempt=attempt.number, receipts=one.receipts)

    def fill_clock(self, header: pb.PullRequest, clock: types.WorkerClock | None) -> None:
        """Fills the worker's clock in ``header`` in place, if it has one."""
        if clock is not None:
            header.clock.CopyFrom(clock)

    def fill_push(self, header: pb.PushHeader, fence: types.Fence, push: GradientPush) -> None:
        """Fills ``header`` in place."""
        header.fence.CopyFrom(fence)
        header.batch.CopyFrom(to_batch(push.batch))
        header.attempt = push.attempt
        header.grant = push.grant
        header.base_version = push.base_version
        header.examples = push.batch.count
        header.skipped = push.gradients is None
        if push.gradients is None:
            return
        header.totals.extend(push.totals)
        header.extents.extend(self._extents_of(push.gradients))
        for one in push.summed:
            batch, number = to_batch(one.attempt.batch), one.attempt.number
            header.summed.add(batch=batch, attempt=number, grant=one.grant, totals=one.totals)
        if push.rows:
            pushed = pushed_pairs(self._plan, push.rows)
            add_table_ids(header.rows, pushed)
            header.extents.extend(streams.to_extents(row_extents(self._plan, pushed)))

    def _extents_of(self, gradient: Gradient) -> list[types.Extent]:
        """Returns the checked extents of a gradient; cached, since they rarely change."""
        extents = streams.gradient_extents(self._plan, gradient)
        if extents != self._extents:
            check_extents(self._plan, self._shard, extents, GRADIENTS)
            self._extents, self._extent_messages = extents, streams.to_extents(extents)
        return self._extent_messages

    def target(self, into: Arrays) -> Target:
        """Returns the shard's part of ``into``; cached, since a worker has two such mappings."""
        known = self._targets.get(id(into))
        if known is not None and known[0] is into:
            return known[1]
        mine = self.mine(into)
        target = Target(mine, self._encoding(mine))
        if len(self._targets) >= _TARGETS:
            self._targets.pop(next(iter(self._targets)))
        self._targets[id(into)] = (into, target)
        return target

    def _encoding(self, mine: dict[str, NDArray]) -> Encoding:
        """Returns the encoding in which encodable arenas are received."""
        for arena in self._plan.arenas:
            if arena.encodable:
                name: Any = mine[arena.name].dtype.name
                return "plain" if name == arena.dtype else name
        return "plain"

    def mine(self, arrays: Arrays) -> dict[str, NDArray]:
        """Returns views of the shard's part of every arena.

        Raises:
            InvalidArgument: an array is not a whole arena of the plan.
        """
        mine = {}
        for arena in self._plan.arenas:
            array = arrays[arena.name]
            names = (arena.dtype, *VALUES) if arena.encodable else (arena.dtype,)
            if array.shape != (arena.length,) or array.dtype.name not in names:
                raise InvalidArgument(
                    f"the array for arena {arena.name} is {array.dtype}{list(array.shape)};"
                    f" expected {arena.dtype}[{arena.length}]"
                )
            mine[arena.name] = array[arena.cuts[self._shard] : arena.cuts[self._shard + 1]]
        return mine


def fit_one_message(push: GradientPush, rows: RowsWanted | None) -> bool:
    """Whether one message can hold the ids of a push and those of the ``rows`` to pull."""
    if rows is None or not push.rows:
        return True
    return sum(len(r.ids) for r in push.rows.values()) + count(rows.pairs) <= MAX_IDS
