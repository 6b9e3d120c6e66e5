"""The global step by the policies that were followed."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.core.run import Followed, global_step, updates
from psrpc.core.policy import ASYNC, Policy

SYNC = Policy(mode="sync", replicas=3)
BACKUPS = Policy(mode="sync", replicas=3, aggregate=2)
PER_EPOCH = 8


@pytest.mark.parametrize(
    ("settings", "first", "last", "steps"),
    [
        (ASYNC, 0, 10, 10),
        (SYNC, 0, 8, 3),  # rounds of 3, 3 and 2
        (SYNC, 0, 9, 4),
        (SYNC, 0, 24, 9),
        (SYNC, 5, 8, 1),  # one round is left of an epoch
        (SYNC, 5, 20, 6),
        (SYNC, 8, 8, 0),
        (BACKUPS, 0, 8, 4),
    ],
)
def test_updates(settings: Policy, first: int, last: int, steps: int) -> None:
    assert updates(settings, first, last, PER_EPOCH) == steps


def step(followed: list[Followed], batches: int) -> int:
    return global_step(followed, batches, PER_EPOCH)


def test_the_global_step_goes_on_from_each_change() -> None:
    followed = [Followed(1, SYNC), Followed(2, ASYNC, 3, 8), Followed(3, SYNC, 5, 10)]
    assert [step(followed, n) for n in (0, 3, 8, 9, 10, 13, 16, 24)] == [0, 1, 3, 4, 5, 6, 7, 10]


def test_a_history_that_fell_back_behind_a_change_goes_by_the_policy_of_before() -> None:
    # It changed at 20 batches, fell back to 9, and changed again at 12.
    followed = [Followed(1, ASYNC), Followed(2, SYNC, 20, 20), Followed(3, ASYNC, 10, 12)]
    assert [step(followed, n) for n in (0, 9, 11, 12, 13)] == [0, 9, 10, 10, 11]


policies = st.sampled_from([ASYNC, SYNC, BACKUPS])


@given(first=policies, changes=st.lists(st.tuples(policies, st.integers(0, 9)), max_size=4))
def test_it_never_falls(first: Policy, changes: list[tuple[Policy, int]]) -> None:
    followed = [Followed(1, first)]
    for number, (settings, more) in enumerate(changes, 2):
        batches = followed[-1].batches + more
        followed.append(Followed(number, settings, step(followed, batches), batches))
    steps = [step(followed, batches) for batches in range(50)]
    assert steps == sorted(steps)
    for one in followed[1:]:
        assert steps[one.batches] == one.step


def test_it_is_stored_as_json() -> None:
    one = Followed(2, BACKUPS, 5, 10)
    assert Followed.from_json(json.loads(json.dumps(one.to_json()))) == one
