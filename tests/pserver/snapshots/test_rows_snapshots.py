"""Snapshots of rows: kept ones are read, the others are held for their writer."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import nullcontext

import numpy as np
import pytest

from pserver.client.client import ShardClient
from pserver.core.requests import RestoredState, Snapshot
from pserver.engine.engine import ShardEngine
from pserver.engine.held_snapshots import Freeze
from pserver.engine.parameters import Parameters
from pserver.tables.tables import FrozenTables, Tables
from pserver.updates.engine import Slots
from pserver.updates.numpy_engine import NumpyEngine
from psrpc.core.batch import BatchId
from psrpc.core.commands import Begin, SnapshotOrder
from psrpc.core.errors import NotReady
from tests.pserver.rows_cases import (
    ITEM,
    USER,
    Model,
    assert_rows,
    gradients_of,
    pulled_rows,
    push_of,
    tables_plan,
    wanting,
)
from tests.pserver.shards import (
    AUTHORITY,
    INITIAL,
    SGD,
    TRANSPORTS,
    Sink,
    counting,
    engine_of,
    fence_of,
    served,
    whole,
)

PLAN = tables_plan()
NAME = "float32.trainable"
ALL = {USER: np.arange(1000), ITEM: np.arange(1000)}


@pytest.fixture
def sink() -> Sink:
    return Sink()


@pytest.fixture
def engine(sink: Sink) -> ShardEngine:
    return engine_of(PLAN, sink=sink)


@pytest.fixture(params=TRANSPORTS)
def client(request: pytest.FixtureRequest, engine: ShardEngine) -> Iterator[ShardClient]:
    with served(engine, transport=request.param, rows_nbytes=1 << 16) as client:
        client.initialize(fence_of(client), counting(PLAN), INITIAL)
        yield client


@pytest.fixture
def closed(monkeypatch: pytest.MonkeyPatch) -> list[FrozenTables]:
    """Snapshots that were closed, in order."""
    found: list[FrozenTables] = []
    close = FrozenTables.close

    def noted(frozen: FrozenTables) -> None:
        found.append(frozen)
        close(frozen)

    monkeypatch.setattr(FrozenTables, "close", noted)
    return found


def order(name: str = "step-1", *, write: bool = False, keep: bool = False) -> SnapshotOrder:
    return SnapshotOrder(name, 1, write, keep)


def push(client: ShardClient, number: int, model: Model) -> None:
    rows = gradients_of(number)
    client.push(fence_of(client), push_of(PLAN, BatchId(0, number, 1), rows, base=number))
    model.subtract(rows)


def test_a_kept_snapshot_reads_old_rows_after_later_pushes(
    client: ShardClient, engine: ShardEngine
) -> None:
    then, now = Model(PLAN), Model(PLAN)
    for number in range(2):
        push(client, number, then)
        now.subtract(gradients_of(number))
    engine.commands.take_snapshot(order(keep=True))
    for number in range(2, 5):
        push(client, number, now)
    assert_rows(pulled_rows(client, ALL, "step-1"), then, ALL)
    assert_rows(pulled_rows(client, ALL), now, ALL)
    wanted, into = wanting(client, ALL), whole(PLAN)
    info = client.pull(fence_of(client), "step-1", into, None, wanted)
    assert info.version == 2
    assert_rows(wanted.into, then, ALL)
    np.testing.assert_array_equal(into[NAME], counting(PLAN)[NAME] - 2)


def test_a_snapshot_ends_with_its_last_reader(
    engine: ShardEngine, sink: Sink, closed: list[FrozenTables]
) -> None:
    with served(engine) as client:
        client.initialize(fence_of(client), counting(PLAN), INITIAL)
        engine.commands.take_snapshot(order("neither"))
        assert len(closed) == 1
        engine.commands.take_snapshot(order("both", write=True, keep=True))
        written = sink.snapshots["both"]
        assert written.tables is not None
        assert written.tables not in closed
        engine.commands.release_snapshot("both")
        assert written.tables not in closed
        written.close()
        written.close()
        assert closed[1:] == [written.tables]
        engine.commands.take_snapshot(order("kept", keep=True))
        assert sink.snapshots["kept"].tables is None, "there is nothing to write"
        sink.snapshots["kept"].close()
        assert len(closed) == 2
        engine.commands.release_snapshot("kept")
        engine.commands.release_snapshot("kept")
        assert len(closed) == 3


def test_another_generation_lets_go_of_kept_snapshots(
    engine: ShardEngine, sink: Sink, closed: list[FrozenTables]
) -> None:
    with served(engine) as client:
        client.initialize(fence_of(client), counting(PLAN), INITIAL)
        engine.commands.take_snapshot(order("kept", keep=True))
        engine.commands.take_snapshot(order("written", write=True))
        assert not closed
        engine.commands.begin(Begin(2, 1, keys=AUTHORITY.keys))
        assert len(closed) == 1
        # What is being written is still what it was.
        written = sink.snapshots["written"]
        assert written.tables is not None
        with written.lock:
            into = [np.empty((3, 4), np.float32)]
            written.tables.read([(USER, np.arange(3))], into)
        np.testing.assert_array_equal(into[0], Model(PLAN).read(USER, np.arange(3)))
        written.close()
        assert len(closed) == 2


def test_the_last_claim_closes() -> None:
    closed = []

    class Closing(FrozenTables):
        def close(self) -> None:
            closed.append(1)

    freeze = Freeze(Closing(()), nullcontext())
    first, second = freeze.hold(), freeze.hold()
    first()
    first()
    assert not closed
    second()
    assert closed == [1]


def restored(snapshot: Snapshot, **change: object) -> RestoredState:
    fields: dict[str, object] = {
        "values": {name: array.copy() for name, array in snapshot.values.arrays.items()},
        "slots": snapshot.slots,
        "applied": engine_of(PLAN).applied(),
        "version": snapshot.values.version,
    }
    return RestoredState(**(fields | change))  # type: ignore[arg-type]


def test_rows_go_into_empty_tables_when_a_checkpoint_is_restored(
    client: ShardClient, engine: ShardEngine, sink: Sink
) -> None:
    then, now = Model(PLAN), Model(PLAN)
    for number in range(3):
        push(client, number, then)
        now.subtract(gradients_of(number))
    engine.commands.take_snapshot(order(write=True))
    snapshot = sink.snapshots["step-1"]
    assert snapshot.tables is not None
    parts = [table.block(table.since(-1)) for table in snapshot.tables.tables]
    push(client, 3, now)

    def load(tables: Tables) -> None:
        assert not any(figures.rows for figures in tables.figures())
        for table, part in zip(tables.tables, parts, strict=True):
            table.insert(part)

    engine.commands.begin(
        Begin(2, 1, keys=AUTHORITY.keys, restore="c"), restored(snapshot, load_rows=load)
    )
    wanted = wanting(client, ALL, rows_only=True)
    info = client.pull(fence_of(client, 2), None, {}, None, wanted)
    assert info.version == 3
    assert_rows(wanted.into, then, ALL)
    engine.commands.begin(Begin(3, 1, keys=AUTHORITY.keys))
    client.initialize(
        fence_of(client, 3), counting(PLAN), AUTHORITY.grant_initialize("worker-1", 3)
    )
    wanted = wanting(client, ALL, rows_only=True)
    client.pull(fence_of(client, 3), None, {}, None, wanted)
    assert_rows(wanted.into, Model(PLAN), ALL)


def test_calls_do_not_wait_for_a_checkpoint_that_is_being_restored(
    client: ShardClient, engine: ShardEngine, sink: Sink
) -> None:
    push(client, 0, Model(PLAN))
    engine.commands.take_snapshot(order())
    reading, read = threading.Event(), threading.Event()

    def load_rows(tables: Tables) -> None:
        tables.apply(gradients_of(1), 1.0, 0, 1)
        reading.set()
        assert read.wait(30)

    taken = restored(sink.snapshots["step-1"], load_rows=load_rows)
    again = Begin(2, 1, keys=AUTHORITY.keys, restore="checkpoints/step-1")
    following = threading.Thread(target=lambda: engine.commands.begin(again, taken))
    following.start()
    try:
        assert reading.wait(30)
        status = client.get_status()
        assert (status.generation, status.initialized) == (2, False)
        assert status.waiting_for == "its checkpoint to be restored"
        assert [table.rows for table in status.tables] == [12, 12]
        fence = fence_of(client, 2)
        with pytest.raises(NotReady, match="waits for its checkpoint to be restored"):
            client.pull(fence, None, {}, None, wanting(client, ALL, rows_only=True))
        with pytest.raises(NotReady, match="waits for its checkpoint to be restored"):
            client.initialize(fence, counting(PLAN), INITIAL)
        with pytest.raises(NotReady, match="waits for its checkpoint to be restored"):
            client.push(fence, push_of(PLAN, BatchId(0, 10, 10), gradients_of(2), generation=2))
    finally:
        read.set()
        following.join(30)
    assert (engine.report().initialized, engine.report().version) == (True, 1)
    client.pull(fence, None, {}, None, wanting(client, ALL, rows_only=True))


def test_tables_alone_count_updates_as_others_do() -> None:
    """Schedules, Adam and warm-up follow the count, also after a restart."""
    plan = tables_plan(arenas=False)
    held = Parameters(NumpyEngine(SGD, plan, 0), 1, Tables(plan, 0))
    held.initialize({})
    for number in range(3):
        held.update({}, 0, gradients_of(number))
    held.update(None)
    snapshot = held.snapshot()
    assert (snapshot.slots.iterations, snapshot.values.version) == (3, 4)
    scalars = {"iterations": np.array(3)}
    held.forget(2)
    held.restore(restored(snapshot, slots=Slots(scalars=scalars)))
    assert held.snapshot().slots.iterations == 3


def test_rows_are_newer_than_a_checkpoint_of_before_the_version_fell() -> None:
    """A generation under another policy may go on with a smaller version."""
    held = Parameters(NumpyEngine(SGD, PLAN, 0), 1, Tables(PLAN, 0))
    held.initialize(counting(PLAN))
    for number in range(5):
        held.update(whole(PLAN), 0, gradients_of(number))
    held.keep(2, 2)
    held.update(whole(PLAN), 0, gradients_of(7))
    frozen = held.tables.freeze().tables[USER]
    assert held.version == 3
    newer = frozen.block(frozen.since(5)).ids
    assert set(newer.tolist()) == set(gradients_of(7)[USER].ids.tolist())


def test_rows_are_newer_than_restored_ones_of_higher_versions() -> None:
    """As after such a generation, or where other shards of the checkpoint have come further."""
    held = Parameters(NumpyEngine(SGD, PLAN, 0), 1, Tables(PLAN, 0))
    held.initialize(counting(PLAN))
    for number in range(5):
        held.update(whole(PLAN), 0, gradients_of(number))
    held.keep(2, 2)
    snapshot = held.snapshot()
    assert snapshot.tables is not None
    frozen = snapshot.tables.tables[USER]
    rows = frozen.block(frozen.since(-1))
    held.forget(3)
    held.restore(restored(snapshot, load_rows=lambda tables: tables[USER].insert(rows)))
    held.update(whole(PLAN), 0, gradients_of(7))
    assert held.version == 3
    frozen = held.tables.freeze().tables[USER]
    newest = frozen.block(frozen.since(int(rows.touched.max()))).ids
    assert set(newest.tolist()) == set(gradients_of(7)[USER].ids.tolist())
