from __future__ import annotations

from worker.runtime.waits import WorkerWaits


def make() -> tuple[WorkerWaits, list[tuple[str, float]]]:
    said: list[tuple[str, float]] = []
    return WorkerWaits(lambda reason, waited_s: said.append((reason, waited_s))), said


def test_a_long_wait_is_announced_every_three_seconds() -> None:
    waits, said = make()
    with waits.on("shard 1"):
        for now in range(8):
            waits.tick(now)
    assert said == [("shard 1", 3.0), ("shard 1", 6.0)]
    assert waits.reason() == ""


def test_many_short_waits_are_not_one_long_wait() -> None:
    waits, said = make()
    for now in range(10):
        with waits.on("shard 1"):
            waits.tick(now)
    assert said == []


def test_the_words_of_a_wait_may_change_and_may_be_asked_for_late() -> None:
    waits, said = make()
    words = ["shard 0, shard 1"]
    with waits.on(lambda: words[0]):
        waits.tick(0)
        words[0] = "shard 1"
        waits.tick(4)
        waits.on("shard 2")
        waits.tick(8)
    assert said == [("shard 1", 4.0), ("shard 2", 8.0)]
