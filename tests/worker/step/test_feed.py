from __future__ import annotations

import threading

import pytest

from psrpc.core.batch import BatchId
from psrpc.core.errors import InvalidJob
from worker.step.feed import SHORT_DEPTH, Feed


def batch(index: int) -> BatchId:
    return BatchId(0, 10 * index, 10)


class Source:
    """Reads a batch as its first position; ``gate`` holds reads back while it is closed."""

    def __init__(self) -> None:
        self.read_by: dict[BatchId, str] = {}
        self.reads = 0
        self.gate = threading.Event()
        self.gate.set()
        self.changed = threading.Condition()

    def __call__(self, batch: BatchId) -> int:
        with self.changed:
            self.read_by[batch] = threading.current_thread().name
            self.reads += 1
            self.changed.notify_all()
        self.gate.wait()
        return batch.first

    def wait_for(self, reads: int) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: self.reads >= reads, timeout=10)

    def comes_to_rest_at(self, reads: int) -> bool:
        """Whether none is begun after so many. One that is begun has 50 ms to show it."""
        with self.changed:
            return not self.changed.wait_for(lambda: self.reads > reads, timeout=0.05)


def test_expected_batches_are_read_ahead_on_another_thread() -> None:
    source = Source()
    with Feed(source) as feed:
        feed.expect(batch(i) for i in range(4))
        source.wait_for(2)
        assert [feed.get(batch(i)) for i in range(4)] == [0, 10, 20, 30]
    assert source.read_by[batch(0)] == "feed"
    assert source.reads == 4


def test_no_more_than_the_depth_is_held_ready() -> None:
    source = Source()
    with Feed(source, depth=2) as feed:
        feed.expect(batch(i) for i in range(5))
        source.wait_for(2)
        assert batch(2) not in source.read_by
        feed.get(batch(0))
        source.wait_for(3)
        assert batch(3) not in source.read_by


def test_batches_in_another_order_than_expected_do_not_block() -> None:
    source = Source()
    with Feed(source, depth=2) as feed:
        feed.expect(batch(i) for i in range(4))
        source.wait_for(2)
        assert feed.get(batch(3)) == 30
        assert feed.get(batch(9)) == 90
        assert [feed.get(batch(i)) for i in range(3)] == [0, 10, 20]


def test_with_a_batch_ready_the_next_is_read_while_the_worker_waits() -> None:
    source = Source()
    with Feed(source, depth=2, patience_s=3600, short=lambda _cpu_s: False) as feed:
        feed.expect(batch(i) for i in range(4))
        source.wait_for(1)
        # Nothing is ready after this, so the next is needed at once; but not the one after it.
        feed.get(batch(0))
        source.wait_for(2)
        assert source.comes_to_rest_at(2)
        feed.waiting(True)
        source.wait_for(3)
        feed.waiting(False)
        feed.get(batch(1))
        assert source.comes_to_rest_at(3)
        feed.waiting(True)
        source.wait_for(4)
    assert source.read_by[batch(3)] == "feed"


def test_short_batches_are_read_on_while_the_worker_waits() -> None:
    source = Source()
    with Feed(source, depth=2, patience_s=3600, short=lambda _cpu_s: True) as feed:
        feed.waiting(True)
        feed.expect(batch(i) for i in range(12))
        source.wait_for(SHORT_DEPTH)
        assert source.comes_to_rest_at(SHORT_DEPTH)
        feed.waiting(False)
        for i in range(SHORT_DEPTH - 2):
            feed.get(batch(i))
            feed.waiting(True)
            # With two ready, the thread is not woken for one more.
            assert source.reads == SHORT_DEPTH
            feed.waiting(False)
        feed.get(batch(SHORT_DEPTH - 2))
        assert source.reads == SHORT_DEPTH
        feed.waiting(True)
        source.wait_for(12)


def test_after_a_pause_the_thread_does_not_read_on_where_it_left_off() -> None:
    source = Source()
    with Feed(source, depth=2, patience_s=3600, short=lambda _cpu_s: True) as feed:
        feed.waiting(True)
        feed.expect([batch(0), batch(1)])
        source.wait_for(2)
        assert source.comes_to_rest_at(2)
        feed.waiting(False)
        feed.expect([batch(2)])
        feed.waiting(True)
        assert source.comes_to_rest_at(2)


def test_short_batches_are_not_read_on_when_the_worker_goes_on() -> None:
    source = Source()
    with Feed(source, depth=2, patience_s=3600, short=lambda _cpu_s: True) as feed:
        source.gate.clear()
        feed.waiting(True)
        feed.expect(batch(i) for i in range(4))
        source.wait_for(1)
        feed.waiting(False)
        source.gate.set()
        feed.get(batch(0))
        source.wait_for(2)
        assert source.comes_to_rest_at(2)


def test_a_batch_being_read_is_awaited_and_not_read_twice() -> None:
    source = Source()
    source.gate.clear()
    with Feed(source) as feed:
        feed.expect([batch(0)])
        source.wait_for(1)
        opener = threading.Timer(0.01, source.gate.set)
        opener.start()
        assert feed.get(batch(0)) == 0
        opener.join()
    assert source.reads == 1


def test_a_forgotten_batch_is_dropped_even_while_it_is_read() -> None:
    source = Source()
    source.gate.clear()
    with Feed(source, depth=1) as feed:
        feed.expect([batch(0), batch(1)])
        source.wait_for(1)
        feed.forget()
        source.gate.set()
        # Only if nothing of the forgotten is kept is there room for these.
        feed.expect([batch(2)])
        source.wait_for(2)
        assert feed.get(batch(2)) == 20
    assert batch(1) not in source.read_by


def test_an_error_of_the_source_is_raised_where_the_batch_is_requested() -> None:
    def read(wanted: BatchId) -> int:
        if wanted == batch(1):
            raise InvalidJob("train gave 9 records; it was asked for 10")
        return wanted.first

    with Feed(read) as feed:
        feed.expect([batch(0), batch(1), batch(2)])
        assert feed.get(batch(0)) == 0
        with pytest.raises(InvalidJob, match="gave 9 records"):
            feed.get(batch(1))
        assert feed.get(batch(2)) == 20
