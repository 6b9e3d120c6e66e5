"""Assembly: whatever way a stream is cut, it arrives whole or not at all."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pserver.core.assembly import PLAIN, Assembly, Extent, check_extents, shard_extents
from psrpc.core.errors import InvalidArgument
from psrpc.wire.codec import Piece
from tests.pserver.shards import NDArray, counting, plan_of, whole

PLAN = plan_of(size=24)
EXTENTS = shard_extents(PLAN, 0)


def pieces(values: dict[str, NDArray], cuts: set[int]) -> list[Piece]:
    """All arenas end to end, cut at elements ``cuts`` as well as between arenas."""
    found = []
    for index, arena in enumerate(PLAN.arenas):
        data = values[arena.name].tobytes()
        edges = [0, *sorted(c * 4 for c in cuts if 0 < c * 4 < len(data)), len(data)]
        found += [
            Piece(index, start, memoryview(data)[start:stop]) for start, stop in pairwise(edges)
        ]
    return found


@settings(derandomize=True)
@given(st.sets(st.integers(0, 24)))
def test_however_a_stream_is_cut_it_arrives_whole(cuts: set[int]) -> None:
    values = counting(PLAN)
    into = whole(PLAN, -1.0)
    Assembly(PLAN, EXTENTS, into).accept_all(pieces(values, cuts))
    for name, array in values.items():
        np.testing.assert_array_equal(into[name], array)


@settings(derandomize=True)
@given(
    st.sets(st.integers(0, 24)),
    st.integers(0, 1000),
    st.sampled_from(["drop", "repeat", "swap", "shorten", "lengthen", "rename"]),
)
def test_a_stream_that_differs_in_any_piece_is_refused(
    cuts: set[int], where: int, how: str
) -> None:
    stream = pieces(counting(PLAN), cuts)
    at = where % len(stream)
    piece = stream[at]
    match how:
        case "drop":
            del stream[at]
        case "repeat":
            stream.insert(at, piece)
        case "swap":
            other = (at + 1) % len(stream)
            stream[at], stream[other] = stream[other], stream[at]
        case "shorten":
            stream[at] = Piece(piece.arena, piece.offset, piece.data[:-4])
        case "lengthen":
            stream[at] = Piece(
                piece.arena, piece.offset, memoryview(bytes(piece.data) + b"\0\0\0\0")
            )
        case "rename":
            stream[at] = Piece(piece.arena + 1, piece.offset, piece.data)
    with pytest.raises(InvalidArgument):
        Assembly(PLAN, EXTENTS, whole(PLAN)).accept_all(stream)


def test_empty_arenas_need_no_chunk() -> None:
    plan = plan_of(shards=2, size=24)
    extents = shard_extents(plan, 0)
    assert extents[1] == Extent(1, 0, "plain"), "the state lies on the other shard"
    check_extents(plan, 0, extents, PLAIN)
    arrays = {arena.name: np.zeros(arena.shard_length(0), arena.dtype) for arena in plan.arenas}
    data = memoryview(bytes(extents[0].nbytes))
    Assembly(plan, extents, arrays).accept_all([Piece(0, 0, data)])


def test_arenas_come_in_the_order_that_was_announced() -> None:
    stream = pieces(counting(PLAN), set())
    into = whole(PLAN)
    check_extents(PLAN, 0, EXTENTS[::-1], PLAIN)
    Assembly(PLAN, EXTENTS[::-1], into).accept_all(stream[::-1])
    np.testing.assert_array_equal(into["float32.state"], counting(PLAN)["float32.state"])
    with pytest.raises(InvalidArgument, match="expected arena 1"):
        Assembly(PLAN, EXTENTS[::-1], into).accept_all(stream)
