from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks.steps import Steps, TooShort, parts_ms, read_steps, step_ms, steps_per_s
from worker.loop.step_times import StepTimes


def worker(*starts: float) -> Steps:
    return Steps({"start_s": np.array(starts)})


def test_the_steps_file_of_a_worker_is_read(tmp_path: Path) -> None:
    seconds = iter([1.0, 1.25, 1.75, 2.75, 3.0, 3.25, 3.75, 4.75])
    times = StepTimes(clock=lambda: next(seconds))
    for _ in range(2):
        times.begin()
        times.took("data")
        times.took("compute")
        times.took("push_pull")
        times.end()
    times.write(tmp_path / "worker-a.csv")
    StepTimes().write(tmp_path / "worker-b.csv")
    found, idle = read_steps(tmp_path)
    np.testing.assert_array_equal(found.starts, [1.0, 3.0])
    np.testing.assert_array_equal(found.ends, [2.75, 4.75])
    np.testing.assert_array_equal(found.exchanges(), [[1.75, 2.75], [3.75, 4.75]])
    assert not len(idle.starts)
    assert parts_ms([found, idle], warmup=1) == {
        **dict.fromkeys(("pull", "push", "commit"), 0.0),
        "data": 250.0,
        "compute": 500.0,
        "push_pull": 1000.0,
    }


def test_a_step_lasts_until_the_next_begins() -> None:
    # The first two steps are warm-up; 1, 2, 3 and 4 s remain.
    workers = [worker(0, 100, 200, 201, 203), worker(0, 0, 7, 10, 14)]
    assert step_ms(workers, warmup=2) == 2500.0


def test_a_rate_counts_only_while_all_are_at_work() -> None:
    # The second joins late and is warm at 8 s; the first begins its last step at 12 s.
    workers = [worker(*range(13)), worker(5, 6, 7, 8, 9.5, 11, 12.5, 14)]
    # 8, 9, 10, 11 of the first, 8, 9.5, 11 of the second.
    assert steps_per_s(workers, warmup=3, least_s=1.0) == 7 / 4


@pytest.mark.parametrize(
    ("workers", "why"),
    [
        ([], r"the workers made \[\] steps"),
        ([worker(*range(9)), worker(1, 2)], r"made \[9, 2\] steps; expected more than 2 of each"),
        ([worker(*range(9)), worker(20, 21, 22, 23)], r"all were at work for -14.0 s; expected 3"),
    ],
)
def test_a_rate_is_refused_where_they_hardly_met(workers: list[Steps], why: str) -> None:
    with pytest.raises(TooShort, match=why):
        steps_per_s(workers, warmup=2, least_s=3.0)


def test_a_step_time_needs_two_steps_after_the_warmup() -> None:
    with pytest.raises(TooShort, match="no worker made more than 3 steps"):
        step_ms([worker(0, 1, 2)], warmup=2)
