"""Announcements come at a calm pace."""

from __future__ import annotations

from psrpc.ops.retry import Announcer


def test_a_wait_is_announced_after_three_seconds() -> None:
    said: list[tuple[str, float]] = []
    announcer = Announcer(lambda reason, waited: said.append((reason, waited)))
    for tenth in range(75):
        announcer.waiting("coordinator at host:5000", tenth / 10)
    assert said == [("coordinator at host:5000", 3.0), ("coordinator at host:5000", 6.0)]
    assert announcer.waited_s(7.5) == 7.5


def test_a_new_wait_starts_afresh() -> None:
    said: list[str] = []
    announcer = Announcer(lambda reason, waited: said.append(f"{reason} {waited:g}"))
    announcer.waiting("a", 0)
    announcer.over()
    announcer.waiting("b", 2.9)
    announcer.waiting("b", 5.8)
    assert said == []
    announcer.waiting("b", 6.0)
    assert said == ["b 3.1"]


def test_a_wait_that_lasts_is_announced_less_and_less_often() -> None:
    said: list[float] = []
    announcer = Announcer(lambda _reason, waited: said.append(waited))
    for second in range(300):
        announcer.waiting("a", second)
    assert said == [3, 6, 12, 24, 48, 96, 156, 216, 276]


def test_other_words_for_the_same_wait_are_said_soon() -> None:
    said: list[tuple[str, float]] = []
    announcer = Announcer(lambda reason, waited: said.append((reason, waited)))
    for second in range(70):
        announcer.waiting("a" if second < 50 else "b" if second < 51 else "c", second)
    assert said[-4:] == [("a", 48), ("c", 51), ("c", 54), ("c", 60)]
