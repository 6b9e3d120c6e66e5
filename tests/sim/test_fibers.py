"""Simulated threads wait, take turns and end as real ones do."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from psrpc.core.errors import NotReady, PsError
from tests.sim.fibers import Fibers
from tests.sim.schedule import Process, Schedule, Steps


class Bench:
    def __init__(self) -> None:
        self.schedule = Schedule(1)
        self.process = Process(self.schedule, "worker-0", 1)
        self.fibers = Fibers(self.process)
        self.said: list[object] = []

    def say(self, what: object) -> None:
        self.said.append((round(self.schedule.now(), 3), what))

    def run(self, *threads: Callable[[], object]) -> list[object]:
        for thread in threads:
            self.fibers.spawn(thread, self.say)
        self.schedule.run(lambda: False)
        return self.said


def test_an_event_wakes_those_that_wait_and_others_wait_no_longer_than_they_said() -> None:
    bench = Bench()
    event, never = bench.fibers.event(), bench.fibers.event()

    def wait() -> str:
        assert not never.wait(1.0)
        bench.say("in vain")
        return "was woken" if event.wait(10.0) else "was not"

    def wake() -> str:
        bench.fibers.sleep(2.0)
        event.set()
        return "wakes"

    assert bench.run(wait, wake) == [(1.0, "in vain"), (2.0, "wakes"), (2.0, "was woken")]


def test_a_pool_has_so_many_threads_and_is_waited_for() -> None:
    bench = Bench()

    def work(name: str) -> str:
        bench.fibers.sleep(1.0)
        bench.say(name)
        if name == "c":
            raise NotReady(name)
        return name

    def ask() -> str:
        with bench.fibers.pool(2, "shard") as pool:
            first, _, third = [pool.submit(work, name) for name in "abc"]
            assert first.result() == "a"
            with pytest.raises(TimeoutError):
                third.exception(0.5)
            assert isinstance(third.exception(), NotReady)
        return "all done"

    expected = [(1.0, "a"), (1.0, "b"), (2.0, "c"), (2.0, "all done")]
    assert bench.run(ask) == expected


def test_what_is_no_answer_of_work_is_raised_where_everything_happens() -> None:
    bench = Bench()

    def work() -> None:
        raise AssertionError("a bug")

    with pytest.raises(AssertionError, match="a bug"):
        bench.run(lambda: bench.fibers.pool(1, "shard").submit(work).result())


def test_steps_are_told_what_they_waited_for_has_come_to() -> None:
    bench = Bench()

    def steps() -> Steps:
        try:
            yield lambda task: bench.schedule.after(1.0, task.process, task.resume, NotReady("x"))
        except PsError as error:
            return f"tries again after {error}"

    assert bench.run(lambda: bench.fibers.follow(steps())) == [(1.0, "tries again after x")]


def test_threads_of_a_process_that_dies_end_where_they_stand() -> None:
    bench = Bench()

    def work() -> None:
        try:
            bench.fibers.sleep(2.0)
            bench.say("goes on")
        finally:
            bench.say("ends")
            # It waits for nothing any more.
            bench.fibers.sleep(5.0)

    bench.schedule.after(1.0, None, bench.process.kill)
    assert bench.run(work) == [(1.0, "ends")]


def test_threads_of_a_process_that_stands_still_go_on_with_it() -> None:
    bench = Bench()

    def work() -> str:
        bench.fibers.sleep(1.0)
        return "goes on"

    bench.schedule.after(0.5, None, bench.process.stop)
    bench.schedule.after(3.0, None, bench.process.go_on)
    assert bench.run(work) == [(3.0, "goes on")]
