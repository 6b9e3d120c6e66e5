"""The index against a dict."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from pserver.tables import hash_index
from pserver.tables.hash_index import HashIndex
from psrpc.core.tables import Hashes, Ids, mix


def ids_with(hashes: Hashes) -> Ids:
    """The ids that :func:`psrpc.core.tables.mix` turns into ``hashes``."""
    h: Hashes = hashes ^ hashes >> np.uint64(31) ^ hashes >> np.uint64(62)
    h *= np.uint64(0x319642B2D24D8EC3)
    h ^= h >> np.uint64(27) ^ h >> np.uint64(54)
    h *= np.uint64(0x96DE1B173F119089)
    h ^= h >> np.uint64(30) ^ h >> np.uint64(60)
    h -= np.uint64(0x9E3779B97F4A7C15)
    ids: Ids = h.view(np.int64)
    return ids


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


def test_no_insert_lays_much_out_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither growing nor the marks of removed ids: a batch has to do with about its own number of
    rows, whatever is there."""
    monkeypatch.setattr(hash_index, "_SEGMENT", 1 << 12)
    index, moved = HashIndex(), [0]
    put_back = index._put_back

    def counted(slots: npt.NDArray[np.int32], keys: Ids) -> None:
        moved[-1] += len(slots)
        put_back(slots, keys)

    monkeypatch.setattr(index, "_put_back", counted)
    keys = ids_with(np.random.default_rng(2).integers(0, 1 << 63, 200_000).astype(np.uint64))
    batch = 1000
    for start in range(0, 100_000, batch):
        moved.append(0)
        index.insert(keys[start : start + batch], np.arange(start, start + batch), keys)
    grew = max(moved)
    moved.append(0)
    first = len(moved)
    for start in range(0, 100_000, batch):
        moved.append(0)
        index.remove(keys[start : start + batch], np.arange(start, start + batch))
        new = start + 100_000
        index.insert(keys[new : new + batch], np.arange(new, new + batch), keys)
    tidied = moved[first:]
    assert 0 < sum(tidied) < 400_000
    assert max(grew, *tidied) < 8 * batch
    now = np.concatenate([np.full(100_000, -1), np.arange(100_000, 200_000)])
    np.testing.assert_array_equal(index.find(keys, keys), now)


def test_more_ids_with_equal_bits_than_a_segment_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hash_index, "_SEGMENT", 1 << 10)
    rng = np.random.default_rng(3)
    hashes = rng.integers(0, 1 << 63, 8000).astype(np.uint64)
    hashes[4000:] &= ~np.uint64(0xFFFFFF << 10)
    keys = ids_with(hashes)
    np.testing.assert_array_equal(mix(keys), hashes)
    index = HashIndex()
    for start in range(0, 8000, 500):
        index.insert(keys[start : start + 500], np.arange(start, start + 500), keys)
    np.testing.assert_array_equal(index.find(keys, keys), np.arange(8000))


def test_memory_that_is_refused_leaves_the_index_as_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    keys = np.arange(200_000) * 7919
    index = HashIndex()
    index.insert(keys[:50_000], np.arange(50_000), keys)

    def refuse(rows: int) -> None:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(index._buckets, "reserve", refuse)
    with pytest.raises(OSError, match="Cannot allocate"):
        index.insert(keys[50_000:], np.arange(50_000, 200_000), keys)
    assert len(index) == 50_000
    found = np.concatenate([np.arange(50_000), np.full(150_000, -1)])
    np.testing.assert_array_equal(index.find(keys, keys), found)
