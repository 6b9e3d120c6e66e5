from __future__ import annotations

from psrpc.batch import BatchId
from worker.done import DoneBatch, DoneBatches


def make(attempt: int) -> DoneBatch:
    return DoneBatch(BatchId(1, 10 * attempt, 10), attempt, 0.5, staleness=2, skipped=True)


def test_a_report_stays_until_a_call_that_carried_it_succeeded() -> None:
    reports = DoneBatches()
    reports.add(make(1))
    sent = reports.pending()
    reports.add(make(2))
    assert reports.pending() == [make(1), make(2)]
    reports.acknowledge(sent)
    reports.acknowledge(sent)
    assert reports.pending() == [make(2)]
    reports.clear()
    assert reports.pending() == []


def test_a_report_travels_whole() -> None:
    message = make(3).message()
    assert (message.batch.epoch, message.batch.first, message.batch.count) == (1, 30, 10)
    assert (message.attempt, message.loss, message.staleness) == (3, 0.5, 2)
    assert message.skipped
