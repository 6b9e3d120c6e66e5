"""Arrays that readers hold while others write, and updates that break."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from pserver.client.client import ShardClient
from pserver.engine.engine import ShardEngine
from pserver.engine.parameters import Parameters
from pserver.tables.tables import Tables
from pserver.updates.engine import NDArray
from pserver.updates.numpy_engine import NumpyEngine
from psrpc.core.batch import BatchId
from psrpc.core.commands import SnapshotOrder
from psrpc.core.errors import JobFailed, RemoteFailure
from tests.pserver.shards import (
    INCARNATION,
    INITIAL,
    SGD,
    Sink,
    counting,
    engine_of,
    fence_of,
    identity_of,
    leased,
    part,
    plan_of,
    served,
    whole,
)

PLAN = plan_of()
NAME = "float32.trainable"


def test_readers_of_one_version_share_it_and_keep_it() -> None:
    held = Parameters(NumpyEngine(SGD, PLAN, 0), 1, Tables(PLAN, 0))
    held.initialize(counting(PLAN))
    first = held.values()
    assert held.values() is first
    held.update(whole(PLAN, 1.0))
    second = held.values()
    assert (first.version, second.version) == (0, 1)
    np.testing.assert_array_equal(first.arrays[NAME], counting(PLAN)[NAME])
    np.testing.assert_array_equal(second.arrays[NAME], counting(PLAN)[NAME] - 1)


def test_a_round_of_nothing_is_a_version_of_its_own() -> None:
    held = Parameters(NumpyEngine(SGD, PLAN, 0), 1, Tables(PLAN, 0))
    held.initialize(counting(PLAN))
    first = held.values()
    held.update(None)
    assert (first.version, held.values().version) == (0, 1)


def test_pushes_of_many_workers_all_count_once_and_pulls_are_never_torn() -> None:
    workers, pushes = 4, 8
    with served(engine_of(PLAN)) as client:
        fence = fence_of(client)
        client.initialize(fence, whole(PLAN), INITIAL)

        def work(worker: int) -> None:
            into = whole(PLAN)
            name = f"worker-{worker}"
            with ShardClient(client.peer.rpartition(" ")[2], INCARNATION, PLAN, 0) as mine:
                own = fence_of(mine, worker=name)
                for index in range(pushes):
                    batch = BatchId(worker, index, 1)
                    push = leased(name, batch, 1, 0, part(PLAN, whole(PLAN, 1.0)))
                    # The second time as a retry would send it.
                    _, info = mine.push_pull(own, push, into)
                    again, _ = mine.push_pull(own, push, into)
                    assert again.outcome == "already_applied"
                    assert len(set(into[NAME])) == 1, "torn"
                    assert -into[NAME][0] >= info.version

        with ThreadPoolExecutor(workers) as pool:
            list(pool.map(work, range(workers)))
        status = client.get_status()
        assert (status.applied, status.already_applied) == (workers * pushes, workers * pushes)
        into = whole(PLAN)
        client.pull(fence, None, into)
        np.testing.assert_array_equal(into[NAME], np.full(96, -workers * pushes))


class Breaking(NumpyEngine):
    """An update engine that fails halfway."""

    def apply(self, gradients: Mapping[str, NDArray], rate_scale: float = 1.0) -> None:
        super().apply(gradients, rate_scale)
        raise MemoryError("out of memory")


def test_an_update_that_breaks_makes_the_shard_unusable() -> None:
    sink = Sink()
    engine = ShardEngine(identity_of(), PLAN, Breaking(SGD, PLAN, 0), sink)
    with served(engine) as client:
        fence = fence_of(client)
        client.initialize(fence, counting(PLAN), INITIAL)
        push = leased("worker-1", BatchId(0, 0, 5), 1, 0, part(PLAN, whole(PLAN, 1.0)))
        with pytest.raises(RemoteFailure):
            client.push(fence, push)
        assert engine.failure == "MemoryError in the update of the parameters: out of memory"
        with pytest.raises(JobFailed, match="shard 0 failed: MemoryError"):
            client.push(fence, push)
        with pytest.raises(JobFailed):
            client.pull(fence, None, whole(PLAN))
        assert not engine.applied().to_epochs()
        engine.commands.take_snapshot(SnapshotOrder("step-1", 1, True, True))
        assert "out of memory" in sink.failures["step-1"]
