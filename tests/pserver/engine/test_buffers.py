"""The pool of arrival buffers: bounded, shared, aligned."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from threading import Event

import pytest

from pserver.engine.buffers import BufferPool, pool_size
from psrpc.core.errors import NotReady
from tests.pserver.shards import plan_of

PLAN = plan_of()


def test_sets_are_made_when_needed_and_used_again() -> None:
    pool = BufferPool(PLAN, 0, 2)
    first = pool.acquire(0)
    assert {name: (len(a), a.dtype.name) for name, a in first.arrays.items()} == {
        "float32.trainable": (96, "float32"),
        "float32.state": (5, "float32"),
    }
    assert all(array.ctypes.data % 64 == 0 for array in first.arrays.values())
    pool.release(first)
    assert pool.acquire(0) is first
    assert pool.acquire(0) is not first
    assert pool.in_use == 2


def test_a_pool_that_is_used_up_says_so() -> None:
    pool = BufferPool(PLAN, 0, 1)
    with pool.loan(0), pytest.raises(NotReady, match="all 1 buffers for arriving gradients"):
        pool.acquire(0.001)
    assert pool.in_use == 0


def test_a_waiting_caller_gets_a_released_buffer() -> None:
    pool = BufferPool(PLAN, 0, 1)
    held = pool.acquire(0)
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(pool.acquire, 30)
        pool.release(held)
        assert waiting.result(30) is held


def test_a_loan_that_is_kept_stays_out() -> None:
    pool = BufferPool(PLAN, 0, 1)
    with pool.loan(0) as loan:
        loan.keep = True
    assert pool.in_use == 1


def test_a_set_that_is_given_away_makes_room_for_another() -> None:
    pool = BufferPool(PLAN, 0, 1)
    with pool.loan(0) as loan:
        loan.keep = True
        pool.forget()
    assert pool.in_use == 0
    assert pool.acquire(0) is not loan.buffers


def test_a_set_that_there_is_no_memory_for_leaves_room_for_another() -> None:
    pool = BufferPool(plan_of(size=1 << 50), 0, 1)
    for _ in range(2):
        with pytest.raises(MemoryError):
            pool.acquire(0)
    assert pool.in_use == 0


def test_small_shards_have_more_buffers_and_rounds_have_room_for_two_attempts() -> None:
    assert pool_size(1 << 30, 0) == 2
    assert pool_size(4 << 20, 0) == 6
    assert pool_size(0, 0) == 16
    assert pool_size(1 << 30, 3) == 8


def test_a_pool_that_shrinks_waits_for_what_is_in_use() -> None:
    pool = BufferPool(PLAN, 0, 4)
    held = [pool.acquire(0) for _ in range(3)]
    pool.release(pool.acquire(0))
    pool.resize(2)
    assert pool.in_use == 3, "the free one went at once"
    with pytest.raises(NotReady, match="all 2 buffers"):
        pool.acquire(0)
    pool.release(held[0])
    with pytest.raises(NotReady):
        pool.acquire(0)
    pool.release(held[1])
    assert pool.acquire(0) is held[1]
    with pytest.raises(NotReady):
        pool.acquire(0)
    pool.release(held[1])
    pool.release(held[2])
    assert pool.in_use == 0
    assert {id(pool.acquire(0)), id(pool.acquire(0))} == {id(held[1]), id(held[2])}


def test_a_pool_that_grows_serves_waiting_callers() -> None:
    pool = BufferPool(PLAN, 0, 1)
    held = pool.acquire(0)
    waits = Event()

    def check() -> None:
        waits.set()

    with ThreadPoolExecutor(2) as threads:
        waiting = [threads.submit(pool.acquire, 30, check) for _ in range(2)]
        assert waits.wait(30)
        pool.resize(3)
        found = [future.result(30) for future in waiting]
    assert len({id(held), *map(id, found)}) == 3
    assert pool.in_use == 3


def test_a_pool_that_changes_under_load_loses_nothing() -> None:
    pool = BufferPool(PLAN, 0, 4)
    out: set[int] = set()

    def use() -> None:
        for _ in range(200):
            with pool.loan(30) as loan:
                assert id(loan.buffers) not in out, "no other loan has it"
                out.add(id(loan.buffers))
                out.remove(id(loan.buffers))

    with ThreadPoolExecutor(6) as threads:
        running = [threads.submit(use) for _ in range(6)]
        while not all(future.done() for future in running):
            for size in (1, 5, 2, 8):
                pool.resize(size)
        for future in running:
            future.result(30)
    assert pool.in_use == 0
    pool.resize(2)
    first, second = pool.acquire(0), pool.acquire(0)
    assert first is not second
    with pytest.raises(NotReady):
        pool.acquire(0)
