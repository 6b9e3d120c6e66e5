"""When rows are asked for, and when those that are here are used; no shards and no TensorFlow."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pytest

from psrpc.core.batch import BatchId
from psrpc.core.errors import RoundPassed, StaleGeneration
from worker.embedding.row_sets import ReceivedRows
from worker.embedding.rows import RowsNeeded
from worker.loop.joined import RowFetcher

A, B, C = (BatchId(0, 8 * index, 8) for index in range(3))


class Source:
    """Batches that have been read need rows."""

    def __init__(self) -> None:
        self.read = {A, B}

    def ahead(self, batch: BatchId) -> BatchId | None:
        return batch if batch in self.read else None

    def place(self, given: BatchId) -> ReceivedRows:
        ids = np.array([given.first], np.int64)
        return ReceivedRows(RowsNeeded((ids,), ((0, 1),)), (np.zeros((1, 2), np.float32),))


class Shards:
    def __init__(self) -> None:
        self.pulled: list[tuple[int | None, int]] = []
        self.error: Exception | None = None

    def pull(self, source: int | None, into: None, *, rows: ReceivedRows) -> None:
        assert into is None
        self.pulled.append((source, int(rows.needed.ids[0][0])))
        if self.error is not None:
            raise self.error


class Fetching:
    def __init__(self, *, tables: bool = True, prefetch: bool = False) -> None:
        self.source, self.shards = Source(), Shards()
        source, shards = cast("Any", self.source), cast("Any", self.shards)
        self.fetcher = RowFetcher(source, shards, tables=tables, prefetch=prefetch)


def test_rows_that_came_with_something_else_are_used_once() -> None:
    fetching = Fetching()
    rows = fetching.fetcher.ahead(A)
    assert rows is not None
    fetching.fetcher.came(A, rows)
    # They are not asked for again.
    assert fetching.fetcher.ahead(A) is None
    assert fetching.fetcher.of(A, A, None) is rows
    assert fetching.shards.pulled == []
    assert fetching.fetcher.of(A, A, 3) is not rows
    assert fetching.shards.pulled == [(3, A.first)]


def test_a_batch_that_was_not_read_in_time_has_its_rows_pulled_when_it_is_computed() -> None:
    fetching = Fetching()
    assert fetching.fetcher.ahead(C) is None
    fetching.fetcher.came(C, None)
    assert fetching.fetcher.of(C, C, 7) is not None
    assert fetching.shards.pulled == [(7, C.first)]


def test_rows_of_another_batch_are_of_no_use() -> None:
    fetching = Fetching()
    fetching.fetcher.came(A, fetching.fetcher.ahead(A))
    fetching.fetcher.of(B, B, None)
    assert fetching.shards.pulled == [(None, B.first)]


def test_rows_that_are_older_than_the_parameters_are_dropped() -> None:
    fetching = Fetching()
    fetching.fetcher.came(A, fetching.fetcher.ahead(A))
    fetching.fetcher.drop()
    fetching.fetcher.of(A, A, None)
    assert fetching.shards.pulled == [(None, A.first)]


def test_a_round_that_has_passed_is_said() -> None:
    fetching = Fetching()
    fetching.shards.error = RoundPassed("round 8")
    with pytest.raises(RoundPassed):
        fetching.fetcher.of(A, A, 7)


def test_rows_of_the_next_batch_come_while_one_is_computed() -> None:
    fetching = Fetching(prefetch=True)
    with fetching.fetcher, fetching.fetcher.prefetching(B):
        pass
    assert fetching.shards.pulled == [(None, B.first)]
    assert fetching.fetcher.ahead(B) is None
    fetching.fetcher.of(B, B, None)
    assert len(fetching.shards.pulled) == 1


def test_a_shards_error_on_a_prefetch_is_raised_after_the_step() -> None:
    fetching = Fetching(prefetch=True)
    fetching.shards.error = StaleGeneration("generation 2")
    done = False
    with fetching.fetcher as fetcher:
        with pytest.raises(StaleGeneration), fetcher.prefetching(B):
            done = True
        with pytest.raises(ValueError, match="the step"), fetcher.prefetching(B):
            raise ValueError("the step failed")
    assert done


def test_without_tables_nothing_is_asked() -> None:
    fetching = Fetching(tables=False, prefetch=True)
    assert fetching.fetcher.ahead(A) is None
    with fetching.fetcher, fetching.fetcher.prefetching(B):
        pass
    assert fetching.fetcher.of(A, A, None) is None
    assert fetching.shards.pulled == []
