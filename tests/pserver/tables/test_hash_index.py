"""The index against a dict."""

from __future__ import annotations

import numpy as np

from pserver.tables.hash_index import HashIndex
from psrpc.tables import mix


def test_many_cycles_of_inserting_and_removing() -> None:
    rng = np.random.default_rng(1)
    keys = np.zeros(8000, np.int64)
    index, model = HashIndex(), dict[int, int]()
    free = list(range(len(keys)))
    for cycle in range(12):
        new = np.setdiff1d(rng.integers(-5000, 5000, 1500), list(model))[: len(free)]
        slots = np.array([free.pop() for _ in new], np.int64)
        keys[slots] = new
        index.insert(new, slots, keys)
        model.update(zip(new.tolist(), slots.tolist(), strict=True))
        old = rng.permutation(np.array(list(model)))[: 1400 if cycle % 5 else 4000]
        at = np.array([model.pop(i) for i in old.tolist()], np.int64)
        index.remove(old, at)
        free.extend(at.tolist())
        asked = np.arange(-5100, 5100)
        assert index.find(asked, keys).tolist() == [model.get(i, -1) for i in asked.tolist()]
        assert len(index) == len(model)
    assert index.nbytes <= 4 * 2**14, "removed slots made it grow"


def test_ids_that_all_want_one_bucket() -> None:
    candidates = np.arange(1 << 20)
    ids = candidates[mix(candidates) & np.uint64(1023) == 7][:300]
    index = HashIndex()
    index.insert(ids, np.arange(300), ids)
    np.testing.assert_array_equal(index.find(ids, ids), np.arange(300))
    index.remove(ids[::2], np.arange(0, 300, 2))
    expected = np.where(np.arange(300) % 2, np.arange(300), -1)
    np.testing.assert_array_equal(index.find(ids, ids), expected)


def test_growing_keeps_at_most_half_of_the_buckets_in_use() -> None:
    ids = np.arange(100_000) * 7919
    index = HashIndex()
    for start in range(0, len(ids), 30_000):
        block = ids[start : start + 30_000]
        index.insert(block, np.arange(start, start + len(block)), ids)
    np.testing.assert_array_equal(index.find(ids, ids), np.arange(100_000))
    assert (index.find(-1 - ids, ids) == -1).all()
    assert 8 * len(ids) <= index.nbytes <= 16 * len(ids)
