"""Receives announced tensors: from chunks, a data connection, or a shared segment."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from pserver.core.assembly import VALUES, Assembly, Extent, targets
from pserver.core.finite import PIECE_BYTES, Seen, check_finite, is_finite, pieces
from pserver.core.table_ids import TableIds
from pserver.transport.buffers import BufferPool, Loan
from pserver.transport.byte_stream import RECORD_BYTES
from pserver.transport.data_connection import DataConnection
from psrpc.core.encoding import decode, wire_dtype
from psrpc.core.plan import Plan, aligned_empty
from psrpc.core.tables import Ids, Rows
from psrpc.wire.codec import Piece

NDArray = npt.NDArray[Any]


# Pieces match the records of sealed connections, which are then deciphered in place.
assert PIECE_BYTES == RECORD_BYTES


@dataclass(slots=True)
class Arrived:
    """A gradient that has arrived whole, as the update engine takes it.

    Attributes:
        arrays: arena name -> ``[shard length]``, aligned; in the arena's dtype, or as bfloat16 or
            float16 if pushed so.
        loan: the memory of the arrays; None while that is the pushing worker's own.
        rows: table -> the gradients of its rows. In the worker's memory their values may change at
            any time; the ids may not.
    """

    arrays: Mapping[str, NDArray]
    loan: Loan | None
    rows: Mapping[int, Rows] = field(default_factory=dict)


class Arrival(Protocol):
    """The tensors that a header announces."""

    def place(
        self,
        plan: Plan,  # noqa: ARG002  # for implementations
        extents: Sequence[Extent],  # noqa: ARG002
    ) -> Mapping[str, NDArray] | None:
        """Returns the tensors in shared memory, arena name -> ``[nbytes] uint8``; None if they have
        yet to come."""
        return None

    def placed_rows(self) -> Sequence[NDArray]:
        """Returns the rows in shared memory, ``[nbytes] uint8`` per table."""
        return ()

    def receive(
        self,
        plan: Plan,
        extents: Sequence[Extent],
        into: Mapping[str, NDArray],
        rows: Mapping[int, NDArray] | None = None,
        seen: Seen | None = None,
    ) -> None:
        """Receives into ``into``, arena name -> array of the announced bytes, and ``rows``, by
        table. Tensors that come piece by piece are passed to ``seen``, each part once.

        Raises:
            InvalidArgument: the received bytes are not those announced.
        """


@dataclass(frozen=True, slots=True)
class Chunks(Arrival):
    """Tensors that come in chunks; ``pieces`` ends with the last one."""

    pieces: Iterable[Piece]

    def receive(
        self,
        plan: Plan,
        extents: Sequence[Extent],
        into: Mapping[str, NDArray],
        rows: Mapping[int, NDArray] | None = None,
        seen: Seen | None = None,
    ) -> None:
        """See :class:`Arrival`."""
        Assembly(plan, extents, into, rows, seen).accept_all(self.pieces)


@dataclass(frozen=True, slots=True)
class Streamed(Arrival):
    """Tensors that follow on the data connection, one extent after another without gaps."""

    connection: DataConnection

    def receive(
        self,
        plan: Plan,
        extents: Sequence[Extent],
        into: Mapping[str, NDArray],
        rows: Mapping[int, NDArray] | None = None,
        seen: Seen | None = None,
    ) -> None:
        """See :class:`Arrival`.

        Raises:
            Unreachable: the connection ended too soon.
        """
        for extent, target in targets(plan, extents, into, rows):
            assert target.flags.c_contiguous
            assert target.nbytes == extent.nbytes
            flat = target.reshape(-1)
            if seen is None:
                self.connection.receive_into(flat.view(np.uint8).data)
                continue
            for part in pieces(flat):
                self.connection.receive_into(part.view(np.uint8).data)
                seen(extent.arena, part)


@dataclass(frozen=True, slots=True)
class Shared(Arrival):
    """Tensors in an attached segment; the worker does not write there until the push is answered.

    Arenas are not checked for non-finite elements: the worker has done so, another process of the
    same user could change them after any check, and reading 64 MB once more costs a fifth of a
    push.

    ``views`` are ``[nbytes] uint8``, aligned, one per extent of an arena; ``rows`` the same per
    table, in table order."""

    views: Sequence[NDArray]
    rows: Sequence[NDArray] = ()

    def place(self, plan: Plan, extents: Sequence[Extent]) -> Mapping[str, NDArray]:
        """See :class:`Arrival`."""
        return {
            plan.arenas[extent.arena].name: view
            for extent, view in zip(extents[: len(self.views)], self.views, strict=True)
        }

    def placed_rows(self) -> Sequence[NDArray]:
        """See :class:`Arrival`."""
        return self.rows

    def receive(
        self,
        plan: Plan,
        extents: Sequence[Extent],
        into: Mapping[str, NDArray],
        rows: Mapping[int, NDArray] | None = None,
        seen: Seen | None = None,  # noqa: ARG002
    ) -> None:
        """See :class:`Arrival`."""
        for name, view in self.place(plan, extents).items():
            np.copyto(into[name].view(np.uint8), view)
        for array, view in zip((rows or {}).values(), self.rows, strict=True):
            np.copyto(array.reshape(-1).view(np.uint8), view)


@contextmanager
def arriving(
    arrival: Arrival,
    plan: Plan,
    extents: Sequence[Extent],
    pool: BufferPool,
    timeout_s: float,
    check: Callable[[], object],
    *,
    staged: bool,
    rows: TableIds = (),
    worker: str = "",
    of: str = "",
) -> Iterator[Arrived]:
    """Yields the tensors of a push, whole.

    Args:
        extents: checked by :func:`pserver.core.assembly.check_extents`; those of ``rows`` come
            last.
        timeout_s: how long to wait for a buffer.
        check: raises when waiting has become pointless.
        staged: the gradient may outlive the block and becomes a term of a sum, so it is put into
            the shard's own buffers, in the arenas' own dtypes.
        rows: the ids that have row gradients. Their memory is not the pool's, but is only allocated
            with a loan of the pool.
        worker: the pushing worker; see :func:`pserver.transport.buffers.worker_quota`.
        of: names a gradient, whose elements all have to be finite; empty for values.

    Raises:
        InvalidArgument: the received bytes are not those announced.
        NotReady: all buffers, or those of ``worker``, were in use for ``timeout_s``.
        Stalled: the tensors stopped coming.
    """
    if not extents:
        arrival.receive(plan, extents, {})
        yield Arrived({}, None)
        return
    arenas = extents[: len(extents) - len(rows)] if rows else extents
    placed = arrival.place(plan, arenas)
    if placed is not None and not staged and all(e.encoding in VALUES for e in arenas):
        arrays = {name: _typed(plan, e, placed) for name, e in _named(plan, arenas)}
        yield Arrived(arrays, None, _placed_rows(plan, rows, arrival.placed_rows()) if rows else {})
        return
    with pool.loan(timeout_s, check, worker) as loan:
        own = loan.buffers.arrays
        into: dict[str, NDArray] = {}
        encoded: list[tuple[str, Extent]] = []
        for name, extent in _named(plan, arenas):
            if extent.encoding in ("int8", "topk") or (staged and extent.encoding != "plain"):
                encoded.append((name, extent))
                into[name] = loan.buffers.raw(name, extent.nbytes)
            else:
                into[name] = (
                    own[name]
                    .view(np.uint8)[: extent.nbytes]
                    .view(wire_dtype(extent.encoding, own[name].dtype))
                )
        own_rows = _receive(plan, extents, arrival, into, rows, of)
        for name, extent in encoded:
            if extent.encoding in VALUES:
                np.copyto(own[name], _typed(plan, extent, into))
                if of:
                    check_finite(f"arena {name} of {of}", own[name])
            else:
                decode(extent.encoding, into[name], own[name])
            into[name] = own[name]
        yield Arrived(into, loan, own_rows)


def _receive(
    plan: Plan,
    extents: Sequence[Extent],
    arrival: Arrival,
    into: Mapping[str, NDArray],
    rows: TableIds,
    of: str,
) -> dict[int, Rows]:
    """Receives all tensors and checks the arenas of a gradient; returns the gradients of
    ``rows``."""
    if not of and not rows:
        arrival.receive(plan, extents, into)
        return {}
    values = {table: _row_buffer(plan, table, ids) for table, ids in rows}
    unknown = {table: array.size for table, array in values.items()}

    def look(extent: int, part: NDArray) -> None:
        table = extent - len(plan.arenas)
        if table < 0:
            if of:
                check_finite(f"arena {plan.arenas[extent].name} of {of}", part)
        elif is_finite(part):
            unknown[table] -= part.size

    arrival.receive(plan, extents, into, values, look)
    return {table: Rows(ids, values[table], not unknown[table]) for table, ids in rows}


def _named(plan: Plan, extents: Sequence[Extent]) -> Iterator[tuple[str, Extent]]:
    return ((plan.arenas[extent.arena].name, extent) for extent in extents)


def _typed(plan: Plan, extent: Extent, raw: Mapping[str, NDArray]) -> NDArray:
    arena = plan.arenas[extent.arena]
    return raw[arena.name].view(wire_dtype(extent.encoding, arena.dtype))


def _placed_rows(plan: Plan, rows: TableIds, views: Sequence[NDArray]) -> dict[int, Rows]:
    return {
        table: Rows(ids, view.view(np.float32).reshape(len(ids), plan.tables[table].width))
        for (table, ids), view in zip(rows, views, strict=True)
    }


def _row_buffer(plan: Plan, table: int, ids: Ids) -> npt.NDArray[np.float32]:
    width = plan.tables[table].width
    return aligned_empty(len(ids) * width, "float32").reshape(len(ids), width)
