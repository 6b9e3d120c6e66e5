"""Names in a reason to wait: a few, however many workers there are."""

from __future__ import annotations

from itertools import count

from psrpc.core.text import NAMES_LISTED, first_names


def test_names_are_listed_once_and_in_order() -> None:
    assert first_names([]) == ""
    assert first_names(["b", "a", "b"]) == "a, b"


def test_a_crowd_is_read_no_further_than_the_first_names() -> None:
    crowd = (f"worker-{number // 2}" for number in count())
    said = first_names(crowd)
    assert said.endswith("worker-7 and others")
    assert said.count(",") == NAMES_LISTED - 1
    assert next(crowd) == f"worker-{NAMES_LISTED}"
