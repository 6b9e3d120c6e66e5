"""The index of a small vocabulary against the hashed one."""

from __future__ import annotations

from mmap import PAGESIZE

import numpy as np
import pytest

from pserver.tables.hash_index import HashIndex
from pserver.tables.part import TablePart
from pserver.tables.row_store import DirectIndex
from pserver.tables.table import Table
from psrpc.core.errors import CheckpointError
from psrpc.core.tables import TableSpec


def test_it_finds_what_the_hashed_one_finds() -> None:
    random = np.random.default_rng(3)
    direct, hashed = DirectIndex(500), HashIndex()
    keys = random.permutation(500)
    everything = np.arange(500)
    for start in range(0, 500, 100):
        slots = np.arange(start, start + 100)
        for index in (direct, hashed):
            index.insert(keys[slots], slots, keys)
            index.remove(keys[slots[::3]], slots[::3])
        assert len(direct) == len(hashed)
        np.testing.assert_array_equal(direct.find(everything, keys), hashed.find(everything, keys))


def test_it_takes_the_memory_that_was_written_to() -> None:
    index = DirectIndex(1 << 20)
    assert index.nbytes == 0
    index.find(np.arange(1 << 20), np.empty(0, np.int64))
    assert index.nbytes == 0, "looking something up takes nothing"
    ids = np.array([0, 1, (1 << 20) - 1])
    index.insert(ids, np.arange(3), ids)
    assert index.nbytes == 2 * PAGESIZE
    index.remove(ids, np.arange(3))
    assert index.nbytes == 2 * PAGESIZE
    everything = np.arange(1 << 20)
    index.insert(everything, everything, everything)
    assert index.nbytes == 4 << 20


def test_a_large_one_takes_huge_pages_at_most() -> None:
    index = DirectIndex(1 << 23)
    ids = np.array([5])
    index.insert(ids, np.zeros(1, np.int64), ids)
    assert index.nbytes == 2 << 20


def test_a_checkpoint_with_ids_outside_of_the_vocabulary_is_refused() -> None:
    zeros = {"class_name": "constant", "config": {"value": 0.0}}
    sgd = {"class_name": "SGD", "config": {"learning_rate": 0.5}}
    table = Table(TableSpec("films", 2, 10, zeros, sgd), 0, 1)
    ones = np.ones(3, np.uint32)
    part = TablePart(np.array([1, 9, 10]), np.ones((3, 2), np.float32), {}, ones, ones)
    with pytest.raises(CheckpointError, match=r"'films' has ids 1 to 10.*expected 0 to 9"):
        table.insert(part)
    assert len(table) == 0
