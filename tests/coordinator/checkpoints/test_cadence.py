"""When the next checkpoint is due, by steps, by time and by what checkpoints cost."""

from __future__ import annotations

from itertools import pairwise
from random import Random

import pytest

from coordinator.checkpoints.cadence import COST_FACTOR, PAUSE_S, PAY_IN, Cadence
from psrpc.checkpoint.checkpoint_every import SaveInterval, read_checkpoint_every
from psrpc.ops.clock import ManualClock

DEFAULT = read_checkpoint_every(None)


class Saved:
    """A cadence, its clock, and checkpoints that take as long as they are told to."""

    def __init__(self, every: SaveInterval) -> None:
        self.clock = ManualClock()
        self.cadence = Cadence(every, self.clock)
        self.step = 0

    def train(self, seconds: float, steps: int = 1) -> str:
        """Why a checkpoint is due after that; empty where none is."""
        self.clock.advance(seconds)
        self.cadence.stepped(self.step, self.step + steps)
        self.step += steps
        verdict = self.cadence.verdict
        return verdict.reason if verdict.due else ""

    def save(self, takes_s: float, fails: bool = False) -> None:
        name = f"step-{self.step}"
        self.cadence.ordered(name)
        self.clock.advance(takes_s)
        assert not self.cadence.verdict.due, "one is under way"
        (self.cadence.failed if fails else self.cadence.committed)(name)

    def until_due(self) -> float:
        """Trains until the next one is due; how many seconds."""
        seconds = 0.0
        while not self.train(0.5):
            seconds += 0.5
        return seconds


@pytest.mark.parametrize(
    ("said", "means"),
    [
        (500, SaveInterval(steps=500)),
        ("60s", SaveInterval(seconds=60.0)),
        ("2m", SaveInterval(seconds=120.0)),
        ("1.5 h", SaveInterval(seconds=5400.0)),
        (None, SaveInterval(1000, 60.0)),
    ],
)
def test_an_interval_is_steps_or_time_or_whichever_comes_first(
    said: object, means: SaveInterval
) -> None:
    assert read_checkpoint_every(said) == means


@pytest.mark.parametrize("said", [0, -5, True, 60.0, "", "60", "s", "60x", "-1s", "0m", "nan s"])
def test_anything_else_is_refused(said: object) -> None:
    with pytest.raises(ValueError, match=r"expected steps .* or time with its unit"):
        read_checkpoint_every(said)


def test_steps_alone_are_kept_to_the_letter_whatever_checkpoints_cost() -> None:
    saved = Saved(SaveInterval(steps=10))
    assert not saved.train(1000.0, 9)
    assert saved.train(0.0, 1) == "step 10"
    saved.save(takes_s=100.0)
    assert not saved.train(5000.0, 9)
    assert saved.train(0.0, 1) == "step 20"


def test_time_alone_counts_from_the_first_step_and_from_each_order() -> None:
    saved = Saved(SaveInterval(seconds=60.0))
    saved.clock.advance(500.0)
    assert not saved.train(0.0), "shards and workers came late"
    assert not saved.train(59.0, 10**6)
    assert saved.train(1.0) == "60 s since the last one"
    saved.save(takes_s=1.0)
    assert not saved.train(58.0)
    assert saved.train(1.0)


def test_the_default_is_whichever_comes_first() -> None:
    saved = Saved(DEFAULT)
    assert saved.train(0.0, 1000) == "step 1000"
    saved.save(takes_s=0.1)
    assert not saved.train(50.0, 999)
    assert saved.train(0.1, 1) == "step 2000"
    saved.save(takes_s=0.1)
    assert saved.train(60.0, 5) == "60 s since the last one"


@pytest.mark.parametrize("every", [DEFAULT, SaveInterval(seconds=30.0)])
def test_checkpoints_that_take_long_put_off_the_next_one(every: SaveInterval) -> None:
    saved = Saved(every)
    saved.train(0.0)
    saved.save(takes_s=10.0)
    assert not saved.train(COST_FACTOR * 10.0 - 10.1, 5000)
    assert saved.cadence.verdict.reason == (
        "checkpoints take 10.0 s, the last one took 10.0 s: 0 s more"
    )
    assert saved.train(0.2)


def test_one_slow_checkpoint_among_fast_ones_hardly_holds_off_the_next() -> None:
    saved = Saved(SaveInterval(seconds=1.0))
    saved.train(0.0)
    for _ in range(3):
        saved.save(takes_s=0.1)
        saved.until_due()
    saved.save(takes_s=40.0)
    gaps = [40.0 + saved.until_due()]
    while len(gaps) < 40:
        saved.save(takes_s=0.1)
        gaps.append(saved.until_due())
    # An N-th of it is paid, then an N-th of what is left, until the fast ones alone are.
    assert gaps[0] == pytest.approx(COST_FACTOR * 40.0 / PAY_IN, abs=1.0)
    assert all(later <= gap + 0.5 for gap, later in pairwise(gaps))
    assert gaps[-1] <= COST_FACTOR * 0.1 + 1.0


def test_a_slow_checkpoint_is_paid_for_by_an_interval_that_is_long_enough() -> None:
    saved = Saved(SaveInterval(seconds=60.0))
    saved.train(0.0)
    for takes_s in (0.1, 0.1, 20.0):
        saved.save(takes_s)
        saved.until_due()
    saved.save(takes_s=0.1)
    assert saved.until_due() == pytest.approx(60.0, abs=1.0)


@pytest.mark.parametrize("every", [DEFAULT, SaveInterval(seconds=1.0)])
def test_checkpoints_take_a_bounded_part_of_the_time(every: SaveInterval) -> None:
    for seed in range(3):
        random, saved, spent_s = Random(seed), Saved(every), 0.0
        # One in twenty is a hundred times as long as the others, so no median knows of it.
        for _ in range(20_000):
            if saved.train(random.uniform(0.0, 3.0), random.randint(0, 300)):
                takes_s = 20.0 if random.random() < 0.05 else 0.2 * random.random()
                saved.save(takes_s)
                spent_s += takes_s
        now = saved.clock.now()
        assert 0.03 * now < spent_s <= now / COST_FACTOR + PAY_IN * 20.0


def test_no_gap_is_longer_than_the_longest_checkpoint_says_whatever_else_is_ordered() -> None:
    random, saved = Random(1), Saved(SaveInterval(seconds=1.0))
    saved.train(0.0)
    for _ in range(100):
        for _ in range(random.randint(1, 30)):  # epochs that are kept, one after the other
            saved.save(takes_s=2.0 * random.random())
        assert saved.until_due() <= COST_FACTOR * 2.0


def test_one_that_fails_is_not_paid_for_and_is_ordered_again_after_a_pause() -> None:
    saved = Saved(SaveInterval(seconds=60.0))
    saved.train(0.0)
    for _ in range(3):
        saved.save(takes_s=0.1)
        saved.until_due()
    saved.save(takes_s=30.0, fails=True)
    assert not saved.train(0.0)
    assert saved.cadence.verdict.reason == "1 failed in a row: 30 s more"
    assert saved.until_due() == pytest.approx(30.0, abs=0.5)
    saved.save(takes_s=0.1)
    assert saved.until_due() == pytest.approx(60.0, abs=0.5)


@pytest.mark.parametrize("takes_s", [0.0, 90.0])
def test_failures_do_not_follow_one_another_without_a_pause(takes_s: float) -> None:
    saved = Saved(SaveInterval(seconds=60.0))
    saved.train(0.0)
    saved.until_due()
    pauses = []
    for _ in range(1100 if not takes_s else 12):
        saved.save(takes_s, fails=True)
        pauses.append(saved.until_due())
    counted_s = max(takes_s, PAUSE_S)
    expected = [counted_s * factor for factor in (1, 2, 4, 8, 16, 20, 20)]
    assert pauses[:7] == pytest.approx(expected, abs=0.5)
    assert pauses[-1] == pytest.approx(COST_FACTOR * counted_s, abs=0.5)
    saved.save(takes_s=0.0)
    saved.until_due()
    saved.save(takes_s, fails=True)
    assert saved.until_due() == pytest.approx(counted_s, abs=0.5), "counted anew"


def test_two_at_once_may_end_in_any_order() -> None:
    for first, second in (("a", "b"), ("b", "a")):
        saved = Saved(SaveInterval(seconds=60.0))
        saved.train(0.0)
        saved.cadence.ordered("a")
        saved.clock.advance(2.0)
        saved.cadence.ordered("b")
        saved.clock.advance(1.0)
        saved.cadence.committed(first)
        assert not saved.cadence.verdict.due
        assert saved.cadence.took_s == (3.0 if first == "a" else 1.0)
        saved.cadence.committed(second)
        assert saved.until_due() == pytest.approx(59.0, abs=0.5)


def test_an_interval_in_seconds_that_saving_exceeds_is_logged_once() -> None:
    for every, told in ((SaveInterval(seconds=60.0), 1), (DEFAULT, 0), (SaveInterval(steps=1), 0)):
        saved = Saved(every)
        saved.train(0.0)
        remarks: list[str] = []
        for takes_s in (2.0, 12.0, 2.0, 15.0, 15.0):
            saved.save(takes_s)
            remarks += saved.cadence.take_remarks()
        assert len(remarks) == told
        assert not told or remarks[0] == (
            "checkpoint_every is 60 s, but checkpoints take 12.0 s: the next one comes 240 s after "
            "the last, so that they take at most 5% of the time"
        )


def test_one_that_was_under_way_when_the_generation_ended_does_not_count() -> None:
    saved = Saved(SaveInterval(seconds=60.0))
    saved.train(0.0)
    saved.train(60.0)
    saved.cadence.ordered("step-2")
    saved.cadence.given_up()
    assert saved.train(1.0), "shards that are lost every now and then do not put it off for ever"


def test_the_interval_is_what_was_asked_for_or_what_checkpoints_cost() -> None:
    saved = Saved(SaveInterval(seconds=60.0))
    assert saved.cadence.interval_s(steps_per_s=0.0) == 60.0
    saved.train(60.0)
    saved.save(takes_s=1.0)
    assert saved.cadence.interval_s(steps_per_s=5.0) == 60.0
    saved.train(60.0)
    saved.save(takes_s=40.0)
    saved.train(800.0)
    saved.save(takes_s=40.0)
    assert saved.cadence.interval_s(steps_per_s=5.0) == COST_FACTOR * 40.0


def test_an_interval_in_steps_takes_as_long_as_they_do() -> None:
    cadence = Saved(SaveInterval(steps=500)).cadence
    assert cadence.interval_s(steps_per_s=5.0) == 100.0
    assert cadence.interval_s(steps_per_s=0.0) is None
