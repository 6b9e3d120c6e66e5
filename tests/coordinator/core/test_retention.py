"""Which checkpoints stay."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.core.retention import KeptCheckpoint, Objective, best_of, superfluous

LOSS = Objective("loss", lower=True)
ACCURACY = Objective("accuracy", lower=False)


def kept(*ages: tuple[int, int]) -> list[KeptCheckpoint]:
    return [KeptCheckpoint(f"{generation}-{step}", generation, step) for generation, step in ages]


def test_the_newest_are_of_the_highest_generation() -> None:
    present = kept((1, 30), (2, 10), (1, 20), (2, 20))
    assert superfluous(present, 2, None, {}) == ("1-20", "1-30")
    assert superfluous(present, 3, None, {}) == ("1-20",)
    assert superfluous(present, 4, None, {}) == ()


@pytest.mark.parametrize(("objective", "best"), [(LOSS, "1-10"), (ACCURACY, "1-20"), (None, None)])
def test_the_best_stays(objective: Objective | None, best: str | None) -> None:
    present = kept((1, 10), (1, 20), (1, 30), (1, 40))
    scores = {(1, 10): 0.1, (1, 20): 0.9, (1, 30): 0.5, (2, 40): 0.0, (1, 40): math.nan}
    assert best_of(present, objective, scores) == best
    gone = superfluous(present, 1, objective, scores)
    assert gone == tuple(k.name for k in present[:-1] if k.name != best)


def test_of_equals_the_oldest_is_the_best() -> None:
    present = kept((1, 20), (1, 10))
    for objective in (LOSS, ACCURACY):
        assert best_of(present, objective, {(1, 10): 0.5, (1, 20): 0.5}) == "1-10"


def test_the_damaged_do_not_count_and_those_in_use_stay() -> None:
    present = kept((1, 10), (1, 20), (1, 30), (1, 40))
    assert superfluous(present, 2, None, {}, damaged=["1-40"]) == ("1-10",)
    assert superfluous(present, 2, None, {}, damaged=["1-20"]) == ("1-10", "1-20")
    assert superfluous(present, 2, None, {}, in_use=["1-10"]) == ("1-20",)


AGES = st.lists(st.tuples(st.integers(1, 3), st.integers(0, 9)), unique=True, max_size=12)


@settings(derandomize=True)
@given(AGES, st.integers(1, 6), st.data())
def test_never_the_last_good_ones(
    ages: list[tuple[int, int]], keep: int, data: st.DataObject
) -> None:
    present = kept(*ages)
    names = [k.name for k in present]
    damaged = data.draw(st.sets(st.sampled_from(names))) if names else set()
    scores = {k.age: float(k.global_step % 4) for k in present}
    gone = superfluous(present, keep, LOSS, scores, damaged=damaged)
    good = sorted((k for k in present if k.name not in damaged), key=lambda k: k.age)
    assert {k.name for k in good[-keep:]}.isdisjoint(gone)
    left = [k for k in good if k.name not in gone]
    assert len(left) <= keep + 1
    assert best_of(left, LOSS, scores) == best_of(good, LOSS, scores)
