from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from psrpc.v1 import coordinator_pb2 as pb
from worker.loop.step_times import COLUMNS, MEDIAN_STEPS, StepTimes


def clocked(capacity: int = 3) -> StepTimes:
    """Each look at the clock is a second after the last."""
    seconds = iter(range(1000))
    return StepTimes(capacity, clock=lambda: float(next(seconds)))


def step(times: StepTimes) -> None:
    times.begin()
    times.took("data")
    times.took("compute")
    times.took("push_pull")
    times.end()


def test_every_part_has_its_column() -> None:
    times = clocked()
    times.begin()
    for part in ("pull", "data", "data", "compute", "push", "commit"):
        times.took(part)
    times.end()
    (row,) = times.rows()
    assert dict(zip(COLUMNS, row, strict=True)) == {
        "start_s": 0.0,
        "data_s": 2.0,
        "compute_s": 1.0,
        "push_pull_s": 0.0,
        "pull_s": 1.0,
        "push_s": 1.0,
        "commit_s": 1.0,
    }


def test_the_position_is_what_is_done_now_and_how_long_steps_take() -> None:
    times = clocked()
    before = times.position()
    assert (before.phase, before.median_step_s) == (pb.WorkerPosition.PHASE_WAITING, 0.0)
    times.at(pb.WorkerPosition.PHASE_COMPUTING)
    now = times.position()
    assert (now.phase, now.position) == (pb.WorkerPosition.PHASE_COMPUTING, before.position + 1)
    for commits in (1, 9, 5):
        times.begin()
        times.took("data")
        times.took("push")
        for _ in range(commits):
            times.took("commit")
        times.end()
    # Waiting for others is no part of it.
    assert times.position().median_step_s == 2.0


@contextmanager
def steps_that_end_whenever_memory_is_taken(times: StepTimes) -> Iterator[list[int]]:
    """Each garbage collection ends a step, as the loop's thread may wherever another one is; the
    list grows by one each time."""
    ended: list[int] = []

    def end_a_step(phase: str, _info: dict[str, int]) -> None:
        if phase == "start":
            step(times)
            ended.append(times.steps)

    before = gc.get_threshold()
    gc.callbacks.append(end_a_step)
    gc.set_threshold(1)
    try:
        yield ended
    finally:
        gc.set_threshold(*before)
        gc.callbacks.remove(end_a_step)


def test_steps_may_end_while_their_median_is_asked_for() -> None:
    times = StepTimes(3, clock=iter(float(s) for s in range(10**6)).__next__)
    for _ in range(MEDIAN_STEPS + 1):
        step(times)
    with steps_that_end_whenever_memory_is_taken(times) as ended:
        medians = [times.position().median_step_s for _ in range(20)]
        [[] for _ in range(10)]  # takes memory itself, should a position need none
    assert ended
    assert medians == [3.0] * 20


def test_the_median_is_that_of_the_last_steps() -> None:
    seconds = 0.0
    times = StepTimes(3, clock=lambda: seconds)
    for number in range(2 * MEDIAN_STEPS):
        times.begin()
        seconds += 1.0 if number < MEDIAN_STEPS + MEDIAN_STEPS // 2 else 5.0
        times.took("compute")
        times.end()
    assert times.position().median_step_s == 5.0


def test_a_step_that_was_given_up_leaves_nothing() -> None:
    times = clocked()
    step(times)
    times.begin()
    times.took("commit")
    step(times)
    assert [row[0] for row in times.rows()] == [0.0, 6.0]
    assert times.rows()[1][-1] == 0.0


def test_the_last_steps_are_kept_also_while_one_is_under_way() -> None:
    times = clocked(capacity=3)
    for _ in range(5):
        step(times)
    times.begin()
    times.took("data")
    assert times.rows() == [(start, 1.0, 1.0, 1.0, 0.0, 0.0, 0.0) for start in (8.0, 12.0, 16.0)]


def test_all_time_is_summed_up_by_what_it_went_to() -> None:
    times = clocked(capacity=2)
    for _ in range(5):
        step(times)
    times.applied(2.0)
    times.begin()
    for part in ("pull", "data", "compute", "push", "commit"):
        times.took(part)
    with times.outside("barrier"):
        pass
    # A step that does not come to its end has taken its time, too.
    assert times.totals() == pb.WorkerTimes(data=6, compute=6, network=5, apply=2, barrier=2)
    times.applied(100.0)
    assert (times.totals().network, times.totals().apply) == (0, 7)


def test_a_part_says_how_long_it_took() -> None:
    times = clocked()
    times.begin()
    assert times.took("compute") == 1.0


def test_the_file_is_one_line_a_step(tmp_path: Path) -> None:
    times = clocked()
    file = tmp_path / "steps" / "worker-a.csv"
    times.write(file)
    assert file.read_text() == "start_s,data_s,compute_s,push_pull_s,pull_s,push_s,commit_s\n"
    step(times)
    times.write(file)
    assert file.read_text().splitlines()[1:] == [
        "0.000000,1.000000,1.000000,1.000000,0.000000,0.000000,0.000000"
    ]
