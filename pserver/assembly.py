"""Puts a stream of arena chunks into flat arrays, and refuses any stream that does not fit.

The shard uses it for what is pushed, the client for what is pulled.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from psrpc.codec import MAX_CHUNK_BYTES, Piece
from psrpc.errors import InvalidArgument
from psrpc.plan import Plan

NDArray = npt.NDArray[Any]
Extent = tuple[int, int]
"""Index of an arena in the plan, and how many bytes of it a stream carries."""


def shard_extents(plan: Plan, shard: int) -> list[Extent]:
    """What a stream about ``shard`` announces: its whole part of every arena, in plan order."""
    return [
        (index, arena.shard_length(shard) * arena.itemsize)
        for index, arena in enumerate(plan.arenas)
    ]


def check_extents(plan: Plan, shard: int, extents: Sequence[Extent]) -> None:
    """Compares what a header announces with the plan; call it before anything is allocated.

    Raises:
        InvalidArgument: an arena is unknown, missing, announced twice or of another length.
    """
    expected = dict(shard_extents(plan, shard))
    announced: set[int] = set()
    for index, nbytes in extents:
        if index not in expected:
            raise InvalidArgument(
                f"the stream announces arena {index}; the plan has {len(expected)} arenas"
            )
        name = plan.arenas[index].name
        if index in announced:
            raise InvalidArgument(f"the stream announces arena {name} twice; expected once")
        announced.add(index)
        if nbytes != expected[index]:
            raise InvalidArgument(
                f"the stream announces {nbytes} bytes of arena {name};"
                f" expected {expected[index]} on shard {shard}"
            )
    for index in expected:
        if index not in announced:
            raise InvalidArgument(
                f"the stream does not announce arena {plan.arenas[index].name}; expected"
                f" {expected[index]} bytes of it"
            )


class Assembly:
    """The state of one stream: which byte has to come next. Not thread-safe."""

    def __init__(self, plan: Plan, extents: Sequence[Extent], into: Mapping[str, NDArray]) -> None:
        """Args:
        extents: as announced; they have passed :func:`check_extents`.
        into: arena name -> contiguous ``[shard length]`` array that receives the data.
        """
        self._plan = plan
        self._awaited = [extent for extent in extents if extent[1]]
        self._targets = {index: into[plan.arenas[index].name] for index, _ in self._awaited}
        assert all(target.flags.c_contiguous for target in self._targets.values())
        self._at = 0
        self._offset = 0

    def accept(self, piece: Piece) -> None:
        """Copies one chunk to its place.

        Raises:
            InvalidArgument: it is not the next piece of the stream. What was copied before stays
                in the target arrays, which must then not be used.
        """
        if self._at == len(self._awaited):
            raise InvalidArgument(
                f"the stream goes on after its last announced byte: {len(piece.data)} bytes"
                f" of arena {piece.arena} at offset {piece.offset}; expected its end"
            )
        index, nbytes = self._awaited[self._at]
        arena = self._plan.arenas[index]
        if piece.arena != index:
            raise InvalidArgument(
                f"a chunk is of arena {piece.arena}; expected arena {index} ({arena.name})"
                f" from offset {self._offset}"
            )
        if piece.offset != self._offset:
            raise InvalidArgument(
                f"a chunk of arena {arena.name} has offset {piece.offset}; expected {self._offset}"
            )
        length = len(piece.data)
        left = nbytes - self._offset
        if length > left:
            raise InvalidArgument(
                f"a chunk of arena {arena.name} has {length} bytes; expected at most the"
                f" {left} that are left"
            )
        if not 0 < length <= MAX_CHUNK_BYTES or length % arena.itemsize:
            raise InvalidArgument(
                f"a chunk of arena {arena.name} has {length} bytes; expected 1 to"
                f" {MAX_CHUNK_BYTES}, in whole elements of {arena.itemsize}"
            )
        # numpy lets go of the interpreter lock while it copies; a memoryview would not.
        target = self._targets[index].view(np.uint8)
        np.copyto(target[self._offset : self._offset + length], np.frombuffer(piece.data, np.uint8))
        self._offset += length
        if self._offset == nbytes:
            self._at += 1
            self._offset = 0

    def accept_all(self, pieces: Iterable[Piece]) -> None:
        """Takes a whole stream, to its end.

        Raises:
            InvalidArgument: a piece is wrong, or the stream ended too soon.
        """
        for piece in pieces:
            self.accept(piece)
        self.finish()

    def finish(self) -> None:
        """The stream has ended.

        Raises:
            InvalidArgument: something announced did not come.
        """
        if self._at < len(self._awaited):
            index, nbytes = self._awaited[self._at]
            raise InvalidArgument(
                f"the stream ended at byte {self._offset} of arena"
                f" {self._plan.arenas[index].name}; expected {nbytes}"
            )
