"""Simulated threads wait, take turns and end as real ones do."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from psrpc.core.errors import NotReady, PsError
from tests.sim.calls import ToCoordinator
from tests.sim.faults import Faults
from tests.sim.fibers import Fibers
from tests.sim.network import COORDINATOR, Network, Respond
from tests.sim.schedule import Process, Schedule, Steps


class Threads:
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
    threads = Threads()
    event, never = threads.fibers.event(), threads.fibers.event()

    def wait() -> str:
        assert not never.wait(1.0)
        threads.say("in vain")
        return "was woken" if event.wait(10.0) else "was not"

    def wake() -> str:
        threads.fibers.sleep(2.0)
        event.set()
        return "wakes"

    assert threads.run(wait, wake) == [(1.0, "in vain"), (2.0, "wakes"), (2.0, "was woken")]


def test_a_condition_is_waited_for_until_it_holds_and_no_longer_than_is_said() -> None:
    threads = Threads()
    changed = threads.fibers.condition()
    numbers: list[int] = []

    def wait() -> str:
        assert not changed.wait_for(lambda: numbers, 0.0)
        assert not changed.wait_for(lambda: len(numbers) > 1, 1.5)
        threads.say("in vain")
        return f"has {changed.wait_for(lambda: numbers[1:], 10.0)}"

    def change() -> str:
        for number in range(2):
            threads.fibers.sleep(1.0)
            numbers.append(number)
            changed.notify_all()
        return "changes"

    assert threads.run(wait, change) == [(1.5, "in vain"), (2.0, "changes"), (2.0, "has [1]")]


def test_a_pool_has_so_many_threads_and_is_waited_for() -> None:
    threads = Threads()

    def work(name: str) -> str:
        threads.fibers.sleep(1.0)
        threads.say(name)
        if name == "c":
            raise NotReady(name)
        return name

    def ask() -> str:
        with threads.fibers.pool(2, "shard") as pool:
            first, _, third = [pool.submit(work, name) for name in "abc"]
            assert first.result() == "a"
            with pytest.raises(TimeoutError):
                third.exception(0.5)
            assert isinstance(third.exception(), NotReady)
        return "all done"

    expected = [(1.0, "a"), (1.0, "b"), (2.0, "c"), (2.0, "all done")]
    assert threads.run(ask) == expected


def test_an_unexpected_error_of_work_is_raised_in_the_main_loop() -> None:
    threads = Threads()

    def work() -> None:
        raise AssertionError("a bug")

    with pytest.raises(AssertionError, match="a bug"):
        threads.run(lambda: threads.fibers.pool(1, "shard").submit(work).result())


def test_steps_are_told_what_they_waited_for_has_come_to() -> None:
    threads = Threads()

    def steps() -> Steps:
        try:
            yield lambda task: threads.schedule.after(1.0, task.process, task.resume, NotReady("x"))
        except PsError as error:
            return f"tries again after {error}"

    assert threads.run(lambda: threads.fibers.follow(steps())) == [(1.0, "tries again after x")]


def test_threads_of_a_process_that_dies_end_where_they_stand() -> None:
    threads = Threads()

    def work() -> None:
        try:
            threads.fibers.sleep(2.0)
            threads.say("goes on")
        finally:
            threads.say("ends")
            # It waits for nothing any more.
            threads.fibers.sleep(5.0)

    threads.schedule.after(1.0, None, threads.process.kill)
    assert threads.run(work) == [(1.0, "ends")]


def test_threads_of_a_process_that_stands_still_go_on_with_it() -> None:
    threads = Threads()

    def work() -> str:
        threads.fibers.sleep(1.0)
        return "goes on"

    threads.schedule.after(0.5, None, threads.process.stop)
    threads.schedule.after(3.0, None, threads.process.go_on)
    assert threads.run(work) == [(3.0, "goes on")]


def test_calls_that_a_client_gives_up_end_in_the_order_they_were_made_in() -> None:
    """Not in that of their addresses in memory, which differ from run to run."""
    threads = Threads()
    schedule = threads.schedule
    network = Network(schedule, Faults(schedule.random, {}, schedule.now))
    network.listen(COORDINATOR, Silent(Process(schedule, "coordinator", 2)))
    client = ToCoordinator(network, threads.process, threads.fibers)

    def ask(number: int) -> int:
        with pytest.raises(PsError, match="given up"):
            client.get_job_status()
        return number

    def close() -> str:
        threads.fibers.sleep(1.0)
        client.close()
        return "closed"

    said = threads.run(*(partial(ask, number) for number in range(50)), close)
    assert said == [(1.0, "closed"), *((1.0, number) for number in range(50))]


class Silent:
    """Answers nothing."""

    def __init__(self, process: Process) -> None:
        self.process = process

    def handle(self, method: str, request: Any, respond: Respond) -> None:
        """Does nothing."""
