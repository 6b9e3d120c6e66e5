"""Memory for checkpoints is touched ahead of time, and used again."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable

import numpy as np
import pytest

from pserver.updates import lending
from pserver.updates.engine import EngineKind
from pserver.updates.factory import make_engine
from pserver.updates.lending import Lending, NDArray, Spares
from psrpc.core.placement import make_plan
from psrpc.core.plan import VariableSpec, aligned_empty
from psrpc.ops.threads import Threads
from tests.pserver.engine_cases import serialized

LENGTH = 1024


class AtOnce(threading.Thread):
    """Runs in the thread that starts it."""

    def start(self) -> None:
        self.run()


class OneThread(Threads):
    def thread(self, target: Callable[[], object], name: str) -> threading.Thread:
        return AtOnce(target=target, name=name)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The lengths of all arrays that are made; those made ahead of time are made at once."""
    lengths: list[int] = []

    def make(length: int, dtype: str) -> NDArray:
        lengths.append(length)
        return aligned_empty(length, dtype)

    monkeypatch.setattr(lending, "aligned_empty", make)
    monkeypatch.setattr(lending, "THREADS", OneThread())
    monkeypatch.setattr(lending, "SMALL_NBYTES", 0)
    return lengths


@pytest.mark.parametrize(
    "kind", ["numpy", pytest.param("keras", marks=pytest.mark.slow)], ids=["numpy", "keras"]
)
def test_checkpoints_make_no_memory_while_the_job_trains(kind: EngineKind, made: list[int]) -> None:
    plan = make_plan([VariableSpec("w", (LENGTH,), "float32", "trainable")], 1, "cut")
    engine = make_engine(kind, serialized("Adam"), plan, 0)
    [arena] = plan.arenas
    ones = aligned_empty(LENGTH, "float32")
    ones.fill(1)
    engine.load({arena.name: ones})
    assert made == [LENGTH] * 3, "parameters and both moments, before the first checkpoint"
    for _ in range(3):
        gradient = aligned_empty(LENGTH, "float32")
        gradient.fill(0.5)
        engine.apply({arena.name: gradient})
        values, slots = engine.freeze()
        before = values[arena.name].copy(), slots.elements["velocities"][arena.name].copy()
        engine.apply({arena.name: gradient})
        np.testing.assert_array_equal(values[arena.name], before[0])
        np.testing.assert_array_equal(slots.elements["velocities"][arena.name], before[1])
        assert not np.array_equal(engine.snapshot()[arena.name], before[0])
        del values, slots
        gc.collect()
    assert made == [LENGTH] * 3


def test_memory_is_lent_again_only_after_the_last_part_of_the_view_ends(made: list[int]) -> None:
    spares = Spares()
    spares.prepare([(LENGTH, "float32")])
    array = spares.take(LENGTH, "float32")
    view = spares.lend(array)
    part = view[:2]
    del view
    assert spares.take(LENGTH, "float32") is not array
    del part
    assert spares.take(LENGTH, "float32") is array
    assert made == [LENGTH] * 2


def test_no_more_memory_is_kept_than_one_checkpoint_takes(made: list[int]) -> None:
    spares = Spares()
    spares.prepare([(LENGTH, "float32")])
    arrays = [spares.take(LENGTH, "float32") for _ in range(3)]
    views = [spares.lend(array) for array in arrays]
    views.clear()
    spares.take(LENGTH, "float32")
    spares.take(LENGTH, "float32")
    assert made == [LENGTH] * 4, "one of the three was kept"


def test_an_update_takes_spare_memory_while_a_view_lives(made: list[int]) -> None:
    spares = Spares()
    spares.prepare([(LENGTH, "float32")])
    lent = Lending(spares)
    array = aligned_empty(LENGTH, "float32")
    view = lent.lend(array)
    other = lent.own(array)
    assert other is not array
    assert lent.own(other) is other
    del view
    assert spares.take(LENGTH, "float32") is array
    assert made == [LENGTH]


def test_little_memory_is_made_when_it_is_needed(
    made: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lending, "SMALL_NBYTES", 4 * LENGTH + 1)
    Spares().prepare([(LENGTH, "float32")])
    assert not made
