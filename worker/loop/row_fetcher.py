"""Receives the rows of embedding tables that a worker's batches need."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from psrpc.core.batch import BatchId
from psrpc.ops.threads import THREADS, Threads
from worker.embedding.row_sets import ReceivedRows
from worker.loop.router import Router
from worker.step.gradient_source import GradientSource


class RowFetcher:
    """Fetches rows for the batches of one generation. One thread uses it.

    If the ids of the next batch are known at an exchange with the shards, its rows come with that
    exchange, see :meth:`ahead`. Otherwise a pull of their own brings them before the batch is
    computed. Does nothing if the plan has no tables.
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
        """With ``prefetch``, receives the next batch's rows while a batch is computed."""
        self._source = source
        self._shards = shards
        self.tables = tables
        self._kept: tuple[BatchId, ReceivedRows] | None = None
        self._pool = threads.pool(1, "rows") if tables and prefetch else None

    def __enter__(self) -> RowFetcher:
        return self

    def __exit__(self, *_exception: object) -> None:
        if self._pool is not None:
            self._pool.shutdown()

    def drop(self) -> None:
        """Drops rows received ahead, because newer ones are available."""
        self._kept = None

    def ahead(self, batch: BatchId | None) -> ReceivedRows | None:
        """Returns where to receive the rows of the coming ``batch``. None if it needs none, if
        they are here already, or if its data is not read yet: an exchange must not wait for data.
        """
        if batch is None or not self.tables or self._kept is not None:
            return None
        given = self._source.ahead(batch)
        return None if given is None else self._source.place(given)

    def came(self, batch: BatchId | None, rows: ReceivedRows | None) -> None:
        """Keeps ``rows``, which :meth:`ahead` returned for ``batch`` and an exchange has filled."""
        if batch is not None and rows is not None:
            self._kept = batch, rows

    def of(self, batch: BatchId, given: object, number: int | None) -> ReceivedRows | None:
        """Returns the rows of ``batch``, whose data is ``given``; None if it needs none. Rows not
        received ahead are pulled now, from round ``number`` or (None) the newest.

        Raises:
            RoundPassed: the round is over. For other errors see :class:`worker.loop.router.Router`.
        """
        if not self.tables:
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
        """Receives the newest rows of the batch ``following`` while the ``with`` block runs, if
        prefetching is on. The block must not use the router."""
        rows = None if self._pool is None else self.ahead(following)
        if rows is None or self._pool is None:
            yield
            return
        fetched = self._pool.submit(self._shards.pull, None, None, rows=rows)
        try:
            yield
        finally:
            # Wait for the pull to end, since only then may this thread use the router again.
            fetched.exception()
        fetched.result()
        self.came(following, rows)
