"""How the tensors of a push get here: in chunks, or in a segment that both processes see."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from pserver.assembly import VALUES, Assembly, Extent
from pserver.buffers import BufferPool, Loan
from psrpc.codec import Piece
from psrpc.encoding import decode, wire_dtype
from psrpc.plan import Plan

NDArray = npt.NDArray[Any]


@dataclass(slots=True)
class Arrived:
    """A gradient that is here, whole: what the update engine takes.

    Attributes:
        arrays: arena name -> ``[shard length]``, aligned; in the arena's dtype, or as bfloat16 or
            float16 where it was pushed so.
        loan: the memory it lies in, or None while that is the pushing worker's own.
    """

    arrays: Mapping[str, NDArray]
    loan: Loan | None


class Arrival(Protocol):
    """The tensors that a header has announced."""

    def place(self, plan: Plan, extents: Sequence[Extent]) -> Mapping[str, NDArray] | None:
        """Where they lie already: arena name -> ``[nbytes] uint8``; None if they have to come."""

    def receive(self, plan: Plan, extents: Sequence[Extent], into: Mapping[str, NDArray]) -> None:
        """Puts them into ``into``, arena name -> array of the announced bytes.

        Raises:
            InvalidArgument: what came is not what was announced.
        """


@dataclass(frozen=True, slots=True)
class Chunks:
    """They come in chunks; ``pieces`` ends with the last of them."""

    pieces: Iterable[Piece]

    def place(
        self,
        plan: Plan,  # noqa: ARG002  # of the protocol
        extents: Sequence[Extent],  # noqa: ARG002
    ) -> None:
        """See :class:`Arrival`."""
        return

    def receive(self, plan: Plan, extents: Sequence[Extent], into: Mapping[str, NDArray]) -> None:
        """See :class:`Arrival`."""
        Assembly(plan, extents, into).accept_all(self.pieces)


@dataclass(frozen=True, slots=True)
class Shared:
    """They lie in an attached segment, where nobody writes before the push is answered.

    ``views`` are ``[nbytes] uint8``, aligned, one for each extent.
    """

    views: Sequence[NDArray]

    def place(self, plan: Plan, extents: Sequence[Extent]) -> Mapping[str, NDArray]:
        """See :class:`Arrival`."""
        return {
            plan.arenas[extent.arena].name: view
            for extent, view in zip(extents, self.views, strict=True)
        }

    def receive(self, plan: Plan, extents: Sequence[Extent], into: Mapping[str, NDArray]) -> None:
        """See :class:`Arrival`."""
        for name, view in self.place(plan, extents).items():
            np.copyto(into[name].view(np.uint8), view)


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
) -> Iterator[Arrived]:
    """What a push brings, whole, for the length of a block.

    Args:
        extents: they have passed :func:`pserver.assembly.check_extents`.
        timeout_s: how long to wait for a buffer.
        check: raises when there is no use in that any longer.
        staged: it may have to outlive the block and becomes one term of a sum, so it is put into
            buffers of our own, in the arenas' own dtypes.

    Raises:
        InvalidArgument: what came is not what was announced.
        NotReady: all buffers were in use for ``timeout_s``.
    """
    if not extents:
        arrival.receive(plan, extents, {})
        yield Arrived({}, None)
        return
    placed = arrival.place(plan, extents)
    if placed is not None and not staged and all(e.encoding in VALUES for e in extents):
        yield Arrived({name: _typed(plan, e, placed) for name, e in _named(plan, extents)}, None)
        return
    with pool.loan(timeout_s, check) as loan:
        own = loan.buffers.arrays
        into: dict[str, NDArray] = {}
        encoded: list[tuple[str, Extent]] = []
        for name, extent in _named(plan, extents):
            if extent.encoding in ("int8", "topk") or (staged and extent.encoding != "plain"):
                encoded.append((name, extent))
                into[name] = loan.buffers.raw(name, extent.nbytes)
            else:
                into[name] = (
                    own[name]
                    .view(np.uint8)[: extent.nbytes]
                    .view(wire_dtype(extent.encoding, own[name].dtype))
                )
        arrival.receive(plan, extents, into)
        for name, extent in encoded:
            if extent.encoding in VALUES:
                np.copyto(own[name], _typed(plan, extent, into))
            else:
                decode(extent.encoding, into[name], own[name])
            into[name] = own[name]
        yield Arrived(into, loan)


def _named(plan: Plan, extents: Sequence[Extent]) -> Iterator[tuple[str, Extent]]:
    return ((plan.arenas[extent.arena].name, extent) for extent in extents)


def _typed(plan: Plan, extent: Extent, raw: Mapping[str, NDArray]) -> NDArray:
    arena = plan.arenas[extent.arena]
    return raw[arena.name].view(wire_dtype(extent.encoding, arena.dtype))
