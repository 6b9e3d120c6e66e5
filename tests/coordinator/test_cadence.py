"""When the next checkpoint is due, by steps, by time and by what checkpoints cost."""

from __future__ import annotations

from random import Random

import pytest

from coordinator.cadence import COST_FACTOR, Cadence
from psrpc.checkpoint_every import SaveInterval, read_checkpoint_every
from psrpc.clock import ManualClock

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

    def save(self, takes_s: float) -> None:
        name = f"step-{self.step}"
        self.cadence.ordered(name)
        self.clock.advance(takes_s)
        assert not self.cadence.verdict.due, "one is under way"
        self.cadence.finished(name)


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
def test_a_checkpoint_that_takes_long_puts_off_the_next_one(every: SaveInterval) -> None:
    saved = Saved(every)
    saved.train(0.0)
    saved.save(takes_s=10.0)
    assert not saved.train(COST_FACTOR * 10.0 - 10.1, 5000)
    assert saved.cadence.verdict.reason == "the last one took 10.0 s: 200 s"
    assert saved.train(0.2)


@pytest.mark.parametrize("every", [DEFAULT, SaveInterval(seconds=1.0)])
def test_checkpoints_take_a_bounded_part_of_the_time(every: SaveInterval) -> None:
    for seed in range(20):
        random, saved, spent_s, last_s = Random(seed), Saved(every), 0.0, 0.0
        for _ in range(2000):
            if saved.train(random.uniform(0.0, 3.0), random.randint(0, 300)):
                last_s = random.choice((0.01, 0.5, 4.0, 20.0)) * random.random()
                saved.save(last_s)
                spent_s += last_s
        # The last one is yet to be paid for.
        assert 0.0 < spent_s - last_s <= saved.clock.now() / COST_FACTOR


def test_what_time_cannot_keep_is_told_once_and_only_to_those_who_asked_for_it() -> None:
    for every, told in ((SaveInterval(seconds=60.0), 1), (DEFAULT, 0), (SaveInterval(steps=1), 0)):
        saved = Saved(every)
        saved.train(0.0)
        remarks: list[str] = []
        for takes_s in (3.0, 12.0, 15.0):
            saved.save(takes_s)
            remarks += saved.cadence.take_remarks()
        assert len(remarks) == told
        assert not told or remarks[0] == (
            "checkpoint_every is 60 s, but the last checkpoint took 12.0 s: the next one comes "
            "240 s after it, so that they take at most 5% of the time"
        )


def test_one_that_was_under_way_when_the_generation_ended_does_not_count() -> None:
    saved = Saved(SaveInterval(seconds=60.0))
    saved.train(0.0)
    saved.train(60.0)
    saved.cadence.ordered("step-2")
    saved.cadence.given_up()
    assert saved.train(1.0), "shards that are lost every now and then do not put it off for ever"
