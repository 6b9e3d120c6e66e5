"""Finished batches that the coordinator has not acknowledged yet, and the end of a worker."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from psrpc.core.batch import BatchId
from psrpc.core.errors import JobFailed
from psrpc.ops.exit_status import DONE, INTERRUPTED
from psrpc.v1 import coordinator_pb2 as pb
from psrpc.wire.commands import to_batch


@dataclass(frozen=True, slots=True)
class DoneBatch:
    """The outcome of one attempt; see the message ``BatchReport``."""

    batch: BatchId
    attempt: int
    loss: float
    staleness: int = 0
    skipped: bool = False
    too_stale: bool = False
    receipts: tuple[bytes, ...] = ()
    not_finite: str = ""

    def message(self) -> pb.BatchReport:
        """Returns the report as a protobuf message."""
        return pb.BatchReport(
            batch=to_batch(self.batch),
            attempt=self.attempt,
            loss=self.loss,
            staleness=self.staleness,
            skipped=self.skipped,
            too_stale=self.too_stale,
            receipts=self.receipts,
            not_finite=self.not_finite,
        )


class DoneBatches:
    """Holds each report until a call that carried it succeeds. Pure; not thread-safe."""

    def __init__(self) -> None:
        self._waiting: dict[int, DoneBatch] = {}

    def add(self, done: DoneBatch) -> None:
        """Queues ``done`` for the next call to the coordinator."""
        self._waiting[done.attempt] = done

    def pending(self) -> tuple[DoneBatch, ...]:
        """Returns unacknowledged reports, oldest first."""
        return tuple(self._waiting.values())

    def acknowledge(self, sent: Iterable[DoneBatch]) -> None:
        """Drops reports from :meth:`pending` that the coordinator has received."""
        for done in sent:
            # Another generation reuses attempt numbers, so compare identity.
            if self._waiting.get(done.attempt) is done:
                del self._waiting[done.attempt]

    def clear(self) -> None:
        """Drops all reports, which belong to an older generation."""
        self._waiting.clear()


class Stopped(Exception):
    """Ends a worker that was told to leave, by a signal or the end of the job; the text says which.
    Not an error. ``status`` is the exit status."""

    def __init__(self, why: str, status: int = DONE) -> None:
        super().__init__(why)
        self.status = status


def raise_shutdown(shutdown: pb.Shutdown) -> None:
    """Raises the exception that corresponds to the job's end.

    Raises:
        JobFailed: with the job's reason.
        Stopped: the job is done, or was stopped.
    """
    if shutdown.failed:
        raise JobFailed(shutdown.reason)
    if shutdown.reason:
        raise Stopped(f"the job was {shutdown.reason}", INTERRUPTED)
    raise Stopped("the job is done")


def batch_totals(batch: BatchId, loss: float, metrics: Sequence[float]) -> tuple[float, ...]:
    """Returns what ``batch``, whose gradient is finite, adds to its epoch's totals; empty if any of
    it is not finite."""
    totals = (loss * batch.count, float(batch.count), *metrics)
    return totals if all(map(math.isfinite, totals)) else ()
