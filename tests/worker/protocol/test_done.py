from __future__ import annotations

from psrpc.core.batch import BatchId
from worker.protocol.done import DoneBatch, DoneBatches


def make(attempt: int) -> DoneBatch:
    return DoneBatch(BatchId(1, 10 * attempt, 10), attempt, 0.5, staleness=2, skipped=True)


def test_a_report_stays_until_a_call_that_carried_it_succeeded() -> None:
    reports = DoneBatches()
    one, two = make(1), make(2)
    reports.add(one)
    sent = reports.pending()
    reports.add(two)
    assert reports.pending() == (one, two)
    reports.acknowledge(sent)
    reports.acknowledge(sent)
    assert reports.pending() == (two,)
    reports.clear()
    assert reports.pending() == ()


def test_an_answer_to_reports_of_an_older_generation_leaves_the_newer_alone() -> None:
    reports = DoneBatches()
    reports.add(make(1))
    sent = reports.pending()
    reports.clear()
    again = make(1)
    reports.add(again)
    reports.acknowledge(sent)
    assert reports.pending() == (again,)


def test_a_report_travels_whole() -> None:
    message = make(3).message()
    assert (message.batch.epoch, message.batch.first, message.batch.count) == (1, 30, 10)
    assert (message.attempt, message.loss, message.staleness) == (3, 0.5, 2)
    assert message.skipped
