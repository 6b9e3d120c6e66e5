"""Batches that are done and not yet acknowledged by the coordinator."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from psrpc.core.batch import BatchId
from psrpc.core.errors import JobFailed
from psrpc.core.exit_status import DONE, INTERRUPTED
from psrpc.v1 import coordinator_pb2, types_pb2
from psrpc.v1 import coordinator_pb2 as pb


@dataclass(frozen=True, slots=True)
class DoneBatch:
    """The fate of one attempt; see the message ``BatchReport``."""

    batch: BatchId
    attempt: int
    loss: float
    staleness: int = 0
    skipped: bool = False
    too_stale: bool = False
    receipts: tuple[bytes, ...] = ()
    not_finite: str = ""

    def message(self) -> coordinator_pb2.BatchReport:
        """As it travels."""
        return coordinator_pb2.BatchReport(
            batch=types_pb2.BatchId(
                epoch=self.batch.epoch, first=self.batch.first, count=self.batch.count
            ),
            attempt=self.attempt,
            loss=self.loss,
            staleness=self.staleness,
            skipped=self.skipped,
            too_stale=self.too_stale,
            receipts=self.receipts,
            not_finite=self.not_finite,
        )


class DoneBatches:
    """Holds each report until a call that carried it has succeeded. Pure; not thread-safe."""

    def __init__(self) -> None:
        self._waiting: dict[int, DoneBatch] = {}

    def add(self, done: DoneBatch) -> None:
        """``done`` goes with the next call to the coordinator."""
        self._waiting[done.attempt] = done

    def pending(self) -> tuple[DoneBatch, ...]:
        """What has not been acknowledged yet, oldest first; it stays until it is."""
        return tuple(self._waiting.values())

    def acknowledge(self, sent: Iterable[DoneBatch]) -> None:
        """The coordinator has these, as :meth:`pending` gave them."""
        for done in sent:
            # Another generation counts attempts anew; its reports are others.
            if self._waiting.get(done.attempt) is done:
                del self._waiting[done.attempt]

    def clear(self) -> None:
        """Forgets all: they belong to an older generation."""
        self._waiting.clear()


class Stopped(Exception):
    """This worker was told to leave (a signal, or the job has ended), which its text says; not an
    error. ``status`` is the exit status."""

    def __init__(self, why: str, status: int = DONE) -> None:
        super().__init__(why)
        self.status = status


def raise_shutdown(shutdown: pb.Shutdown) -> None:
    """Ends this worker as the job has ended.

    Raises:
        JobFailed: with the job's reason.
        Stopped: the job is done, or was stopped.
    """
    if shutdown.failed:
        raise JobFailed(shutdown.reason)
    if shutdown.reason:
        raise Stopped(f"the job was {shutdown.reason}", INTERRUPTED)
    raise Stopped("the job is done")
