from __future__ import annotations

import signal

import pytest

from coordinator.launch.restarts import (
    LONGEST_PAUSE_S,
    SAME_WORDS_S,
    SHORT_S,
    GiveUp,
    Life,
    Restart,
    Restarts,
)


def life(name: str = "shard-0", status: int = 1, lived_s: float = 3600.0, words: str = "") -> Life:
    return Life(name, status, f"ended with {status}", lived_s, words)


def reason(decision: Restart | GiveUp) -> str:
    assert isinstance(decision, GiveUp), decision
    return decision.reason


def test_a_process_that_was_of_use_is_started_again_at_once() -> None:
    restarts = Restarts(limit=3)
    assert restarts.ended(life()) == Restart(0.0, "restart 1 of at most 3")
    assert restarts.ended(life("worker-a", 0)) == Restart(0.0, "restart 2 of at most 3")
    assert restarts.made == {"shard-0": 1, "worker-a": 1}


def test_the_limit_is_on_all_together() -> None:
    restarts = Restarts(limit=2)
    for name in ("shard-0", "shard-1"):
        restarts.ended(life(name))
    assert reason(restarts.ended(life("worker-a"))) == (
        "all 2 restarts are used up (--max-restarts)"
    )
    assert restarts.made == {"shard-0": 1, "shard-1": 1}


def test_memory_may_be_why_a_process_is_killed_again_and_again() -> None:
    restarts = Restarts(limit=1)
    killed = life(status=-signal.SIGKILL)
    restarts.ended(killed)
    assert reason(restarts.ended(killed)) == (
        "the one restart is used up (--max-restarts); memory may have run out"
    )


def test_none_is_none() -> None:
    assert reason(Restarts(limit=0).ended(life())) == "--max-restarts is 0"


def test_bad_input_stays_bad() -> None:
    restarts = Restarts(limit=3)
    assert "cannot be used" in reason(restarts.ended(life(status=2)))
    assert restarts.made == {}


@pytest.mark.parametrize(
    ("lives", "loop"),
    [
        (3 * [life(lived_s=SHORT_S - 1)], "within 10 s of coming up"),
        (3 * [life(status=0, lived_s=0.0)], "within 10 s of coming up"),
        (3 * [life(lived_s=60.0, words="MemoryError")], "with the same words"),
        # A longer life in between.
        ([life(lived_s=0.0), life(lived_s=0.0), life(), life(lived_s=0.0), life(lived_s=0.0)], ""),
        # Other words, or the same ones after a long time.
        ([life(lived_s=60.0, words=words) for words in "aab"], ""),
        (3 * [life(lived_s=60.0)], ""),
        (3 * [life(lived_s=SAME_WORDS_S, words="MemoryError")], ""),
        # Each in its own name.
        ([life(name, lived_s=0.0) for name in ("a", "b", "a", "b")], ""),
        # Killed by an operator.
        (5 * [life(status=-signal.SIGKILL, lived_s=0.0, words="same")], ""),
        ([life(status=s, lived_s=0.0) for s in (1, -signal.SIGKILL, 1, 1)], ""),
    ],
)
def test_a_crash_loop_is_named(lives: list[Life], loop: str) -> None:
    restarts = Restarts(limit=10)
    *before, last = [restarts.ended(one) for one in lives]
    assert all(isinstance(decision, Restart) for decision in before)
    if loop:
        assert reason(last) == f"a crash loop, it ended 3 times in a row {loop}"
    else:
        assert isinstance(last, Restart)


def test_short_lives_in_a_row_are_given_time() -> None:
    restarts = Restarts(limit=100)

    def pauses(lived_s: float, times: int) -> list[float]:
        killed = life(status=-signal.SIGKILL, lived_s=lived_s)
        decisions = [restarts.ended(killed) for _ in range(times)]
        return [d.after_s for d in decisions if isinstance(d, Restart)]

    assert pauses(0.0, 8) == [0.0, 0.5, 1.0, 2.0, 4.0, 8.0, LONGEST_PAUSE_S, LONGEST_PAUSE_S]
    assert pauses(SHORT_S, 1) == [0.0]
    assert pauses(0.0, 2) == [0.0, 0.5]
