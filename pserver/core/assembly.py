"""Assembles a stream of chunks into flat arrays, and checks the elements while they are in the CPU
cache. Refuses a stream that does not match its header. Shards use it for pushes, clients for
pulls."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from psrpc.core.encoding import Encoding, check_nbytes, wire_dtype
from psrpc.core.errors import InvalidArgument
from psrpc.core.plan import ArenaPlan, Plan
from psrpc.wire.codec import MAX_CHUNK_BYTES, Piece

NDArray = npt.NDArray[Any]

PIECE_BYTES = 1 << 20
"""Size of the pieces in which tensors are received and checked. Pieces are checked as they arrive,
because checking 16 MB only after the last byte takes 0.7 ms."""

LOOK = 1 << 13
"""Elements checked per call. For a dot product of 10,000 or more, OpenBLAS starts a second thread,
which then spins while it waits for more work: with two cores the workers' steps took 1.4 times as
long."""

_EXPONENTS = {"bfloat16": np.uint16(0x7F80), "float16": np.uint16(0x7C00)}
"""Exponent masks: only infinities and NaN have all of these bits set."""

Seen = Callable[[int, NDArray], object]
"""Called with the index of an extent (an arena, or a table after all arenas) and elements of it."""


def pieces(flat: NDArray) -> Iterator[NDArray]:
    """Splits a flat array into pieces of :data:`PIECE_BYTES`."""
    step = PIECE_BYTES // flat.itemsize
    return (flat[start : start + step] for start in range(0, len(flat), step))


def check_finite(what: str, part: NDArray) -> None:
    """Checks that all elements of ``part`` are finite; ``what`` names it in the error.

    Raises:
        InvalidArgument: one is not; the worker should push such a batch as skipped.
    """
    if not is_finite(part):
        raise InvalidArgument(
            f"{what} has an element that is not finite; expected none: a batch with such a gradient"
            " is pushed as skipped"
        )


def is_finite(part: NDArray) -> bool:
    """Whether no element of a contiguous array is infinite or NaN. True for integers, and for
    encoded bytes, which are checked after decoding."""
    exponent = _EXPONENTS.get(part.dtype.name)
    if exponent is not None:
        return bool(np.bitwise_and(part.view(np.uint16), exponent).max(initial=0) != exponent)
    if part.dtype.kind != "f":
        return True
    flat = part.reshape(-1)
    with np.errstate(all="ignore"):
        # Newest elements first: they are still in the core's own cache.
        for start in reversed(range(0, flat.size, LOOK)):
            few = flat[start : start + LOOK]
            # Large finite elements may have an infinite sum of squares; non-finite elements never
            # have a finite one.
            if not math.isfinite(np.dot(few, few)) and not np.isfinite(few).all():
                return False
    return True


Encodings = tuple[Encoding, ...]
PLAIN: Encodings = ("plain",)
VALUES: Encodings = ("plain", "bfloat16", "float16")
GRADIENTS: Encodings = (*VALUES, "int8", "topk")
"""``VALUES`` are the encodings of parameters, ``GRADIENTS`` those of gradients."""


class Extent(NamedTuple):
    """The number of bytes of one arena in a stream, and their encoding. ``arena`` is its index in
    the plan. The rows of a table have an extent too; its index is the number of arenas plus the
    table's index."""

    arena: int
    nbytes: int
    encoding: Encoding


def value_dtype(arena: ArenaPlan, encoding: Encoding) -> np.dtype[Any]:
    """The dtype of ``arena``'s elements when parameters travel in ``encoding``."""
    return wire_dtype(encoding if arena.encodable else "plain", arena.dtype)


def shard_extents(plan: Plan, shard: int) -> list[Extent]:
    """Extents of ``shard``'s whole part of every arena, plain, in plan order."""
    return [
        Extent(index, arena.shard_length(shard) * arena.itemsize, "plain")
        for index, arena in enumerate(plan.arenas)
    ]


def check_extents(plan: Plan, shard: int, extents: Sequence[Extent], allowed: Encodings) -> None:
    """Compares the extents of a header with the plan; call it before allocating anything.

    Raises:
        InvalidArgument: an arena is unknown, missing, announced twice, of another length, or in an
            encoding that is not ``allowed`` for it.
    """
    announced: set[int] = set()
    for index, nbytes, encoding in extents:
        if index >= len(plan.arenas):
            raise InvalidArgument(
                f"the stream announces arena {index}; the plan has {len(plan.arenas)} arenas"
            )
        arena = plan.arenas[index]
        if index in announced:
            raise InvalidArgument(f"the stream announces arena {arena.name} twice; expected once")
        announced.add(index)
        expected = allowed if arena.encodable else PLAIN
        if encoding not in expected:
            raise InvalidArgument(
                f"the stream announces arena {arena.name} as {encoding}; expected"
                f" {_either(expected)}"
            )
        wrong = check_nbytes(encoding, nbytes, arena.shard_length(shard), arena.dtype)
        if wrong:
            raise InvalidArgument(
                f"the stream announces {nbytes} bytes of arena {arena.name} as {encoding};"
                f" {wrong} on shard {shard}"
            )
    for index, arena in enumerate(plan.arenas):
        if index not in announced:
            raise InvalidArgument(
                f"the stream does not announce arena {arena.name}; expected"
                f" {arena.shard_length(shard)} elements of it"
            )


def check_values(encoding: Encoding) -> None:
    """Checks that parameters may travel in ``encoding``.

    Raises:
        InvalidArgument: only gradients may be compressed.
    """
    if encoding not in VALUES:
        raise InvalidArgument(f"values were asked for as {encoding}; expected {_either(VALUES)}")


def _either(encodings: Encodings) -> str:
    return " or ".join(encodings)


def targets(
    plan: Plan,
    extents: Iterable[Extent],
    into: Mapping[str, NDArray],
    rows: Mapping[int, NDArray] | None,
) -> Iterator[tuple[Extent, NDArray]]:
    """Pairs each extent that has bytes with its target array. Arguments: see :class:`Assembly`."""
    arenas = len(plan.arenas)
    for extent in extents:
        if not extent.nbytes:
            continue
        if extent.arena < arenas:
            yield extent, into[plan.arenas[extent.arena].name]
        else:
            yield extent, (rows or {})[extent.arena - arenas]


class Assembly:
    """Tracks the next expected byte of one stream. Not thread-safe."""

    def __init__(
        self,
        plan: Plan,
        extents: Sequence[Extent],
        into: Mapping[str, NDArray],
        rows: Mapping[int, NDArray] | None = None,
        seen: Seen | None = None,
    ) -> None:
        """Args:
        extents: from the header; checked by :func:`check_extents`, those of rows by
            :func:`pserver.core.table_ids.check_row_extents`.
        into: arena name -> contiguous array of the announced bytes to fill; chunks hold whole
            elements of it.
        rows: table index -> array to fill with its rows.
        seen: called with the elements of each chunk.
        """
        self._seen = seen
        self._plan = plan
        self._awaited = [extent for extent in extents if extent.nbytes]
        self._targets = {e.arena: target for e, target in targets(plan, extents, into, rows)}
        for extent in self._awaited:
            target = self._targets[extent.arena]
            assert target.flags.c_contiguous
            assert target.nbytes == extent.nbytes
        self._at = 0
        self._offset = 0

    def accept(self, piece: Piece) -> None:
        """Copies one chunk to its place.

        Raises:
            InvalidArgument: it is not the next piece of the stream. The target arrays are partly
                filled and must not be used.
        """
        if self._at == len(self._awaited):
            raise InvalidArgument(
                f"the stream goes on after its last announced byte: {len(piece.data)} bytes"
                f" of arena {piece.arena} at offset {piece.offset}; expected its end"
            )
        index, nbytes, _ = self._awaited[self._at]
        itemsize = self._targets[index].itemsize
        if piece.arena != index:
            raise InvalidArgument(
                f"a chunk is of arena {piece.arena}; expected arena {index} ({self._name(index)})"
                f" from offset {self._offset}"
            )
        if piece.offset != self._offset:
            raise InvalidArgument(
                f"a chunk of arena {self._name(index)} has offset {piece.offset}; expected"
                f" {self._offset}"
            )
        length = len(piece.data)
        left = nbytes - self._offset
        if length > left:
            raise InvalidArgument(
                f"a chunk of arena {self._name(index)} has {length} bytes; expected at most the"
                f" {left} that are left"
            )
        if not 0 < length <= MAX_CHUNK_BYTES or length % itemsize:
            raise InvalidArgument(
                f"a chunk of arena {self._name(index)} has {length} bytes; expected 1 to"
                f" {MAX_CHUNK_BYTES}, in whole elements of {itemsize}"
            )
        # NumPy releases the interpreter lock while it copies; a memoryview does not.
        flat = self._targets[index].reshape(-1)
        first = self._offset // itemsize
        part = flat[first : first + length // itemsize]
        if self._seen is None:
            np.copyto(part.view(np.uint8), np.frombuffer(piece.data, np.uint8))
        else:
            # Check each part while it is still in the core's own cache.
            sent = np.frombuffer(piece.data, np.uint8)
            for start in range(0, part.size, LOOK):
                few = part[start : start + LOOK]
                at = start * itemsize
                np.copyto(few.view(np.uint8), sent[at : at + few.nbytes])
                self._seen(index, few)
        self._offset += length
        if self._offset == nbytes:
            self._at += 1
            self._offset = 0

    def accept_all(self, pieces: Iterable[Piece]) -> None:
        """Accepts a whole stream.

        Raises:
            InvalidArgument: a piece is wrong, or the stream ended too soon.
        """
        for piece in pieces:
            self.accept(piece)
        self.finish()

    def finish(self) -> None:
        """Marks the end of the stream.

        Raises:
            InvalidArgument: announced bytes are missing.
        """
        if self._at < len(self._awaited):
            index, nbytes, _ = self._awaited[self._at]
            raise InvalidArgument(
                f"the stream ended at byte {self._offset} of arena"
                f" {self._name(index)}; expected {nbytes}"
            )

    def _name(self, index: int) -> str:
        arenas = self._plan.arenas
        if index < len(arenas):
            return arenas[index].name
        return f"{index}, rows of table {self._plan.tables[index - len(arenas)].name!r}"
