"""Announcements come at a calm pace."""

from __future__ import annotations

from psrpc.waiting import Announcer


def test_a_wait_is_announced_every_three_seconds() -> None:
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
