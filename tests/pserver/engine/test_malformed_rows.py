"""Rows that no client of ours would send: refused, and the shard stays as it was."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import pytest

from pserver.client.client import ShardClient
from psrpc.core.errors import InvalidArgument
from psrpc.core.tables import MAX_IDS, shard_of
from psrpc.v1 import parameter_server_pb2 as pb
from psrpc.v1 import types_pb2 as types
from tests.pserver.malformed import BareShard, bare_shard, extent
from tests.pserver.rows_cases import ITEM, USER, Model, assert_rows, pulled_rows, tables_plan
from tests.pserver.shards import NDArray, attaching, fence_of, whole

PLAN = tables_plan(2)
ARENA = PLAN.arenas[0].shard_length(0) * 4
USERS, ITEMS = 1, 2
"""The numbers of their extents: the plan has one arena."""

HERE = np.arange(1000)[shard_of(np.arange(1000), 2) == 0]
ELSEWHERE = np.arange(1000)[shard_of(np.arange(1000), 2) == 1]
THREE = HERE[:3]
HUGE = int(np.int64(1 << 40)) + np.arange(64)
OUTSIDE = int(HUGE[shard_of(HUGE, 2) == 0][0])


def named(table: int, ids: Sequence[int] | NDArray = THREE) -> types.TableIds:
    return types.TableIds(table=table, ids=np.asarray(ids, "<i8").tobytes())


DENSE = extent(0, ARENA)


def chunk(arena: int, data: bytes, offset: int = 0) -> types.Chunk:
    return types.Chunk(arena=arena, offset=offset, data=data)


ONES = np.ones(12, "<f4").tobytes()
DENSE_CHUNK = chunk(0, b"\1" * ARENA)


ANNOUNCED = {"extents": [DENSE, extent(USERS, 48)], "rows": [named(USER)]}


@pytest.fixture
def shard() -> Iterator[BareShard]:
    with bare_shard(PLAN, ANNOUNCED, transport="shared memory", rows_nbytes=1 << 16) as shard:
        yield shard


def unchanged(shard: BareShard) -> bool:
    """Rows too."""
    ids: Mapping[int, NDArray] = {USER: HERE, ITEM: HERE}
    assert_rows(pulled_rows(shard.client, ids), Model(PLAN), ids)
    return shard.unchanged() and not any(t.rows for t in shard.engine.table_figures())


@pytest.mark.parametrize(
    ("chunks", "words"),
    [
        ([DENSE_CHUNK], "ended at byte 0 of arena 1, rows of table 'user'; expected 48"),
        ([DENSE_CHUNK, chunk(USERS, ONES[:16])], "ended at byte 16 of arena 1, rows of table"),
        ([DENSE_CHUNK, chunk(USERS, ONES + ONES[:4])], "has 52 bytes; expected at most the 48"),
        (
            [DENSE_CHUNK, chunk(USERS, ONES), chunk(USERS, ONES[:4], 48)],
            "goes on after its last announced byte: 4 bytes of arena 1",
        ),
        ([DENSE_CHUNK, chunk(ITEMS, ONES)], r"of arena 2; expected arena 1 \(1, rows of table"),
        ([chunk(USERS, ONES), DENSE_CHUNK], "of arena 1; expected arena 0"),
        ([DENSE_CHUNK, chunk(USERS, ONES[:6])], "6 bytes; expected 1 to .* whole elements of 4"),
    ],
)
def test_chunks_of_rows_that_do_not_fit(
    shard: BareShard, chunks: Sequence[types.Chunk], words: str
) -> None:
    assert re.search(words, shard.push(shard.header(), *chunks))
    assert unchanged(shard)


@pytest.mark.parametrize(
    ("rows", "extents", "words"),
    [
        ([named(2)], [DENSE, extent(3, 48)], "table 2 are named; the plan has 2 tables"),
        ([named(1 << 31)], [DENSE, extent(3, 48)], "the plan has 2 tables"),
        (
            [named(USER), named(USER)],
            [DENSE, extent(USERS, 48), extent(USERS, 48)],
            "ids of table 0 come after those of table 0",
        ),
        (
            [named(ITEM), named(USER)],
            [DENSE, extent(ITEMS, 36), extent(USERS, 48)],
            "ids of table 0 come after those of table 1",
        ),
        ([types.TableIds(table=0)], [DENSE, extent(USERS, 0)], "have 0 bytes"),
        ([types.TableIds(table=0, ids=b"1234567")], [DENSE, extent(USERS, 16)], "have 7 bytes"),
        ([named(USER, [4, 4])], [DENSE, extent(USERS, 32)], "'user'.*4"),
        ([named(USER, THREE[::-1])], [DENSE, extent(USERS, 48)], "'user'.*ascend"),
        ([named(USER, ELSEWHERE[:1])], [DENSE, extent(USERS, 16)], f"'user'.*{ELSEWHERE[0]}"),
        ([named(ITEM, [OUTSIDE])], [DENSE, extent(ITEMS, 12)], f"'item'.*{OUTSIDE}"),
        ([named(USER)], [DENSE], "names ids of 1 tables|expected 1, the rows of table 'user'"),
        ([named(USER)], [extent(USERS, 48)], "does not announce arena float32.trainable"),
        ([], [DENSE, extent(USERS, 48)], "announces arena 1; the plan has 1"),
        ([named(USER)], [DENSE, extent(ITEMS, 48)], "extent 2; expected 1, the rows of table"),
        ([named(USER)], [DENSE, extent(USERS, 44)], "44 bytes .* expected 48 as plain, 3 rows"),
        ([named(USER)], [DENSE, extent(USERS, 1 << 60)], f"announces {1 << 60} bytes"),
        (
            [named(USER)],
            [DENSE, extent(USERS, 48, types.ENCODING_BFLOAT16)],
            "as bfloat16; expected 48 as plain",
        ),
        (
            [named(USER), named(ITEM)],
            [DENSE, extent(ITEMS, 36), extent(USERS, 48)],
            "extent 2; expected 1",
        ),
        (
            [named(USER, np.arange(MAX_IDS)), named(ITEM)],
            [DENSE, extent(USERS, MAX_IDS * 16), extent(ITEMS, 36)],
            f"names {MAX_IDS + 3} ids; expected at most {MAX_IDS}",
        ),
    ],
)
def test_headers_of_rows_that_do_not_fit(
    shard: BareShard, rows: Sequence[types.TableIds], extents: Sequence[types.Extent], words: str
) -> None:
    found = shard.push(shard.header(rows=rows, extents=extents), DENSE_CHUNK, chunk(USERS, ONES))
    assert re.search(words, found), found
    assert unchanged(shard)


def test_a_skipped_push_names_no_rows(shard: BareShard) -> None:
    header = shard.header(skipped=True, extents=[])
    assert "announces 0 arenas and rows of 1 table; expected neither" in shard.push(header)
    assert unchanged(shard)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_rows_that_are_not_finite(shard: BareShard, value: float) -> None:
    bad = np.ones((3, 4), "<f4")
    bad[1, 2] = value
    found = shard.push(shard.header(), DENSE_CHUNK, chunk(USERS, bad.tobytes()))
    assert re.search(rf"'user'.*{THREE[1]}", found), found
    assert unchanged(shard)


def exchange(header: pb.ExchangeHeader) -> bytes:
    return pb.ExchangeRequest(header=header).SerializeToString()


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([named(2)], "the plan has 2 tables"),
        ([named(USER, ELSEWHERE[:1])], f"'user'.*{ELSEWHERE[0]}"),
        ([named(USER, [5, 3])], "'user'"),
        ([named(ITEM), named(USER)], "ids of table 0 come after"),
    ],
)
@pytest.mark.parametrize("with_push", [False, True])
@pytest.mark.parametrize("rows_only", [False, True])
def test_rows_to_pull_that_cannot_be(
    shard: BareShard, rows: Sequence[types.TableIds], words: str, with_push: bool, rows_only: bool
) -> None:
    """Before the push that comes with them is applied."""
    pull = pb.PullRequest(
        newest=True, encoding=types.ENCODING_PLAIN, rows=rows, rows_only=rows_only
    )
    header = pb.ExchangeHeader(pull=pull)
    if with_push:
        header.push.CopyFrom(shard.header(extents=[DENSE], rows=[]))
    else:
        header.pull.fence.CopyFrom(fence_of(shard.client))
    found = shard.refused(
        "Exchange",
        exchange(header),
        pb.ExchangeRequest(chunk=DENSE_CHUNK).SerializeToString(),
    )
    assert re.search(words, found), found
    assert unchanged(shard)


@pytest.mark.parametrize(
    ("push_at", "pull_at", "words"),
    [
        ([4096], [], "the push names 1 places in the segment; expected 2"),
        ([4096, 4096 + 4], [], r"offset 4100 of the shared segment; expected a multiple of 64"),
        ([4096, 0], [], r"48 bytes at offset 0 of the shared segment"),
        ([4096, 1 << 60], [], "48 bytes at offset"),
        ([4096, 8192], [4096], "the pull names 1 places in the segment; expected 2"),
        ([4096, 8192], [4096, 4098], "offset 4098 of the shared segment; expected a multiple of 4"),
        ([4096, 8192], [4096, 1 << 60], "36 bytes at offset"),
    ],
)
def test_places_of_rows_that_are_not_in_the_segment(
    shard: BareShard, push_at: list[int], pull_at: list[int], words: str
) -> None:
    workspace = shard.client.workspace  # type: ignore[attr-defined]  # it shares memory
    header = pb.ExchangeHeader(push=shard.header(), push_at=push_at, pull_at=pull_at)
    if pull_at:
        header.pull.CopyFrom(
            pb.PullRequest(newest=True, encoding=types.ENCODING_PLAIN, rows=[named(ITEM)])
        )
    found = shard.refused("Exchange", exchange(attaching(workspace)), exchange(header))
    assert words in found
    assert unchanged(shard)


def test_rows_that_a_worker_leaves_in_shared_memory_are_checked_there(shard: BareShard) -> None:
    workspace = shard.client.workspace  # type: ignore[attr-defined]  # it shares memory
    places = []
    for array, fill in (
        (workspace.outbox[0]["float32.trainable"], 1),
        (workspace.row_outbox[0], 0),
    ):
        array[:] = fill
        places.append(workspace.segment.offset_of(array))
    workspace.row_outbox[0][16:48].view(np.float32)[0] = np.nan
    header = pb.ExchangeHeader(push=shard.header(), push_at=places)
    found = shard.refused("Exchange", exchange(attaching(workspace)), exchange(header))
    assert re.search(rf"'user'.*{THREE[1]}", found), found
    assert unchanged(shard)


def test_an_answer_with_other_rows_is_refused_by_the_client(shard: BareShard) -> None:
    other = tables_plan(2, width=5)
    address = shard.client.peer.rpartition(" ")[2]
    from pserver.core.table_ids import RowsWanted

    with ShardClient(address, 77, other, 0) as client:
        fence = fence_of(shard.client)
        wanted = RowsWanted({USER: THREE}, {USER: np.empty((3, 5), np.float32)})
        with pytest.raises(InvalidArgument, match=r"cannot be used.*48 bytes .*expected 60"):
            client.pull(fence, None, whole(PLAN), None, wanted)
