"""Rows of embedding tables over real gRPC, beside it and in shared memory: async shards."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack

import numpy as np
import pytest

from pserver.client import requests as requests_module
from pserver.client.client import ShardClient
from pserver.core.requests import PullRequest
from pserver.core.table_ids import RowsWanted
from pserver.engine.engine import ShardEngine
from pserver.tables.tables import Tables
from psrpc.core.batch import BatchId
from psrpc.core.errors import InvalidArgument, ResourceExhausted
from psrpc.core.plan import Plan
from psrpc.core.policy import Policy
from psrpc.core.tables import MAX_IDS, Rows
from psrpc.v1 import types_pb2 as types
from tests.pserver.rows_cases import (
    ITEM,
    USER,
    Model,
    assert_rows,
    gradients_of,
    ids_of,
    pulled_rows,
    push_of,
    tables_plan,
    wanting,
)
from tests.pserver.shards import (
    INITIAL,
    TRANSPORTS,
    SharingClient,
    Transport,
    counting,
    engine_of,
    fence_of,
    leased,
    served,
    whole,
)

PLAN = tables_plan()
NAME = "float32.trainable"
FIRST, SECOND = BatchId(0, 0, 10), BatchId(0, 10, 10)
ROOM = 1 << 16


@pytest.fixture(params=TRANSPORTS)
def transport(request: pytest.FixtureRequest) -> Transport:
    found: Transport = request.param
    return found


@pytest.fixture
def client(transport: Transport) -> Iterator[ShardClient]:
    with served(engine_of(PLAN), transport=transport, rows_nbytes=ROOM) as client:
        client.initialize(fence_of(client), counting(PLAN), INITIAL)
        yield client


def fence(client: ShardClient) -> types.Fence:
    return fence_of(client)


def all_ids() -> dict[int, np.ndarray]:
    return {table: np.arange(1000) for table in (USER, ITEM)}


def test_rows_never_pushed_have_initial_values(client: ShardClient) -> None:
    ids = {USER: np.array([-(2**63), -1, 0, 2**63 - 1]), ITEM: np.array([0, 999])}
    assert_rows(pulled_rows(client, ids), Model(PLAN), ids)
    assert [t.rows for t in client.get_status().tables] == [0, 0]


def test_pushed_rows_are_what_the_optimizer_makes_of_them(client: ShardClient) -> None:
    model = Model(PLAN)
    for number in range(4):
        rows = gradients_of(number)
        batch = BatchId(0, 10 * number, 10)
        result = client.push(fence(client), push_of(PLAN, batch, rows, base=number))
        assert (result.outcome, result.version) == ("applied", number + 1)
        model.subtract(rows)
    assert_rows(pulled_rows(client, all_ids()), model, all_ids())
    into = whole(PLAN)
    client.pull(fence(client), None, into)
    np.testing.assert_array_equal(into[NAME], counting(PLAN)[NAME] - 4)
    status = client.get_status()
    assert [t.name for t in status.tables] == ["user", "item"]
    assert all(t.rows == t.created > 12 and t.nbytes > 0 for t in status.tables)


def test_one_exchange_pushes_rows_and_brings_others(
    client: ShardClient, transport: Transport
) -> None:
    model = Model(PLAN)
    for number, batch in enumerate((FIRST, SECOND)):
        pushed = gradients_of(number, n=9)
        ids = {USER: ids_of(7, 20), ITEM: ids_of(8, 5)}
        wanted = wanting(client, ids, second=number == 1)
        into = whole(PLAN)
        push = push_of(PLAN, batch, pushed)
        _, info = client.push_pull(fence(client), push, into, wanted)
        model.subtract(pushed)
        assert info.version == number + 1
        assert_rows(wanted.into, model, ids)
        np.testing.assert_array_equal(into[NAME], counting(PLAN)[NAME] - (number + 1))
    assert client.shares_memory == (transport == "shared memory")


def test_a_pull_brings_rows_with_the_arenas(client: ShardClient) -> None:
    ids = {ITEM: ids_of(3)}
    wanted = wanting(client, ids)
    into = whole(PLAN)
    client.pull(fence(client), None, into, None, wanted)
    assert_rows(wanted.into, Model(PLAN), ids)
    np.testing.assert_array_equal(into[NAME], counting(PLAN)[NAME])


def test_a_batch_without_ids_of_a_shard_counts(client: ShardClient) -> None:
    none = np.empty(0, np.int64)
    rows = {USER: Rows(none, np.empty((0, 4), np.float32))}
    wanted = wanting(client, {USER: none})
    result, info = client.push_pull(fence(client), push_of(PLAN, FIRST, rows), whole(PLAN), wanted)
    assert (result.outcome, info.version) == ("applied", 1)
    info = client.pull(fence(client), None, {}, None, RowsWanted({}, {}, True))
    assert info.version == 1


def test_a_repeated_push_changes_nothing(client: ShardClient) -> None:
    model = Model(PLAN)
    rows = gradients_of(1)
    push = push_of(PLAN, FIRST, rows)
    client.push(fence(client), push)
    assert client.push(fence(client), push).outcome == "already_applied"
    assert client.push_pull(fence(client), push, whole(PLAN))[0].outcome == "already_applied"
    model.subtract(rows)
    assert_rows(pulled_rows(client, all_ids()), model, all_ids())


def test_a_skipped_batch_carries_no_rows(client: ShardClient) -> None:
    skipped = leased("worker-1", FIRST, 1, 0, None, gradients_of(1))
    assert client.push(fence(client), skipped).outcome == "skipped"
    assert_rows(pulled_rows(client, all_ids()), Model(PLAN), all_ids())
    assert client.push(fence(client), push_of(PLAN, FIRST, gradients_of(1))).outcome == (
        "already_applied"
    )


def test_a_gradient_that_is_too_stale_changes_no_row(transport: Transport) -> None:
    engine = engine_of(PLAN, policy=Policy(mode="async", max_staleness=0))
    with served(engine, transport=transport, rows_nbytes=ROOM) as client:
        client.initialize(fence(client), counting(PLAN), INITIAL)
        model = Model(PLAN)
        rows = gradients_of(1)
        assert client.push(fence(client), push_of(PLAN, FIRST, rows)).outcome == "applied"
        model.subtract(rows)
        late = push_of(PLAN, SECOND, gradients_of(2))
        assert client.push(fence(client), late).outcome == "too_stale"
        assert_rows(pulled_rows(client, all_ids()), model, all_ids())


def test_the_rate_is_scaled_for_rows_as_for_arenas(transport: Transport) -> None:
    engine = engine_of(PLAN, policy=Policy(mode="async", staleness_lr="inverse"))
    with served(engine, transport=transport, rows_nbytes=ROOM) as client:
        client.initialize(fence(client), counting(PLAN), INITIAL)
        model = Model(PLAN)
        for number in range(3):
            rows = gradients_of(number)
            client.push(fence(client), push_of(PLAN, BatchId(0, 10 * number, 10), rows))
            model.subtract(rows, 1 / (1 + number))
        found = pulled_rows(client, all_ids())
    for table in (USER, ITEM):
        expected = model.read(table, all_ids()[table])
        np.testing.assert_allclose(found[table], expected, rtol=1e-6, atol=1e-6)


def test_a_job_may_have_tables_alone(transport: Transport) -> None:
    plan = tables_plan(arenas=False)
    with served(engine_of(plan), transport=transport, rows_nbytes=ROOM) as client:
        client.initialize(fence(client), {}, INITIAL)
        model = Model(plan)
        for number in range(3):
            rows = gradients_of(number) if number != 1 else {}
            push = leased("worker-1", BatchId(0, number, 1), 1, number, {}, rows)
            ids = {USER: ids_of(number)}
            wanted = wanting(client, ids)
            result, info = client.push_pull(fence(client), push, {}, wanted)
            model.subtract(rows)
            assert (result.outcome, info.version) == ("applied", number + 1)
            assert_rows(wanted.into, model, ids)
        assert_rows(pulled_rows(client, all_ids()), model, all_ids())


def test_two_shards_have_each_their_rows(transport: Transport) -> None:
    plan = tables_plan(2)
    model = Model(plan)
    with ExitStack() as stack:
        engines = [engine_of(plan, shard) for shard in range(2)]
        clients = [
            stack.enter_context(served(engine, transport=transport, rows_nbytes=ROOM))
            for engine in engines
        ]
        for shard, client in enumerate(clients):
            client.initialize(fence(client), counting(plan), INITIAL)
            for number, batch in enumerate((FIRST, SECOND)):
                rows = gradients_of(number, 12, shard, 2)
                client.push(fence(client), push_of(plan, batch, rows, shard=shard))
                model.subtract(rows)
        for shard, client in enumerate(clients):
            ids = {table: ids_of(5, 400, shard, 2) for table in (USER, ITEM)}
            assert_rows(pulled_rows(client, ids), model, ids)
            theirs = {USER: ids_of(5, 3, 1 - shard, 2)}
            with pytest.raises(InvalidArgument, match="'user'"):
                pulled_rows(client, theirs)


# -- what has no room in the segment ---------------------------------------------------------


def test_tensors_without_room_in_the_segment_travel_in_chunks() -> None:
    model = Model(PLAN)
    with served(engine_of(PLAN), transport="shared memory", rows_nbytes=64) as client:
        client.initialize(fence(client), counting(PLAN), INITIAL)
        box = client.workspace.row_outbox[0]  # type: ignore[attr-defined]  # it shares memory
        many = 1 + box.nbytes // 16
        ids = np.arange(many)
        rows = {USER: Rows(ids, np.ones((many, 4), np.float32))}
        wanted = wanting(client, {USER: ids})
        into = whole(PLAN)
        client.push_pull(fence(client), push_of(PLAN, FIRST, rows), into, wanted)
        model.subtract(rows)
        assert_rows(wanted.into, model, {USER: ids})
        np.testing.assert_array_equal(into[NAME], counting(PLAN)[NAME] - 1)
        # The next one fits.
        few = gradients_of(3, 2)
        client.push(fence(client), push_of(PLAN, SECOND, few))
        model.subtract(few)
        assert_rows(pulled_rows(client, {ITEM: ids_of(4)}), model, {ITEM: ids_of(4)})
        assert client.shares_memory


def test_ids_beyond_one_message_take_two_exchanges(
    client: ShardClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(requests_module, "MAX_IDS", 30)
    model = Model(PLAN)
    rows = gradients_of(1)
    ids = {USER: ids_of(1, 20)}
    wanted = wanting(client, ids)
    result, info = client.push_pull(fence(client), push_of(PLAN, FIRST, rows), whole(PLAN), wanted)
    model.subtract(rows)
    assert (result.outcome, info.version) == ("applied", 1)
    assert_rows(wanted.into, model, ids)


def test_too_many_ids_are_refused_before_they_are_sent(client: ShardClient) -> None:
    ids = np.arange(MAX_IDS + 1)
    wanted = RowsWanted({USER: ids}, {USER: np.empty((len(ids), 4), np.float32)}, True)
    with pytest.raises(InvalidArgument, match=f"{MAX_IDS + 1} ids of tables.*smaller batches"):
        client.pull(fence(client), None, {}, None, wanted)


@pytest.mark.parametrize(
    ("ids", "values", "words"),
    [
        (np.arange(3), np.zeros((3, 5), np.float32), r"'user' is float32\[3, 5\]; expected.*3, 4"),
        (np.arange(3), np.zeros((2, 4), np.float32), r"'user' is float32\[2, 4\]"),
        (np.arange(3), np.zeros((3, 4)), r"'user' is float64\[3, 4\]"),
        (np.arange(3, dtype=np.int32), np.zeros((3, 4), np.float32), r"are int32\[3\]"),
    ],
)
def test_the_client_knows_what_a_row_is(
    client: ShardClient, ids: np.ndarray, values: np.ndarray, words: str
) -> None:
    with pytest.raises(InvalidArgument, match=words):
        client.push(fence(client), push_of(PLAN, FIRST, {USER: Rows(ids, values)}))
    with pytest.raises(InvalidArgument, match=words):
        client.pull(
            fence(client),
            None,
            whole(PLAN),
            None,
            RowsWanted({USER: ids}, {USER: values}),
        )


# -- refused whole ---------------------------------------------------------------------------


def unchanged(client: ShardClient, plan: Plan = PLAN) -> bool:
    into = whole(plan)
    info = client.pull(fence(client), None, into)
    assert_rows(pulled_rows(client, all_ids()), Model(plan), all_ids())
    status = client.get_status()
    rows = [t.rows for t in status.tables]
    return (info.version, rows) == (0, [0, 0]) and np.array_equal(into[NAME], counting(plan)[NAME])


@pytest.mark.parametrize("place", [(0, 0), (4, 1), (11, 2)])
def test_a_gradient_with_a_nan_names_table_and_id(
    client: ShardClient, place: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    # So that the part with it has others before and after it.
    monkeypatch.setattr("pserver.core.assembly.PIECE_BYTES", 4 * 5)
    rows = gradients_of(1)
    rows[ITEM].values[place] = np.nan
    words = rf"'item'.*{rows[ITEM].ids[place[0]]}"
    with pytest.raises(InvalidArgument, match=words):
        client.push(fence(client), push_of(PLAN, FIRST, rows))
    assert unchanged(client)
    # The batch is as if it had never been pushed.
    assert client.push(fence(client), push_of(PLAN, FIRST, gradients_of(1))).outcome == "applied"


def test_a_gradient_in_pieces_is_checked_once(
    client: ShardClient, transport: Transport, monkeypatch: pytest.MonkeyPatch
) -> None:
    finite: list[bool] = []
    check = Tables.check

    def checked(self: Tables, rows: Mapping[int, Rows]) -> None:
        finite.extend(of_table.finite for of_table in rows.values())
        check(self, rows)

    monkeypatch.setattr(Tables, "check", checked)
    client.push(fence(client), push_of(PLAN, FIRST, gradients_of(1)))
    assert finite == [transport != "shared memory"] * 2


def test_a_full_table_refuses_the_push_whole(transport: Transport) -> None:
    plan = tables_plan(max_rows=8)
    with served(engine_of(plan), transport=transport, rows_nbytes=ROOM) as client:
        client.initialize(fence(client), counting(plan), INITIAL)
        with pytest.raises(ResourceExhausted, match="table 'user' is full"):
            client.push(fence(client), push_of(plan, FIRST, gradients_of(1, 9)))
        assert unchanged(client, plan)
        ok = client.push(fence(client), push_of(plan, FIRST, gradients_of(1, 8)))
        assert ok.outcome == "applied"


def test_a_push_without_memory_for_its_rows_changes_nothing(
    transport: Transport, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(nbytes: int) -> None:
        raise OSError(12, "Cannot allocate memory")

    engine = engine_of(PLAN)
    with served(engine, transport=transport, rows_nbytes=ROOM) as client:
        client.initialize(fence(client), counting(PLAN), INITIAL)
        push = push_of(PLAN, FIRST, gradients_of(1, 400))
        monkeypatch.setattr(engine._held.tables[ITEM]._store.values, "_resize", refuse)
        with pytest.raises(ResourceExhausted, match="table 'item': no memory for 400 rows"):
            client.push(fence(client), push)
        assert unchanged(client)
        assert not engine.failure
        monkeypatch.undo()
        assert client.push(fence(client), push).outcome == "applied"


def test_values_may_change_while_they_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker's program may write to the segment at any time: what it gets is its own doing,
    but the shard goes on."""
    engine = engine_of(PLAN)
    with served(engine, transport="shared memory", rows_nbytes=ROOM) as client:
        assert isinstance(client, SharingClient)
        client.initialize(fence(client), counting(PLAN), INITIAL)
        box = client.workspace.row_outbox[0].view(np.float32)
        check = engine._held.tables.check

        def check_and_change(rows: dict[int, Rows]) -> None:
            check(rows)
            box.fill(np.nan)

        monkeypatch.setattr(engine._held.tables, "check", check_and_change)
        assert client.push(fence(client), push_of(PLAN, FIRST, gradients_of(1))).version == 1
        assert np.isnan(pulled_rows(client, {USER: ids_of(1)})[USER]).all()
        assert not engine.failure


def test_a_pull_of_rows_from_the_engine_needs_no_places() -> None:
    engine: ShardEngine = engine_of(PLAN)
    with served(engine) as client:
        client.initialize(fence(client), counting(PLAN), INITIAL)
        from pserver.wire.messages import _from_fence

        request = PullRequest(_from_fence(fence(client)), "w", None, rows=((ITEM, ids_of(1)),))
        values = engine.pull(request, 0)
    np.testing.assert_array_equal(values.rows[0], Model(PLAN).read(ITEM, ids_of(1)))
    assert set(values.arrays) == {NAME}
