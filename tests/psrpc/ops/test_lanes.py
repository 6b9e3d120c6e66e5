"""Work in lanes: all of it is done, once, and nothing of it is known afterwards."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from pserver.tables.memory import Column
from pserver.tables.table import Table
from psrpc.core.errors import InvalidArgument
from psrpc.core.tables import Rows
from psrpc.ops import lanes
from psrpc.ops.lanes import LANES, WORTH_BYTES, in_lanes
from tests.pserver.tables.table_cases import spec


@pytest.fixture
def several(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three lanes, whatever machine this is, for any work."""
    monkeypatch.setattr(lanes, "LANES", 3)
    monkeypatch.setattr(lanes, "WORTH_BYTES", 0)


@pytest.mark.usefixtures("several")
@pytest.mark.parametrize("rows", [0, 1, 2, 3, 10])
def test_the_parts_are_the_whole(rows: int) -> None:
    parts: dict[int, slice] = {}
    in_lanes(rows, 4, parts.__setitem__)
    assert sorted(parts) == [0, 1, 2]
    assert [row for lane in range(3) for row in range(rows)[parts[lane]]] == list(range(rows))


def test_little_work_is_one_part_of_the_callers_thread() -> None:
    done = []
    in_lanes(
        1000, WORTH_BYTES // 1000, lambda *part: done.append((threading.current_thread(), *part))
    )
    assert done == [(threading.current_thread(), 0, slice(0, 1000))]


def test_much_work_is_shared() -> None:
    parts: dict[int, slice] = {}
    in_lanes(1000, WORTH_BYTES // 1000 + 1, parts.__setitem__)
    assert sorted(parts) == list(range(LANES))


@pytest.mark.usefixtures("several")
@pytest.mark.parametrize("failing", [0, 2])
def test_an_error_of_any_lane_comes_when_all_have_ended(failing: int) -> None:
    ended = set()

    def work(lane: int, _part: slice) -> None:
        ended.add(lane)
        if lane == failing:
            raise ValueError(lane)

    with pytest.raises(ValueError, match=str(failing)):
        in_lanes(9, 4, work)
    assert ended == {0, 1, 2}


class Keeping(ThreadPoolExecutor):
    """Its threads are slow to let go of what they have done."""

    def __init__(self) -> None:
        super().__init__(2)
        self.kept: list[Any] = []

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        self.kept.append((fn, args, kwargs))
        return super().submit(fn, *args, **kwargs)


@pytest.mark.usefixtures("several")
def test_a_column_can_grow_in_place_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    column = Column(np.float32, 4)
    column.reserve(100)
    with Keeping() as pool:
        monkeypatch.setattr(lanes, "_pool", pool)
        _write(column)
        assert len(pool.kept) == 2
        memory = column._memory
        column.reserve(10_000)
    # Else it was copied: a view was still in use.
    assert column._memory is memory
    assert column.rows()[:100].all()


@pytest.mark.usefixtures("several")
def test_lanes_change_no_bit_and_find_what_is_not_finite(monkeypatch: pytest.MonkeyPatch) -> None:
    random = np.random.default_rng(1)
    ids = np.sort(random.choice(10_000, 2000, replace=False))
    several, one = Table(spec(), 0, 1), Table(spec(), 0, 1)
    into = [np.empty((len(ids), spec().width), np.float32) for _ in range(2)]
    for step in range(3):
        gradients = Rows(ids, random.normal(size=into[0].shape).astype(np.float32))
        for table, lanes_now, read in ((several, 3, into[0]), (one, 1, into[1])):
            monkeypatch.setattr(lanes, "LANES", lanes_now)
            table.check(gradients)
            table.apply(gradients, 1.0, step, step + 1)
            table.read(ids, read)
        assert into[0].tobytes() == into[1].tobytes()
    monkeypatch.setattr(lanes, "LANES", 3)
    gradients.values[-1, 0] = np.nan
    with pytest.raises(InvalidArgument, match=f"the gradient of id {ids[-1]} is nan in column 0"):
        several.check(gradients)


def _write(column: Column) -> None:
    view = column.rows()

    def work(_lane: int, part: slice) -> None:
        view[part] = 1

    in_lanes(100, 16, work)
