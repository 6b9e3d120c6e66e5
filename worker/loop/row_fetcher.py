"""When a worker receives the rows of embedding tables that its batches need."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType

from psrpc.core.batch import BatchId
from psrpc.ops.threads import THREADS, Threads
from worker.embedding.row_sets import ReceivedRows
from worker.loop.router import Router
from worker.step.gradient_source import GradientSource


class RowFetcher:
    """Rows for the batches of one generation. One thread uses it.

    Where the ids of the next batch are known by the time that something is exchanged with the
    shards anyway, its rows come with that: they are :meth:`ahead`. Otherwise an exchange of their
    own brings them, when the batch is computed. Without tables nothing is done.
    """

    def __init__(
        self,
        source: GradientSource,
        shards: Router,
        *,
        tables: bool,
        prefetch: bool,
        threads: Threads = THREADS,
    ) -> None:
        """``prefetch``: receive the rows of the next batch while one is computed."""
        self._source = source
        self._shards = shards
        self._tables = tables
        self._kept: tuple[BatchId, ReceivedRows] | None = None
        self._pool = threads.pool(1, "rows") if tables and prefetch else None

    def __enter__(self) -> RowFetcher:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._pool is not None:
            self._pool.shutdown()

    def drop(self) -> None:
        """Rows that have come are of no use any more: newer ones are to be had."""
        self._kept = None

    def ahead(self, batch: BatchId | None) -> ReceivedRows | None:
        """Where to receive the rows of a batch to come. None if it needs none, if they are here, or
        if it has not been read yet: a push or a pull is not to wait for data."""
        if batch is None or not self._tables or self._kept is not None:
            return None
        given = self._source.ahead(batch)
        return None if given is None else self._source.place(given)

    def came(self, batch: BatchId | None, rows: ReceivedRows | None) -> None:
        """The rows that :meth:`ahead` asked for are here."""
        if batch is not None and rows is not None:
            self._kept = batch, rows

    def of(self, batch: BatchId, given: object, number: int | None) -> ReceivedRows | None:
        """The rows of ``batch``, whose data is ``given``; those that have not come are pulled now:
        of round ``number``, or the newest. None if it needs none.

        Raises:
            RoundPassed: the round is over. For others see :class:`worker.loop.router.Router`.
        """
        if not self._tables:
            return None
        kept, self._kept = self._kept, None
        if kept is not None and kept[0] == batch:
            return kept[1]
        rows = self._source.place(given)
        if rows is not None:
            self._shards.pull(number, None, rows=rows)
        return rows

    @contextmanager
    def prefetching(self, following: BatchId | None) -> Iterator[None]:
        """Receives the newest rows of the batch ``following`` meanwhile, if that was asked for. The
        router must not be used within."""
        rows = None if self._pool is None else self.ahead(following)
        if rows is None or self._pool is None:
            yield
            return
        fetched = self._pool.submit(self._shards.pull, None, None, rows=rows)
        try:
            yield
        finally:
            # As long as the router waits for a shard; then it is this thread's again.
            fetched.exception()
        fetched.result()
        self.came(following, rows)
