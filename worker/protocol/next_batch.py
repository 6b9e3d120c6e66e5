"""Which micro-batch comes next, before the coordinator has said it."""

from __future__ import annotations

from psrpc.core.batch import BatchId


class NextBatch:
    """Guesses which micro-batch this worker gets next: as far from this one as this one is from
    the last. Right for one worker, and for several that go at one pace. Pure.

    A guess costs reading a batch, so after a wrong one nothing is guessed until a guess would
    have been right.
    """

    def __init__(self) -> None:
        self._last: BatchId | None = None
        self._guess: BatchId | None = None

    def after(self, batch: BatchId) -> BatchId | None:
        """The batch to prepare while ``batch`` is worked on, or None."""
        trusted = batch == self._guess
        last, self._last = self._last, batch
        self._guess = None
        if last is not None and last.epoch == batch.epoch and batch.first > last.first:
            self._guess = BatchId(batch.epoch, 2 * batch.first - last.first, batch.count)
        return self._guess if trusted else None
