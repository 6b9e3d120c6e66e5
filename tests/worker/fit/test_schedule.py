"""The batches of a job for the epochs and steps of a ``fit``."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from worker.fit.schedule import FitSchedule


def schedule(validation_freq: int | Sequence[int] = 1, validated: bool = True) -> FitSchedule:
    """Epochs 1 to 4 of 10 micro-batches, 4 of them in an update."""
    return FitSchedule(
        first=1,
        epochs=5,
        job_epochs=4,
        steps=3,
        per_step=4,
        per_epoch=10,
        records=75,
        every=1,
        validated=validated,
        validation_freq=validation_freq,
    )


def test_limits_are_batches_of_the_whole_job() -> None:
    given = schedule()
    assert given.total == 40
    assert [given.limit(1, step) for step in (1, 2, 3)] == [4, 8, 10]
    assert given.limit(4, 3) == 40


def test_a_schedule_that_begins_later_counts_from_there() -> None:
    assert schedule().begun_at(None) == schedule()
    later = schedule().begun_at(3)
    # The job has all of its batches still.
    assert (later.limit(3, 1), later.limit(4, 3), later.total) == (4, 20, 40)
    assert list(range(schedule().begun_at(9).first, 5)) == []


@pytest.mark.parametrize(
    ("freq", "validated", "epochs"),
    [(1, True, [1, 2, 3, 4]), (2, True, [1, 3]), ([2, 4], True, [1, 3]), (1, False, [])],
)
def test_epochs_that_are_validated(
    freq: int | list[int], validated: bool, epochs: list[int]
) -> None:
    given = schedule(freq, validated)
    assert [epoch for epoch in range(1, 5) if given.validates(epoch)] == epochs
