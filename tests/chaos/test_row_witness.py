"""The rows of the witness model show lost and repeated batches."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from pserver.tables.tables import Tables
from psrpc.core.policy import Policy
from psrpc.core.tables import shard_of
from tests.chaos.reference import Reference
from tests.chaos.row_witness import (
    FIXED,
    GROWING,
    SHARED,
    check_rows,
    every_row,
    row_gradients,
    shard_ids,
    shard_rows,
)
from tests.chaos.test_schedule import OPTIONS as WITHOUT
from tests.chaos.witness import Array, Optimizer, Options, Torn

OPTIONS = replace(WITHOUT, rows=True)
SHARD = 1


def trained(options: Options, batches: list[int]) -> Tables:
    """A shard's rows after ``batches``, one after another."""
    tables = Tables(options.plan, SHARD)
    for number, batch in enumerate(batches):
        tables.apply(row_gradients(options, batch, SHARD), 1.0, number, number + 1)
    return tables


def read(options: Options, tables: Tables) -> list[Array]:
    """All rows of a shard, as a worker has them."""
    needed = every_row(options)
    pairs = zip(needed.ids, options.tables, strict=True)
    values = [np.empty((len(ids), spec.width), np.float32) for ids, spec in pairs]
    rows = shard_rows(options.plan, values, needed, SHARD)
    ids = shard_ids(options.shards, options.total_batches)[SHARD]
    tables.read(((GROWING, ids.growing), (FIXED, ids.fixed)), rows)
    return rows


def mask(*batches: int) -> Array:
    """``[batches]``, true at these."""
    return np.isin(np.arange(OPTIONS.total_batches), batches)


@pytest.mark.parametrize("shards", [1, 2, 3])
def test_every_shard_has_rows_of_its_own(shards: int) -> None:
    for shard, ids in enumerate(shard_ids(shards, 128)):
        for each in (ids.growing, ids.fixed):
            assert (np.diff(each) > 0).all()
            assert (shard_of(each, shards) == shard).all()
        assert (len(ids.growing), len(ids.fixed)) == (129, SHARED)


@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adam"])
def test_rows_after_training_are_not_torn(optimizer: Optimizer) -> None:
    options = replace(OPTIONS, optimizer=optimizer)
    rows = read(options, trained(options, [3, 0, 7]))
    assert check_rows(options, rows, mask(0, 3, 7)) == 3
    with pytest.raises(Torn, match=r"rows and arenas differ in batches \[7\]"):
        check_rows(options, rows, mask(0, 3))


def test_a_batch_twice_shows() -> None:
    with pytest.raises(Torn, match="row 3 of growing has 2"):
        check_rows(OPTIONS, read(OPTIONS, trained(OPTIONS, [3, 0, 3])))


def test_a_row_of_another_version_shows() -> None:
    old, new = (read(OPTIONS, trained(OPTIONS, batches)) for batches in ([3, 0], [3, 0, 7]))
    for table, row in ((GROWING, 7), (GROWING, -1), (FIXED, 3)):
        mixed = [rows.copy() for rows in new]
        mixed[table][row] = old[table][row]
        with pytest.raises(Torn):
            check_rows(OPTIONS, mixed)
        mixed[table][row, 1:] = new[table][row, 1:]
        with pytest.raises(Torn, match="columns of two versions"):
            check_rows(OPTIONS, mixed)


@pytest.mark.parametrize("replicas", [1, 2, 4])
@pytest.mark.parametrize("poisoned", [None, 5])
def test_the_reference_has_every_batch_once(replicas: int, poisoned: int | None) -> None:
    # The mean of what is left of a round of four is not exact any more.
    poisoned = poisoned if replicas < 4 else None
    policy = Policy(mode="sync", replicas=replicas)
    options = replace(OPTIONS, policy=policy, poisoned=poisoned)
    rows = read(options, Reference(options).tables()[SHARD])
    everything = np.ones(options.total_batches, np.bool_)
    everything[[] if poisoned is None else poisoned] = False
    check_rows(options, rows, everything)
