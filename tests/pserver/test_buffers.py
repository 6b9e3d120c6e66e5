"""The pool of arrival buffers: bounded, shared, aligned."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from pserver.buffers import BufferPool, pool_size
from psrpc.errors import NotReady
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


def test_one_who_waits_gets_what_is_released() -> None:
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
