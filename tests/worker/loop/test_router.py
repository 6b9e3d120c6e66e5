from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import ExitStack, closing
from typing import Any

import numpy as np
import pytest

from pserver.client.client import RetryPolicy, ShardClient
from pserver.engine.engine import ShardEngine
from pserver.server.own_process import OwnProcess
from pserver.server.server import ShardServer
from pserver.transport.workspace import Workspace
from psrpc.core.batch import BatchId
from psrpc.core.encoding import Gradient
from psrpc.core.errors import NotReady, RoundPassed, ShardUnreachable, StaleGeneration
from psrpc.core.placement import make_plan
from psrpc.core.plan import Plan, VariableSpec, aligned_empty
from psrpc.core.tables import TableSpec
from psrpc.v1 import types_pb2
from tests.pserver.shards import INITIAL, part, signed
from tests.worker.shards import Shards, pushes, serve_shards, standing_alone
from worker.data.source import Array
from worker.embedding.row_sets import ReceivedRows
from worker.embedding.rows import RowsNeeded
from worker.loop.router import KINDS, Router
from worker.loop.session import WorkerSession
from worker.protocol.done import Stopped


def make_cut_plan(shards: int) -> Plan:
    """Two arenas, cut within variables."""
    return make_plan(
        [
            VariableSpec("a", (7, 11), "float32", "trainable"),
            VariableSpec("b", (100,), "float32", "trainable"),
            VariableSpec("moving", (40,), "float32", "state"),
        ],
        shards,
        "cut",
    )


def arrays(plan: Plan, start: float) -> dict[str, Array]:
    made = {}
    for arena in plan.arenas:
        array = aligned_empty(arena.length, arena.dtype)
        array[:] = np.arange(start, start + arena.length)
        made[arena.name] = array
    return made


def parts(plan: Plan, values: dict[str, Array]) -> list[Gradient]:
    return [part(plan, values, shard) for shard in range(plan.shards)]


def hosting(served: Shards, *own: int) -> Callable[..., ShardClient]:
    """Connects a worker that hosts the shards ``own`` itself."""

    def connect(
        address: str, incarnation: int, plan: Plan, shard: int, **options: Any
    ) -> ShardClient:
        local = OwnProcess(served.engines[shard], f"shard {shard}", "", lambda: False)
        options["local"] = local if shard in own else None
        return ShardClient(address, incarnation, plan, shard, **options)

    return connect


@pytest.mark.parametrize(("shards", "own"), [(1, ()), (3, ()), (1, (0,)), (3, (1,)), (3, (1, 2))])
def test_parameters_go_out_and_come_back_whole(shards: int, own: tuple[int, ...]) -> None:
    plan = make_cut_plan(shards)
    with (
        serve_shards(plan) as served,
        standing_alone() as standing,
        Router(served.cluster, plan, standing, connect=hosting(served, *own)) as router,
    ):
        values, updates, into = arrays(plan, 1), arrays(plan, 5), arrays(plan, 0)
        router.initialize(values, INITIAL)
        router.pull(None, into)
        for name, value in values.items():
            np.testing.assert_array_equal(into[name], value)

        pushed = router.push_pull(pushes(router, BatchId(0, 0, 10), 1, parts(plan, updates)), into)

        assert [result.outcome for result in pushed] == ["applied"] * shards
        assert router.versions == (1,) * shards
        trainable, state = "float32.trainable", "float32.state"
        np.testing.assert_array_equal(into[trainable], values[trainable] - 0.5 * updates[trainable])
        np.testing.assert_array_equal(into[state], values[state] + updates[state])


def test_the_calling_thread_takes_a_slice_of_its_own() -> None:
    plan = make_cut_plan(3)
    with (
        serve_shards(plan) as served,
        standing_alone() as standing,
        Router(served.cluster, plan, standing, connect=hosting(served, 1, 2)) as router,
    ):
        found = router._calls.call(lambda shard: (shard, threading.get_ident()))
    assert [shard for shard, _ in found] == [0, 1, 2]
    assert [shard for shard, thread in found if thread == threading.get_ident()] == [1]


@pytest.mark.parametrize("way", KINDS)
def test_a_callback_says_when_all_requests_have_gone(
    monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    plan = make_cut_plan(3)
    told: list[bool] = []
    gone = threading.Event()
    pull = ShardEngine.pull

    def waiting(now: bool) -> None:
        told.append(now)
        if now:
            gone.set()

    def answered(engine: ShardEngine, *request: Any) -> Any:
        # No shard answers before.
        assert gone.wait(10)
        return pull(engine, *request)

    with (
        serve_shards(plan, data_port=0 if way == "data connection" else None) as served,
        standing_alone() as standing,
        closing(Workspace(plan, shared=way == "shared memory")) as workspace,
        Router(
            *(served.cluster, plan, standing, workspace, waiting),
            hosting(served, *(range(3) if way == "own process" else ())),
        ) as router,
    ):
        router.initialize(arrays(plan, 1), INITIAL)
        monkeypatch.setattr(ShardEngine, "pull", answered)
        for _ in range(2):
            told.clear()
            gone.clear()
            router.pull(None, workspace.sets[0])
            assert told == [True, False]
        told_of = [(each.shard, each.kind) for each in standing.transports()]
        assert told_of == [(shard, KINDS[way]) for shard in range(3)]
    assert standing.transports() == []


def test_a_request_that_is_repeated_has_gone_once(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = make_cut_plan(2)
    begun: set[int] = set()
    told: list[tuple[bool, int]] = []
    tries: list[ShardEngine] = []
    again = threading.Event()
    ask, pull = ShardClient.pull, ShardEngine.pull

    def late(client: ShardClient, *request: Any, **options: Any) -> Any:
        shard = client._shard
        if shard:
            assert again.wait(10)
        begun.add(shard)
        return ask(client, *request, **options)

    def refuses_once(engine: ShardEngine, *request: Any) -> Any:
        if engine.identity.shard == 0 and not again.is_set():
            tries.append(engine)
            if len(tries) == 2:
                again.set()
            raise NotReady("a moment")
        return pull(engine, *request)

    with (
        serve_shards(plan) as served,
        standing_alone() as standing,
        Router(
            served.cluster, plan, standing, waiting=lambda now: told.append((now, len(begun)))
        ) as router,
    ):
        router.initialize(arrays(plan, 1), INITIAL)
        told.clear()
        monkeypatch.setattr(ShardClient, "pull", late)
        monkeypatch.setattr(ShardEngine, "pull", refuses_once)
        router.pull(None, arrays(plan, 0))
    assert told == [(True, 2), (False, 2)]


def test_rows_by_themselves_are_fetched_in_silence() -> None:
    """A gradient may be computed meanwhile."""
    plan = make_cut_plan(2)
    told: list[bool] = []
    with (
        serve_shards(plan) as served,
        standing_alone() as standing,
        Router(served.cluster, plan, standing, waiting=told.append) as router,
    ):
        router.initialize(arrays(plan, 1), INITIAL)
        told.clear()
        router.pull(None, None, rows=ReceivedRows(RowsNeeded((), ()), ()))
    assert told == []


def test_rows_alone_are_pulled_from_the_shards_that_have_some(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    dense = [VariableSpec("w", (16,), "float32", "trainable")]
    zero = {"class_name": "constant", "config": {"value": 0.5}}
    sgd = {"class_name": "SGD", "config": {"learning_rate": 0.5}}
    plan = make_plan(dense, 3, "cut", [TableSpec("t", 2, None, zero, sgd)], 2)
    asked: list[int] = []
    pull = ShardEngine.pull

    def noted(engine: ShardEngine, *request: Any) -> Any:
        asked.append(engine.identity.shard)
        return pull(engine, *request)

    monkeypatch.setattr(ShardEngine, "pull", noted)
    with (
        serve_shards(plan) as served,
        standing_alone() as standing,
        Router(served.cluster, plan, standing, connect=hosting(served, 1)) as router,
    ):
        router.initialize(arrays(plan, 1), INITIAL)
        needed = RowsNeeded((np.arange(3),), ((0, 3),)).with_slices(plan.slices)
        rows = ReceivedRows(needed, (np.empty((3, 2), np.float32),))
        router.pull(None, None, rows=rows)
        assert (asked, rows.versions) == ([0], (0, 0, 0))
        assert (rows.values[0] == 0.5).all()
        into = arrays(plan, 0)
        router.pull(None, into, rows=rows)
        assert sorted(asked) == [0, 0, 1, 2]
        np.testing.assert_array_equal(into["float32.trainable"], np.arange(1, 17))


def test_the_same_batch_counts_once_and_a_skipped_one_changes_nothing() -> None:
    plan = make_cut_plan(2)
    with (
        serve_shards(plan) as served,
        standing_alone() as standing,
        Router(served.cluster, plan, standing) as router,
    ):
        into, again = arrays(plan, 0), arrays(plan, 0)
        router.initialize(arrays(plan, 1), INITIAL)
        router.push_pull(pushes(router, BatchId(0, 0, 10), 1, parts(plan, arrays(plan, 5))), into)
        repeated = router.push_pull(
            pushes(router, BatchId(0, 0, 10), 2, parts(plan, arrays(plan, 9))), again
        )
        assert [result.outcome for result in repeated] == ["already_applied"] * 2
        skipped = router.push_pull(pushes(router, BatchId(0, 10, 10), 3, None), again)
        assert [result.outcome for result in skipped] == ["skipped"] * 2
        for name in into:
            np.testing.assert_array_equal(into[name], again[name])


def test_a_batch_that_a_shard_had_before_it_was_asked_is_told_from_one_of_an_earlier_try() -> None:
    plan = make_cut_plan(2)
    batch = BatchId(0, 0, 10)
    into = arrays(plan, 0)
    with (
        serve_shards(plan) as served,
        ShardServer(1, "127.0.0.1:0") as late,
        standing_alone() as standing,
        ExitStack() as stack,
    ):
        with Router(served.cluster, plan, standing) as another:
            another.initialize(arrays(plan, 1), INITIAL)
            another.push_pull(pushes(another, batch, 9, None), into)
        served.cluster.shards[1].address = f"127.0.0.1:{late.port}"

        def come_up_late() -> None:
            starting = "the shards: shard 1 is starting: it builds its update"
            while starting not in standing.waits.reason():
                threading.Event().wait(0.001)
            late.open(served.engines[1])

        router = stack.enter_context(Router(served.cluster, plan, standing))
        waiting = threading.Thread(target=come_up_late)
        waiting.start()
        pushed = router.push_pull(pushes(router, batch, 1, parts(plan, arrays(plan, 5))), into)
        waiting.join()
        assert [result.outcome for result in pushed] == ["already_applied"] * 2
        assert router.asked_again == {1}
        # It is about the last push alone.
        router.push_pull(pushes(router, batch, 2, parts(plan, arrays(plan, 5))), into)
        assert not router.asked_again


def test_staleness_is_told_by_each_shard() -> None:
    plan = make_cut_plan(2)
    with (
        serve_shards(plan) as served,
        standing_alone() as standing,
        Router(served.cluster, plan, standing) as one,
        Router(served.cluster, plan, standing) as other,
    ):
        into, updates = arrays(plan, 0), arrays(plan, 1)
        one.initialize(arrays(plan, 1), INITIAL)
        one.pull(None, into)
        other.pull(None, into)
        one.push_pull(pushes(one, BatchId(0, 0, 10), 1, parts(plan, updates)), into)
        stale = other.push_pull(pushes(other, BatchId(0, 10, 10), 2, parts(plan, updates)), into)
        assert [result.staleness for result in stale] == [1, 1]


def test_a_round_is_staged_decided_and_pulled() -> None:
    plan = make_cut_plan(2)
    batch = types_pb2.BatchId(epoch=0, first=0, count=10)
    decision = types_pb2.Decision(
        generation=1, round=0, attempts=[types_pb2.Attempt(batch=batch, attempt=1)]
    )
    with (
        serve_shards(plan, "sync", 1) as served,
        standing_alone() as standing,
        Router(served.cluster, plan, standing) as router,
    ):
        values, updates, into = arrays(plan, 1), arrays(plan, 5), arrays(plan, 0)
        router.initialize(values, INITIAL)
        router.pull(0, into)
        staged = router.push(pushes(router, BatchId(0, 0, 10), 1, parts(plan, updates)))
        assert [result.outcome for result in staged] == ["staged"] * 2
        router.pull(1, into, signed(decision))
        assert router.versions == (1, 1)
        trainable = "float32.trainable"
        np.testing.assert_array_equal(into[trainable], values[trainable] - 0.5 * updates[trainable])
        with pytest.raises(RoundPassed):
            router.pull(0, into)


def test_another_generation_is_told_even_when_a_shard_is_gone() -> None:
    plan = make_cut_plan(3)
    with serve_shards(plan) as served, standing_alone(connect_timeout_s=60) as standing:
        served.servers[2].stop(0)
        served.cluster.shards[1].incarnation += 1
        with (
            Router(served.cluster, plan, standing) as router,
            pytest.raises(StaleGeneration, match="shard 1"),
        ):
            router.pull(None, arrays(plan, 0))
        # Shard 2 would have been tried for a minute; the error of shard 1 ended that.


def test_a_missing_shard_is_named() -> None:
    plan = make_cut_plan(2)
    with serve_shards(plan) as served, standing_alone(connect_timeout_s=0.1) as standing:
        served.servers[1].stop(0)
        address = served.cluster.shards[1].address
        with (
            Router(served.cluster, plan, standing) as router,
            pytest.raises(ShardUnreachable, match=f"shard 1 at {address}"),
        ):
            router.initialize(arrays(plan, 0), INITIAL)


def test_a_shard_that_does_not_answer_is_known_until_it_does() -> None:
    plan = make_cut_plan(2)
    with serve_shards(plan) as served, standing_alone(connect_timeout_s=600) as standing:
        with Router(served.cluster, plan, standing) as router:
            router.reach()
            assert standing.routes.unreachable() == {}
        served.servers[1].stop(0)
        with Router(served.cluster, plan, standing) as router:
            waiting = threading.Thread(target=stop_when_waiting, args=(standing, router))
            waiting.start()
            with pytest.raises(Stopped):
                router.reach()
            waiting.join()
            assert list(standing.routes.unreachable()) == [1]
            # Told with the next heartbeat.
            beat = standing.membership.beat("", unreachable=standing.routes.unreachable())
            assert beat is not None
            assert [one.shard for one in beat.request.unreachable] == [1]


def test_a_stop_ends_the_wait_for_a_shard(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = make_cut_plan(1)
    hurried: list[bool] = []
    with serve_shards(plan) as served, standing_alone(connect_timeout_s=600) as standing:
        monkeypatch.setattr(standing, "hurry", hurried.append)
        served.servers[0].stop(0)
        with Router(served.cluster, plan, standing) as router:
            waiting = threading.Thread(target=stop_when_waiting, args=(standing, router))
            waiting.start()
            with pytest.raises(Stopped):
                router.pull(None, arrays(plan, 0))
            waiting.join()
    # Heartbeats went faster while it lasted.
    assert hurried[0]
    assert not hurried[-1]


@pytest.mark.parametrize("data_port", [None, 0])
def test_a_pull_that_the_worker_ends_itself_is_no_broken_route(data_port: int | None) -> None:
    plan = make_cut_plan(2)
    with (
        serve_shards(plan, "sync", 1, data_port=data_port) as served,
        standing_alone(connect_timeout_s=600) as standing,
    ):
        stopping = threading.Thread(target=standing.stop)

        def gone(waits: bool) -> None:
            if waits and pulling.is_set():
                stopping.start()

        pulling = threading.Event()
        with Router(served.cluster, plan, standing, waiting=gone) as router:
            router.initialize(arrays(plan, 1), INITIAL)
            pulling.set()
            with pytest.raises(Stopped):
                router.pull(1, arrays(plan, 0))
            stopping.join()
            assert standing.routes.unreachable() == {}


def test_a_route_that_breaks_after_a_pull_was_ended_is_one() -> None:
    plan = make_cut_plan(1)
    failed: list[int] = []
    with serve_shards(plan) as served:
        [shard] = served.cluster.shards
        client = ShardClient(
            shard.address,
            shard.incarnation,
            plan,
            0,
            retry=RetryPolicy(budget_s=0.0),
            failed=lambda: failed.append(1),
        )
        with client:
            client.reach()
            client.cancel()
            client.reach()
            assert failed == []
            served.servers[0].stop(0)
            with pytest.raises(ShardUnreachable):
                client.reach()
            assert failed == [1]


def test_a_push_that_finishes_a_step_after_a_stop_is_tried_once() -> None:
    plan = make_cut_plan(1)
    with serve_shards(plan) as served, standing_alone(connect_timeout_s=600) as standing:
        with Router(served.cluster, plan, standing) as router:
            router.initialize(arrays(plan, 1), INITIAL)
            standing.stop()
            (pushed,) = router.push(pushes(router, BatchId(0, 0, 10), 1, None))
            assert pushed.outcome == "skipped"
            with pytest.raises(Stopped):
                router.pull(None, arrays(plan, 0))
        served.servers[0].stop(0)
        with Router(served.cluster, plan, standing) as router, pytest.raises(Stopped):
            router.push(pushes(router, BatchId(0, 10, 10), 2, None))


def stop_when_waiting(standing: WorkerSession, router: Router) -> None:
    """Stops once the router says what it waits for."""
    while "unreachable" not in standing.waits.reason():
        threading.Event().wait(0.001)
    standing.stop()
