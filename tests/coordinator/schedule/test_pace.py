"""How much work a lease has: by the speed of its worker, and by how many others ask for leases."""

from __future__ import annotations

import pytest

from coordinator.schedule.pace import LARGEST_TASK, LEASES_PER_S, Pace


def pace_of(batch_s: float) -> Pace:
    """A worker that was always as fast, and has had leases enough to show it."""
    pace = Pace(since=0.0)
    pace.measure(1, batch_s)
    pace.task_size = LARGEST_TASK
    return pace


@pytest.mark.parametrize(("workers", "size"), [(1, 5), (125, 5), (1000, 40)])
def test_tasks_of_many_workers_are_longer(workers: int, size: int) -> None:
    assert pace_of(0.1).next_size(workers) == size


@pytest.mark.parametrize("workers", [300, 1000, 5000])
def test_many_workers_ask_for_so_many_leases_a_second(workers: int) -> None:
    batch_s = 0.1
    task_s = batch_s * pace_of(batch_s).next_size(workers)
    assert workers / task_s == pytest.approx(LEASES_PER_S, rel=0.1)


def test_a_task_has_a_largest_size() -> None:
    assert pace_of(0.0001).next_size(1000) == LARGEST_TASK
