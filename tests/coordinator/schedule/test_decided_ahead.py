"""Rounds that are decided ahead: when and for whom, and how they are leased and reported."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest

from coordinator.core.work import Report, Round, RoundsLease, Wait
from coordinator.schedule.decided_ahead import MOST_ATTEMPTS, DecidedAhead
from coordinator.schedule.micro_batch import Tally
from coordinator.schedule.open_batches import OpenBatches
from coordinator.schedule.rounds import Rounds
from psrpc.core.commands import Attempt, RoundsAhead
from psrpc.core.errors import InvalidArgument
from psrpc.core.policy import Policy
from tests.coordinator.hand_rounds import close, commit, lease, make

SHORT_S = 0.01


def begun(
    took_s: float = SHORT_S, workers: Sequence[str] = ("v", "w"), **changes: object
) -> Rounds:
    """Round 1 is open and leased, and round 0 took that long; ``workers`` do both alike."""
    rounds = make(**{"records": 80, "replicas": len(workers), **changes})  # type: ignore[arg-type]
    for worker in workers:
        rounds.ahead.crew.asks(worker, able=True)
    first = [(worker, lease(rounds, worker)) for worker in workers]
    assert rounds.look_ahead(None, {}, 0.0) is None, "no round has been timed"
    for worker, work in first:
        commit(rounds, worker, work, took_s)
    close(rounds)
    for worker in workers:
        lease(rounds, worker, took_s)
    return rounds


def numbers(ahead: RoundsAhead | None) -> list[int]:
    return [] if ahead is None else [decision.round for decision in ahead.decisions]


def look(rounds: Rounds, before: int | None = None, now: float = SHORT_S) -> list[int]:
    return numbers(rounds.look_ahead(before, {}, now))


def ahead_of(rounds: Rounds, worker: str, received: int = 0) -> list[tuple[int, Attempt]]:
    work = rounds.lease(worker, SHORT_S, received, 2)
    if isinstance(work, Wait):
        return []
    assert isinstance(work, RoundsLease)
    return list(work.attempts)


def finish_open(rounds: Rounds) -> None:
    """The open round, an ordinary one, is done and closed."""
    for worker in ("v", "w"):
        commit(rounds, worker, lease(rounds, worker, SHORT_S), SHORT_S)
    close(rounds)


def reported(attempt: Attempt) -> Report:
    return Report(attempt.batch, attempt.number, 1.0)


def is_complete(rounds: Rounds) -> bool:
    return rounds.complete


def close_ahead(rounds: Rounds) -> None:
    assert rounds.ahead.opened is not None
    rounds.close(rounds.ahead.opened.decision)


# -- which rounds ----------------------------------------------------------------------------


def test_short_rounds_are_decided_ahead_with_the_next_batches_and_new_attempts() -> None:
    rounds = begun()
    decided = rounds.look_ahead(None, {}, SHORT_S)
    assert decided is not None
    assert numbers(decided) == [2, 3]
    assert {decision.generation for decision in decided.decisions} == {1}
    attempts = [a for decision in decided.decisions for a in decision.attempts]
    assert [a.batch.first for a in attempts] == [8, 10, 12, 14]
    assert [a.number for a in attempts] == [5, 6, 7, 8]
    assert rounds.ahead.decisions == decided
    assert not rounds.idle


def test_long_rounds_are_not() -> None:
    assert look(begun(took_s=2.1), now=2.1) == []


def test_rounds_in_which_a_worker_could_help_another_are_not_either_if_they_are_long() -> None:
    shared = begun(took_s=0.4, workers=("v", "w"), replicas=2)
    assert look(shared, now=0.4) == [2, 3]
    shared = begun(took_s=0.4, workers=("v", "w"), replicas=2)
    shared.revoke("w")
    shared.release("w")
    lease(shared, "v", 0.4)
    assert shared.ahead.crew.names == ["v"]
    assert look(shared, now=0.4) == []


@pytest.mark.parametrize(
    ("exact", "took_s", "expected"), [(True, 0.4, 0), (False, 0.4, 2), (False, 2.1, 0)]
)
def test_but_two_are_at_a_time_where_workers_sum_their_gradients(
    exact: bool, took_s: float, expected: int
) -> None:
    """The fewer bytes count for more than help."""
    ahead = DecidedAhead(Policy(mode="sync", replicas=4), 1, exact=exact)
    ahead.crew.asks("w", able=True)
    ahead.crew.worked("w")
    ahead.room(100, 0.0)
    ahead.closed()
    assert ahead.room(100, took_s) == expected


@pytest.mark.parametrize(
    ("exact", "replicas", "summed"), [(False, 4, 1), (False, 2, 0), (True, 4, 0)]
)
def test_rounds_with_sums_are_counted_once_they_are_closed(
    exact: bool, replicas: int, summed: int
) -> None:
    """Not the first one, which is not decided ahead, nor one in which each worker has one."""
    tally = Tally()
    rounds = make(records=80, replicas=replicas, exact=exact, tally=tally)
    for worker in ("v", "w"):
        rounds.ahead.crew.asks(worker, able=True)
    assert look(rounds, now=0.0) == []
    for worker in ("v", "w") * (replicas // 2):
        commit(rounds, worker, lease(rounds, worker), SHORT_S)
    close(rounds)
    assert look(rounds)[:2] == [1, 2]
    for worker in ("v", "w"):
        attempts = [attempt for number, attempt in ahead_of(rounds, worker) if number == 1]
        rounds.report(worker, [reported(attempt) for attempt in attempts], SHORT_S)
    assert tally.summed == 0
    close_ahead(rounds)
    assert tally.summed == summed


def test_no_more_are_decided_than_half_a_second_takes() -> None:
    rounds = begun(took_s=0.1)
    while look(rounds, now=0.1):
        pass
    assert len(rounds.ahead.decisions.decisions) <= 2 * 5


def test_no_more_are_decided_at_once_than_a_message_holds() -> None:
    policy = Policy(mode="sync", replicas=MOST_ATTEMPTS // 3)
    ahead = DecidedAhead(policy, 1)
    ahead.crew.asks("w", able=True)
    ahead.crew.worked("w")
    assert ahead.room(10**6, 0.0) == 0
    for _ in range(8):
        ahead.closed()
    assert [ahead.room(10**6, SHORT_S) for _ in range(3)] == [2, 3, 3]


@pytest.mark.parametrize(("of_epoch", "expected"), [(3, []), (4, [2]), (5, [2, 3])])
def test_the_last_round_of_an_epoch_is_not(of_epoch: int, expected: list[int]) -> None:
    """Its decision may order a snapshot, and says which batches end the epoch."""
    rounds = begun(records=4 * of_epoch, epochs=2)
    assert look(rounds) == expected
    assert look(rounds) == []


def test_a_last_round_with_fewer_batches_is_not_either() -> None:
    assert look(begun(records=4 * 3 + 2)) == [2]


@pytest.mark.parametrize(("before", "expected"), [(2, []), (3, [2]), (4, [2, 3]), (9, [2, 3])])
def test_the_round_that_orders_a_checkpoint_is_not(before: int, expected: list[int]) -> None:
    assert look(begun(), before) == expected


@pytest.mark.parametrize(
    "policy",
    [
        {"replicas": 3, "aggregate": 2},
        {"replicas": 2, "balance": True},
        {"replicas": 2, "speculate": True},
    ],
)
def test_rounds_that_take_the_first_to_commit_are_not(policy: dict[str, object]) -> None:
    given = {"records": 80, **policy}
    rounds = make(**given)  # type: ignore[arg-type]
    for worker in ("v", "w"):
        rounds.ahead.crew.asks(worker, able=True)
        rounds.ahead.crew.worked(worker)
    assert rounds.ahead.room(40, 0.0) == 0
    rounds.ahead.closed()
    assert rounds.ahead.room(40, SHORT_S) == 0
    plain = begun()
    assert plain.ahead.room(40, SHORT_S) == 2


def test_while_a_worker_that_asks_cannot_compute_them_none_is() -> None:
    rounds = begun()
    rounds.ahead.crew.asks("older", able=False)
    assert look(rounds) == []
    rounds.revoke("older")
    assert look(rounds)[:2] == [2, 3]


def test_a_worker_that_is_needed_and_may_still_compile_is_waited_for() -> None:
    rounds = begun()
    rounds.revoke("w")
    rounds.ahead.crew.asks("new", able=True)
    assert look(rounds) == []
    rounds.ahead.crew.worked("new")
    assert rounds.ahead.crew.names == ["new", "v"]


def test_a_worker_beyond_those_needed_that_has_not_worked_gets_none() -> None:
    rounds = begun()
    rounds.ahead.crew.asks("new", able=True)
    assert look(rounds) == [2, 3]
    assert rounds.ahead.held_by(["new", "v", "w"]) == ["v", "w"]


def test_none_is_while_the_open_round_has_work_or_drains() -> None:
    rounds = begun()
    finish_open(rounds)
    lease(rounds, "v", SHORT_S)
    assert look(rounds) == [], "any worker may still take a part of it"
    rounds = begun()
    rounds.drain()
    assert look(rounds) == []


def test_none_is_behind_a_round_of_which_a_worker_that_left_had_a_part() -> None:
    """Its part will be open, and those that wait for a later round could not take it."""
    rounds = begun()
    commit(rounds, "v", lease(rounds, "v", SHORT_S), SHORT_S)
    rounds.revoke("w")
    assert rounds.ahead.crew.names == ["v"]
    assert look(rounds) == []
    rounds.release("w")
    assert look(rounds) == []
    assert lease(rounds, "v", SHORT_S).round == 1


def test_a_worker_that_is_stuck_in_the_round_before_them_is_given_up() -> None:
    rounds = begun()
    assert rounds.hand_over({"w"}) == []
    look(rounds)
    assert rounds.hand_over({"w"}) == ["w"]


def test_the_open_round_is_decided_with_them_if_no_worker_has_begun_it() -> None:
    rounds = begun()
    finish_open(rounds)
    assert look(rounds) == [2, 3]
    assert rounds.ahead.opened is not None
    assert rounds.ahead.opened.number == 2
    assert [number for number, _ in ahead_of(rounds, "v")] == [2, 3]


# -- for whom --------------------------------------------------------------------------------


def test_rounds_are_divided_by_speed() -> None:
    ahead = DecidedAhead(Policy(mode="sync", replicas=4), 1)
    for worker in ("v", "w"):
        ahead.crew.asks(worker, able=True)
        ahead.crew.worked(worker)
    todo = OpenBatches(records=10**4, batch_size=1, epochs=1, done={})
    ahead.decide(8, 1, (), todo, 1, {"v": 3.0, "w": 1.0}, 0.0)
    micros = [micro for one in ahead for micro in one.micros]
    held = Counter(held.worker for micro in micros for held in micro.attempts.values())
    assert held == {"v": 24, "w": 8}


# -- leases ----------------------------------------------------------------------------------


def test_the_open_round_comes_first() -> None:
    rounds = begun()
    look(rounds)
    held = rounds.lease("v", SHORT_S, 0, 2)
    assert isinstance(held, Round)
    assert held.round == 1
    commit(rounds, "v", held, SHORT_S)
    assert [number for number, _ in ahead_of(rounds, "v")] == [2, 3]
    # The open round needs another worker.
    rounds.revoke("w")
    rounds.release("w")
    freed = rounds.lease("v", SHORT_S, 0, 2)
    assert isinstance(freed, Round)
    assert freed.round == 1


def test_all_attempts_of_a_worker_come_at_once_and_only_those_that_it_has_not_received() -> None:
    rounds = begun()
    look(rounds)
    finish_open(rounds)
    first = ahead_of(rounds, "v")
    assert [number for number, _ in first] == [2, 3]
    assert ahead_of(rounds, "v") == first, "that answer was lost"
    received = first[-1][1].number
    assert ahead_of(rounds, "v", received) == []
    assert ahead_of(rounds, "v", first[0][1].number) == first[1:]
    look(rounds)
    more = ahead_of(rounds, "v", received)
    assert more
    assert min(number for number, _ in more) == 4
    assert ahead_of(rounds, "v", 0) == [*first, *more]
    assert not {a for _, a in ahead_of(rounds, "w")} & {a for _, a in [*first, *more]}


def test_a_worker_without_a_part_of_them_hears_whom_the_round_waits_for() -> None:
    rounds = begun()
    look(rounds)
    finish_open(rounds)
    assert rounds.lease("x", SHORT_S, 0, 3) == Wait(
        "v, w to finish round 2 (0 of 2 micro-batches done)"
    )


# -- reports ---------------------------------------------------------------------------------


def under_way() -> tuple[Rounds, dict[str, list[Attempt]]]:
    """Rounds 2 and 3 are decided ahead, and 2 is open."""
    rounds = begun()
    look(rounds)
    finish_open(rounds)
    return rounds, {worker: [a for _, a in ahead_of(rounds, worker)] for worker in ("v", "w")}


def test_reports_of_several_rounds_complete_them_in_order() -> None:
    rounds, held = under_way()
    counted = rounds.report("v", [reported(a) for a in reversed(held["v"])], SHORT_S)
    assert [(r.batch, r.attempt) for r in counted] == [
        (a.batch, a.number) for a in reversed(held["v"])
    ]
    assert not is_complete(rounds)
    # The later one comes first, as after a report that was lost.
    rounds.report("w", [reported(held["w"][1])], SHORT_S)
    assert not is_complete(rounds)
    rounds.report("w", [reported(held["w"][0])], SHORT_S)
    for number in (2, 3):
        assert rounds.round == number
        assert is_complete(rounds)
        assert [r.staleness for r in rounds.reports()] == [0, 0]
        close_ahead(rounds)
    assert (rounds.round, rounds.span.batches, rounds.span.examples) == (4, 8, 16)
    assert not rounds.ahead
    assert isinstance(rounds.lease("v", SHORT_S, 10**6, 2), Round)


def test_a_report_counts_once_and_only_from_its_worker() -> None:
    rounds, held = under_way()
    mine, others = reported(held["v"][0]), reported(held["w"][0])
    assert rounds.report("v", [others], SHORT_S) == []
    assert rounds.report("v", [Report(mine.batch, mine.attempt + 1, 1.0)], SHORT_S) == []
    assert len(rounds.report("v", [mine, mine], SHORT_S)) == 1
    assert rounds.report("v", [mine], SHORT_S) == []
    assert rounds.span.examples == 4 + 4 + 2
    rounds.report("w", [others], SHORT_S)
    close_ahead(rounds)
    assert rounds.report("v", [mine], SHORT_S) == [], "its round is over"


def test_a_skipped_batch_is_no_example() -> None:
    rounds, held = under_way()
    attempt = held["v"][0]
    skipped = Report(attempt.batch, attempt.number, 1.0, skipped=True)
    [counted] = rounds.report("v", [skipped], SHORT_S)
    assert counted.skipped
    assert rounds.span.examples == 4 + 4


def test_such_an_attempt_is_not_committed_by_itself() -> None:
    rounds, held = under_way()
    with pytest.raises(InvalidArgument, match="no such attempt was handed out"):
        rounds.commit("v", 2, reported(held["v"][0]), SHORT_S)


def test_reported_batches_are_leased_no_more_and_delay_no_worker() -> None:
    rounds, held = under_way()
    rounds.report("v", [reported(held["v"][0])], SHORT_S)
    assert [a for _, a in ahead_of(rounds, "v")] == held["v"][1:]
    assert rounds.holds("v")
    rounds.report("v", [reported(held["v"][1])], SHORT_S)
    assert not rounds.holds("v")
    assert rounds.ahead.held_by(["v", "w"]) == ["w"]


def test_a_worker_that_is_stuck_with_one_is_given_up_at_once() -> None:
    """No other attempt can count."""
    rounds, _ = under_way()
    assert rounds.hand_over(["v"]) == ["v"]
    assert rounds.hand_over(["x"]) == []
