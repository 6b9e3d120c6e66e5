"""When a run stops early, and when it goes on more slowly: as Keras's own callbacks decide."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest

from coordinator.core.plateau import ReduceLr, StopEarly, best_epoch, review
from coordinator.core.retention import Objective

LOSS, ACCURACY = Objective("loss", lower=True), Objective("accuracy", lower=False)


def stops_at(stop: StopEarly, results: Sequence[float | None]) -> int | None:
    """The epoch after which a run stops that looks after each."""
    for done in range(1, len(results) + 1):
        if stop.judge(results[:done]) is not None:
            return done
    return None


@pytest.mark.parametrize(
    ("patience", "min_delta", "results", "at"),
    [
        (3, 0.0, [5, 4, 3, 2, 2, 2, 2], 7),
        (3, 0.0, [5, 4, 3, 2, 2, 2], None),
        (0, 0.0, [5, 6], 2),
        (0, 0.0, [5], None),
        (1, 0.0, [5, 6, 4, 4], 2),
        (2, 0.0, [5, 6, 4, 4, 4], 5),
        (2, 0.5, [5, 4.6, 4.5, 4.4], 3),
        (2, 0.5, [5, 4.6, 4.4, 4.3, 4.2], 5),
        (2, 0.0, [math.nan, math.nan, math.nan], 2),
        (2, 0.0, [5, None, None, None, 6], None),
        (2, 0.0, [5, None, 6, None, 6], 5),
    ],
)
def test_a_run_stops_once_its_patience_is_over(
    patience: int, min_delta: float, results: list[float | None], at: int | None
) -> None:
    assert stops_at(StopEarly(LOSS, patience, min_delta), results) == at
    more = [None if value is None else -value for value in results]
    assert stops_at(StopEarly(ACCURACY, patience, min_delta), more) == at


def test_it_says_why() -> None:
    stopped = StopEarly(LOSS, 3).judge([5.0, 4.0, 3.0, 2.0, 2.5, 2.0, 3.0])
    assert stopped is not None
    assert (stopped.epoch, stopped.best) == (7, 4)
    assert stopped.reason == (
        "stopped early at epoch 7: loss did not improve for 3 epochs; best epoch 4"
    )


def test_a_run_that_goes_on_is_judged_by_its_last_epoch() -> None:
    """One that was resumed has other settings, or a better epoch since."""
    stop = StopEarly(LOSS, 2)
    assert stop.judge([5.0, 6.0, 6.0]) is not None
    assert stop.judge([5.0, 6.0, 6.0, 4.0]) is None


def rates(reduce: ReduceLr, results: Sequence[float], first: float = 1.0) -> list[float]:
    """Factors of the learning rate, one for each epoch after the first."""
    return [reduce.rate(results[:done], first) for done in range(1, len(results) + 1)]


@pytest.mark.parametrize(
    ("settings", "results", "expected"),
    [
        ({"factor": 0.5, "patience": 2}, [5, 5, 5, 5, 5], [1, 1, 0.5, 0.5, 0.25]),
        ({"factor": 0.5, "patience": 1, "cooldown": 2}, [5, 5, 5, 5, 5], [1, 0.5, 0.5, 0.25, 0.25]),
        ({"factor": 0.5, "patience": 1, "min_lr": 0.3}, [5, 5, 5, 5], [1, 0.5, 0.3, 0.3]),
        ({"factor": 0.5, "patience": 0}, [5, 4, 4, 3], [1, 1, 0.5, 0.5]),
        ({"factor": 0.5, "patience": 1, "min_delta": 0.5}, [5, 4.6, 4.4], [1, 0.5, 0.5]),
    ],
)
def test_a_learning_rate_falls_when_nothing_improves(
    settings: dict[str, float], results: list[float], expected: list[float]
) -> None:
    reduce = ReduceLr(LOSS, **{"min_delta": 0.0, **settings})  # type: ignore[arg-type]
    assert rates(reduce, results) == pytest.approx(expected)


def test_the_best_epoch_is_the_first_of_equals() -> None:
    assert best_epoch([3.0, 2.0, None, 2.0, math.nan], LOSS) == 2
    assert best_epoch([None, math.nan], LOSS) is None


def look(*evaluations: dict[str, float], at_end: bool = True, epochs: int = 9) -> object:
    found = review(
        evaluations,
        StopEarly(LOSS, 2),
        ReduceLr(LOSS, 0.5, 1, 0.0),
        at_end=at_end,
        epochs=epochs,
        first_rate=1.0,
    )
    return found.until, found.awaited, found.stopped is not None, found.rate


def test_an_epoch_waits_for_the_results_of_the_one_before() -> None:
    one, two = {"loss": 1.0}, {"loss": 2.0}
    assert look() == (1, None, False, 1.0)
    assert look({}) == (1, 0, False, 1.0)
    assert look(one) == (2, None, False, 1.0)
    assert look(one, two) == (3, None, False, 0.5)
    # The next learning rate is not known before its results are.
    assert look(one, two, {}) == (3, 2, False, 0.5)
    assert look(one, two, two) == (3, None, True, 0.25)
    # What can no longer be evaluated is not waited for, and the last epoch's is the final one.
    assert look(one, {}, at_end=False) == (3, None, False, 1.0)
    assert look(one, {}, epochs=2) == (3, None, False, 1.0)


def test_nothing_stops_in_the_middle_of_an_epoch() -> None:
    one, two = {"loss": 1.0}, {"loss": 2.0}
    assert look(one, two, two, at_end=False) == (4, None, False, 0.25)
