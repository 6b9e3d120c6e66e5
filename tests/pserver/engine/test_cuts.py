"""A snapshot is one moment of a shard, and a shard that is restored from it is the same shard."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Condition, Event, Lock
from typing import Any, TypeVar

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pserver.core.assembly import shard_extents
from pserver.core.fence import Fence
from pserver.core.requests import (
    InitializeRequest,
    PullRequest,
    PushRequest,
    RestoredState,
    Snapshot,
)
from pserver.engine.engine import ShardEngine
from pserver.snapshots.writer import SnapshotFiles
from pserver.transport.shard_memory import Shared
from pserver.updates.numpy_engine import NumpyEngine
from psrpc.checkpoint.checkpoint import Manifest, ManifestFile, commit
from psrpc.core.batch import BatchId
from psrpc.core.commands import Attempt, Begin, Decision, SnapshotOrder
from psrpc.core.plan import aligned_empty
from tests.pserver.engine_cases import serialized
from tests.pserver.shards import INCARNATION, SGD, NDArray, Sink, engine_of, identity_of, plan_of

PLAN = plan_of(size=300)
EXTENTS = tuple(shard_extents(PLAN, 0))
ADAM = serialized("Adam")
ORDER = SnapshotOrder("step-1", write=True, keep=False, directory="checkpoints", global_step=1)
WAIT_S = 60.0

Result = TypeVar("Result")


def arrays(fill: Callable[[int], NDArray]) -> Shared:
    """Tensors that have arrived; ``fill`` makes so many elements."""
    found = []
    for arena in PLAN.arenas:
        array = aligned_empty(arena.length, arena.dtype)
        array[:] = fill(arena.length)
        found.append(array.view(np.uint8))
    return Shared(found)


def initialized(engine: ShardEngine) -> ShardEngine:
    """The same engine, with values of 0."""
    fence = Fence(1, 1, PLAN.hash, INCARNATION)
    engine.initialize(InitializeRequest(fence, EXTENTS), arrays(np.zeros), 0)
    return engine


def shard(sink: Sink, replicas: int = 0) -> ShardEngine:
    """A shard with values of 0 that updates by Adam."""
    return initialized(engine_of(PLAN, replicas=replicas, optimizer=ADAM, sink=sink))


class Training:
    """Batches 0, 1, 2, ... of 10 records: gradients at random, or skipped, the same each time."""

    def __init__(self, engine: ShardEngine) -> None:
        self._engine = engine

    def push(self, batch: int) -> str:
        skipped = batch % 7 == 3
        rng = np.random.default_rng(batch)
        request = PushRequest(
            fence=Fence(self._engine.identity.generation, 1, PLAN.hash, INCARNATION),
            worker="w",
            attempt=Attempt(BatchId(0, 10 * batch, 10), batch),
            base_version=self._engine.report().version,
            examples=10,
            skipped=skipped,
            extents=() if skipped else EXTENTS,
        )
        gradient = Shared(()) if skipped else arrays(lambda n: rng.normal(size=n))
        return self._engine.push(request, gradient, 0).outcome

    def decide(self, batches: list[int]) -> None:
        attempts = tuple(Attempt(BatchId(0, 10 * b, 10), b) for b in batches)
        generation = self._engine.identity.generation
        self._engine.commands.decide(Decision(generation, self._engine.report().version, attempts))


def state(snapshot: Snapshot) -> dict[str, Any]:
    """All that a snapshot holds, bit for bit."""
    slots = snapshot.slots
    return {
        "values": {n: a.tobytes() for n, a in snapshot.values.arrays.items()},
        "elements": {(s, n): a.tobytes() for s, x in slots.elements.items() for n, a in x.items()},
        "scalars": {n: a.tobytes() for n, a in slots.scalars.items()},
        "version": snapshot.values.version,
        "applied": snapshot.applied,
    }


def now(engine: ShardEngine, sink: Sink, name: str) -> dict[str, Any]:
    """The state of this moment."""
    engine.commands.take_snapshot(replace(ORDER, name=name))
    return state(sink.snapshots[name])


def through_files(snapshot: Snapshot) -> RestoredState:
    """Written, committed and read again."""
    with TemporaryDirectory() as directory:
        run_dir = Path(directory)
        (run_dir / "checkpoints" / ".tmp").mkdir(parents=True)
        files = SnapshotFiles(identity_of(), PLAN, "run-1", run_dir)
        report = files.write(replace(ORDER, directory="checkpoints/.tmp"), snapshot)
        assert not report.error
        file = report.file
        assert (report.generation, file.version) == (1, snapshot.values.version)
        manifest = Manifest(
            "run-1", "step-1", 1, 1, 1, "async", 0, PLAN, ADAM, "numpy", 0, 10, "data", "job", "00",
            (ManifestFile(0, file.file, file.nbytes, file.sha256, file.version),),
        )  # fmt: skip
        commit(run_dir / "checkpoints" / ".tmp", run_dir / "checkpoints" / "step-1", manifest)
        return files.read("checkpoints/step-1")


@pytest.mark.parametrize("order", [ORDER, replace(ORDER, write=False, keep=True)])
def test_an_order_that_is_repeated_is_carried_out_once(order: SnapshotOrder) -> None:
    """By then the state is another, and the files of the first may be committed."""
    first = shard(sink := Sink())
    training = Training(first)
    training.push(0)
    first.commands.take_snapshot(order)
    taken = state(sink.snapshots[order.name])
    training.push(1)
    first.commands.take_snapshot(order)
    assert state(sink.snapshots[order.name]) == taken
    assert sink.repeats == [order.name]


@pytest.mark.slow
@settings(derandomize=True, max_examples=25)
@given(
    st.permutations(range(12)),
    st.integers(0, 12),
    st.lists(st.integers(0, 11), max_size=6),
    st.booleans(),
)
def test_a_restored_shard_goes_on_as_the_first_one_does(
    order: list[int], cut: int, again: list[int], restart: bool
) -> None:
    sink = Sink()
    first = shard(sink)
    training = Training(first)
    for batch in order[:cut]:
        training.push(batch)
    at_cut = now(first, sink, ORDER.name)
    for batch in order[cut:]:
        training.push(batch)
    at_end = now(first, sink, "end")
    assert state(sink.snapshots[ORDER.name]) == at_cut, "what was frozen has changed"

    # Another process, or the one that has gone on meanwhile.
    second, other = (shard(other := Sink()), other) if restart else (first, sink)
    begun = second.commands.begin(
        Begin(2, 1, restore="c"), through_files(sink.snapshots[ORDER.name])
    )
    assert begun is not None
    assert (begun.version, begun.applied) == (at_cut["version"], at_cut["applied"])
    assert now(second, other, "restored") == at_cut
    training = Training(second)
    for batch in (*order[:cut], *(b for b in again if b in order[:cut])):
        assert training.push(batch) == "already_applied"
    assert now(second, other, "repeated") == at_cut
    for batch in order[cut:]:
        assert training.push(batch) in ("applied", "skipped")
    assert now(second, other, "again") == at_end


@pytest.mark.slow
@settings(derandomize=True, max_examples=15)
@given(st.integers(0, 4), st.lists(st.integers(0, 7), max_size=4))
def test_rounds_after_a_cut_have_the_same_bits(cut: int, staged: list[int]) -> None:
    rounds = [[0, 1], [2, 3], [4, 5], [6, 7]]
    sink = Sink()
    first = shard(sink, replicas=2)
    training = Training(first)
    for number, batches in enumerate(rounds):
        if number == cut:
            now(first, sink, ORDER.name)
        for batch in batches:
            training.push(batch)
        training.decide(batches)
    if cut == len(rounds):
        now(first, sink, ORDER.name)
    at_end = now(first, sink, "end")

    second = shard(other := Sink(), replicas=2)
    training = Training(second)
    for batch in staged[:2]:
        training.push(batch)  # of before, so it must not count
    second.commands.begin(Begin(2, 1, restore="c"), through_files(sink.snapshots[ORDER.name]))
    assert second.report().staged_now == 0
    for batches in rounds[cut:]:
        for batch in reversed(batches):
            training.push(batch)
        training.decide(batches)
    assert now(second, other, "again") == at_end


class Noticing:
    """A lock that notes when a thread has to wait for it."""

    def __init__(self) -> None:
        self.awaited = Event()
        self._lock = Lock()

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        if not self._lock.acquire(blocking=False):
            self.awaited.set()
            return blocking and self._lock.acquire(timeout=timeout)
        return True

    def release(self) -> None:
        self._lock.release()

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *exception: object) -> None:
        self.release()


class Halting(NumpyEngine):
    """Stops after its update, before anybody has recorded what was applied."""

    def __init__(self, *where: Any) -> None:
        super().__init__(*where)
        self.applied, self.go_on = Event(), Event()

    def apply(self, gradients: Mapping[str, NDArray], rate_scale: float = 1.0) -> None:
        super().apply(gradients, rate_scale)
        self.applied.set()
        assert self.go_on.wait(WAIT_S)


def amid_an_update(act: Callable[[ShardEngine], Result], sink: Sink) -> Result:
    """Result of ``act`` if it begins while batch 0 is applied."""
    updates, lock = Halting(SGD, PLAN, 0), Noticing()
    engine = initialized(ShardEngine(identity_of(), PLAN, updates, sink))
    engine._changed = engine.commands._changed = Condition(lock)  # type: ignore[arg-type]
    with ThreadPoolExecutor(2) as pool:
        push = pool.submit(Training(engine).push, 0)
        assert updates.applied.wait(WAIT_S)
        acting = pool.submit(act, engine)
        acting.add_done_callback(lambda _: lock.awaited.set())
        assert lock.awaited.wait(WAIT_S)
        updates.go_on.set()
        assert push.result(WAIT_S) == "applied"
        return acting.result(WAIT_S)


def test_a_snapshot_is_of_a_moment_between_two_updates() -> None:
    sink = Sink()
    amid_an_update(lambda engine: engine.commands.take_snapshot(ORDER), sink)
    found = sink.snapshots[ORDER.name]
    assert (found.values.version, found.slots.iterations) == (1, 1)
    assert found.applied == ({"epoch": 0, "applied": [[0, 10]], "skipped": []},)


def test_a_pull_is_of_a_moment_between_two_updates() -> None:
    request = PullRequest(Fence(1, 1, PLAN.hash, INCARNATION), "worker-2", None)
    assert amid_an_update(lambda engine: engine.pull(request, 0), Sink()).version == 1
