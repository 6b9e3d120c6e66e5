"""Rounds driven by hand: leased, committed and closed in one call each."""

from __future__ import annotations

from coordinator.core.work import Report, Round, Wait
from coordinator.schedule.micro_batch import Tally
from coordinator.schedule.rounds import Rounds
from psrpc.core.commands import Decision
from psrpc.core.intervals import IntervalSet
from psrpc.core.policy import Policy


def make(
    *,
    records: int = 12,
    batch_size: int = 2,
    epochs: int = 1,
    tally: Tally | None = None,
    until_epoch: int | None = None,
    done: dict[int, IntervalSet] | None = None,
    first_round: int = 0,
    exact: bool = True,
    **policy: object,
) -> Rounds:
    return Rounds(
        records=records,
        batch_size=batch_size,
        epochs=epochs,
        policy=Policy(mode="sync", **{"replicas": 3, **policy}),  # type: ignore[arg-type]
        generation=1,
        done=done,
        first_round=first_round,
        until_epoch=until_epoch,
        tally=tally,
        exact=exact,
    )


MANY = 64
"""Workers, so many that none gets a second micro-batch ahead."""


def lease(rounds: Rounds, worker: str, now: float = 0.0, workers: int = MANY) -> Round:
    work = rounds.lease(worker, now, 0, workers)
    assert isinstance(work, Round)
    return work


def wait(rounds: Rounds, worker: str, now: float = 0.0) -> Wait:
    work = rounds.lease(worker, now, 0, MANY)
    assert isinstance(work, Wait)
    return work


def done(work: Round, loss: float = 1.0, skipped: bool = False) -> Report:
    return Report(work.attempt.batch, work.attempt.number, loss, 0, skipped)


def commit(rounds: Rounds, worker: str, work: Round, now: float = 0.0) -> Report | None:
    return rounds.commit(worker, work.round, done(work), now)


def close(rounds: Rounds) -> Decision:
    decision = rounds.decide()
    rounds.close(decision)
    return decision


def firsts(decision: Decision) -> list[int]:
    return [attempt.batch.first for attempt in decision.attempts]


def play(rounds: Rounds, worker: str = "w") -> Decision:
    """One worker does the rest of the round."""
    while not rounds.complete:
        commit(rounds, worker, lease(rounds, worker))
    return close(rounds)
