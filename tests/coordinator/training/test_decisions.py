"""Rounds decided ahead of their gradients: stored, sent, leased, reported and closed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from coordinator.core.work import Report, Round, RoundsLease, TrainingWork, Wait
from coordinator.training.training import Training
from psrpc.core.commands import Attempt, Command, Decision, RoundsAhead, SnapshotOrder
from tests.coordinator.sync_job import refuse
from tests.coordinator.training_run import TrainingRun, training_run

SHORT_S = 0.01
NOT_STORED = Wait("the decisions of the next rounds to be stored")


class Workers:
    """Two workers, v and w, of a job with rounds of two batches: the first is over, they hold the
    second, and from now on they can compute rounds that are decided ahead."""

    def __init__(self, parts: TrainingRun, training: Training) -> None:
        self.parts = parts
        self.training = training
        self.now = 0.0
        self.able = False
        first = {worker: self.round(worker) for worker in ("v", "w")}
        self.round("v")  # rounds are timed from here on
        self.now = SHORT_S
        for worker, work in first.items():
            self.commit(worker, work)
        self.held = {worker: self.round(worker) for worker in ("v", "w")}
        self.parts.sent.clear()
        self.able = True
        assert training.rounds is not None
        for worker in self.held:
            training.rounds.ahead.crew.asks(worker, able=True)

    def look_ahead(self) -> None:
        """A worker asks again, at which rounds can be decided ahead."""
        assert self.round("v").round == 1
        assert self.decided == [2, 3]

    def lease(self, worker: str, received: int = 0) -> TrainingWork:
        return self.training.lease(worker, self.now, received, 2, self.able)

    def round(self, worker: str) -> Round:
        work = self.lease(worker)
        assert isinstance(work, Round)
        return work

    def ahead(self, worker: str, received: int = 0) -> list[Attempt]:
        work = self.lease(worker, received)
        assert isinstance(work, RoundsLease), work
        return [attempt for _, attempt in work.attempts]

    def commit(self, worker: str, work: Round) -> None:
        report = Report(work.attempt.batch, work.attempt.number, 1.0)
        self.training.commit(worker, work.round, report, self.now)

    def report(self, worker: str, *attempts: Attempt) -> None:
        reports = [Report(attempt.batch, attempt.number, 1.0) for attempt in attempts]
        self.training.record(worker, reports, self.now)

    def finish_round(self) -> None:
        """Both do their parts of the open round, an ordinary one, and ask again before the last
        commit."""
        held = {worker: self.round(worker) for worker in ("v", "w")}
        self.commit("v", held["v"])
        self.lease("v")
        self.commit("w", held["w"])

    @property
    def decided(self) -> list[int]:
        """The rounds of the commands that decide some ahead."""
        told = [c for c in self.parts.sent if isinstance(c, RoundsAhead)]
        return [decision.round for command in told for decision in command.decisions]


JOB: dict[str, Any] = {
    "mode": "sync",
    "replicas": 2,
    "epochs": 2,
    "train_records": 96,
    "total_updates": 24,
}


@pytest.fixture
def workers(tmp_path: Path) -> Iterator[Workers]:
    with training_run(tmp_path, **JOB) as parts:
        yield Workers(parts, parts.begin())


def test_rounds_are_stored_before_they_are_sent(workers: Workers) -> None:
    parts, found = workers.parts, list[Decision | None]()

    def look(command: Command) -> None:
        if isinstance(command, RoundsAhead):
            found.extend(parts.store.decision_ahead(1, d.round) for d in command.decisions)
        parts.sent.append(command)

    parts.on_send = look
    workers.look_ahead()
    [told] = [c for c in parts.sent if isinstance(c, RoundsAhead)]
    assert found == list(told.decisions)
    # Nothing is known of an ordinary decision of theirs.
    assert parts.store.last_decision(1) is not None
    assert [c for c in workers.training.missed(0) if isinstance(c, RoundsAhead)] == [told]


def test_of_rounds_that_the_disk_refuses_nothing_is_leased_and_they_are_stored_again(
    workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts, training = workers.parts, workers.training
    with monkeypatch.context() as full:
        full.setattr(parts.store, "put_ahead", refuse)
        assert workers.lease("w") == NOT_STORED
        assert workers.lease("v") == NOT_STORED
        assert not training.idle
        assert workers.decided == []
        assert [c for c in training.missed(0) if isinstance(c, RoundsAhead)] == []
        training.retry(workers.now)
        assert workers.decided == []
        assert "round 2 waits: its decision cannot be stored" in parts.warnings.kept[0]
    training.retry(workers.now)
    assert workers.decided == [2, 3]
    assert workers.round("v").round == 1
    assert [c for c in training.missed(0) if isinstance(c, RoundsAhead)]


def test_a_shard_misses_only_rounds_that_are_stored(
    workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = workers.training
    workers.look_ahead()
    monkeypatch.setattr(workers.parts.store, "put_ahead", refuse)
    assert workers.lease("v") == NOT_STORED
    rounds = training.rounds
    assert rounds is not None
    assert len(rounds.ahead.decisions.decisions) > 2
    [missed] = [c for c in training.missed(0) if isinstance(c, RoundsAhead)]
    assert [decision.round for decision in missed.decisions] == [2, 3]


def test_an_ordinary_decision_is_not_stored_before_those_ahead_of_it(
    workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A shard that has applied the ordinary one may be about to apply the others."""
    parts, training = workers.parts, workers.training
    with monkeypatch.context() as full:
        full.setattr(parts.store, "put_ahead", refuse)
        assert workers.lease("v") == NOT_STORED
        for worker, work in workers.held.items():
            workers.commit(worker, work)
        last = parts.store.last_decision(1)
        assert last is not None
        assert last.round == 0
        assert not [c for c in parts.sent if isinstance(c, Decision)]
    training.retry(workers.now)
    workers.report("v")
    last = parts.store.last_decision(1)
    assert last is not None
    assert last.round == 1
    order = [
        c.round if isinstance(c, Decision) else "ahead"
        for c in parts.sent
        if isinstance(c, Decision | RoundsAhead)
    ]
    assert order == ["ahead", 1]


def test_rounds_that_are_reported_out_of_order_are_closed_in_order(workers: Workers) -> None:
    parts, training = workers.parts, workers.training
    workers.look_ahead()
    workers.finish_round()
    ahead = {worker: workers.ahead(worker) for worker in ("v", "w")}
    parts.sent.clear()
    assert training.span.step == 2
    workers.report("v", *reversed(ahead["v"]))
    workers.report("w", *ahead["w"][1:])
    assert training.span.step == 2
    workers.report("w", ahead["w"][0])
    assert training.span.step == 2 + len(ahead["v"])
    assert training.progress.failed == 0
    # Shards have applied them by themselves.
    assert [c for c in parts.sent if isinstance(c, Decision)] == []
    assert training.span.examples == 4 * 2 * training.span.step


def test_nothing_is_decided_while_a_worker_that_left_is_part_of_rounds_ahead(
    workers: Workers,
) -> None:
    parts, training = workers.parts, workers.training
    workers.look_ahead()
    workers.finish_round()
    mine, others = workers.ahead("v"), workers.ahead("w")
    parts.sent.clear()
    assert training.hold("v")
    training.revoke("v", lost=True)
    assert workers.lease("w") == Wait("another generation to begin")
    workers.report("w", *others)
    workers.report("v", *mine)
    training.retry(workers.now)
    training.order_due()
    assert training.span.step == 2
    assert parts.sent == []
    assert not [c for c in training.missed(0) if isinstance(c, RoundsAhead)]


def test_a_worker_without_a_part_in_them_may_leave(workers: Workers) -> None:
    workers.look_ahead()
    assert not workers.training.hold("x")
    workers.finish_round()
    assert workers.ahead("v")


def test_another_generation_forgets_what_was_decided_ahead(
    workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as full:
        full.setattr(workers.parts.store, "put_ahead", refuse)
        assert workers.lease("v") == NOT_STORED
    assert workers.training.hold("v")
    workers.parts.sent.clear()
    training = workers.parts.begin(version=2, generation=2)
    training.retry(workers.now)
    assert workers.parts.sent == []
    assert not [c for c in training.missed(0) if isinstance(c, RoundsAhead)]
    assert isinstance(workers.lease("v"), Round)


def test_the_last_round_of_an_epoch_orders_its_snapshot(tmp_path: Path) -> None:
    job = {**JOB, "train_records": 40, "total_updates": 10, "eval_records": 8}
    with training_run(tmp_path, **job) as parts:
        workers = Workers(parts, parts.begin())
        parts.training.order_due()
        workers.look_ahead()
        workers.finish_round()
        assert workers.decided == [2, 3]
        for worker in ("v", "w"):
            workers.report(worker, *workers.ahead(worker))
        workers.finish_round()
        [last] = [c for c in parts.sent if isinstance(c, Decision) and c.round == 4]
        assert [order.name for order in last.snapshots] == ["epoch-1"]


def test_a_round_before_a_checkpoint_is_decided_with_its_order(tmp_path: Path) -> None:
    with training_run(tmp_path, **JOB, checkpoint_every=4) as parts:
        workers = Workers(parts, parts.begin())
        workers.finish_round()
        assert workers.decided == [2]
        for worker in ("v", "w"):
            workers.report(worker, *workers.ahead(worker))
        workers.finish_round()
        [third] = [c for c in parts.sent if isinstance(c, Decision) and c.round == 3]
        [order] = third.snapshots
        assert isinstance(order, SnapshotOrder)
        assert order.name == "step-00000004"
