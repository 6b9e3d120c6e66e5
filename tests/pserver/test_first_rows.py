"""Tables that begin with the rows of another job's checkpoint: their values, and nothing else."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from pserver.first_rows import fill_first_rows
from pserver.tables.tables import Tables
from psrpc.errors import CheckpointError, InvalidJob
from psrpc.tables import TableSpec, shard_of
from tests.pserver.row_files_bench import ADAGRAD, ADAM, TABLES, UNIFORM, Job, everything, plan_of
from tests.pserver.shards import INITIAL, counting, engine_of, fence_of, served

ITEM = replace(TABLES[1], optimizer=ADAM, min_count=2, max_rows=None, eviction=None)
NEW = TableSpec("new", 4, None, UNIFORM, ADAGRAD)


def source(root: Path, shards: int = 2) -> tuple[Job, Path]:
    job = Job(root, shards)
    job.train(20, ids=20)
    base = job.checkpoint()
    job.train(2, ids=4)
    return job, root / job.checkpoint(base)


def values_of(all_shards: list[Tables], table: int, ids: list[int]) -> npt.NDArray[np.float32]:
    shards = len(all_shards)
    into = np.empty((len(ids), all_shards[0].specs[table].width), np.float32)
    for shard, tables in enumerate(all_shards):
        own = shard_of(np.array(ids), shards) == np.uint64(shard)
        part = np.empty((own.sum(), into.shape[1]), np.float32)
        tables[table].read(np.array(ids)[own], part)
        into[own] = part
    return into


@pytest.mark.parametrize("shards", [1, 2, 3])
def test_rows_of_tables_of_the_same_name_and_width(tmp_path: Path, shards: int) -> None:
    job, directory = source(tmp_path)
    assert sum(tables[1].evicted for tables in job.held), "some rows are removed by a later part"
    plan = plan_of(shards, (NEW, ITEM))
    held = [Tables(plan, shard) for shard in range(shards)]
    for shard, tables in enumerate(held):
        fill_first_rows(tables, directory, plan, shard)
    theirs, _ = job.everything()[1]
    ids = sorted(theirs)
    assert sum(len(tables[1]) for tables in held) == len(ids)
    np.testing.assert_array_equal(values_of(held, 1, ids), values_of(job.held, 1, ids))
    assert [len(tables[0]) for tables in held] == [0] * shards
    for tables in held:
        rows, candidates = everything(tables)[1]
        assert not candidates
        for _, m, v, count, touched in rows.values():
            assert not any(m + v + touched)
            assert np.frombuffer(count, np.uint32) == 2


def test_ids_outside_of_the_vocabulary_are_left_out(tmp_path: Path) -> None:
    job, directory = source(tmp_path)
    plan = plan_of(1, (replace(ITEM, vocabulary=50),))
    tables = Tables(plan, 0)
    fill_first_rows(tables, directory, plan, 0)
    assert everything(tables)[0][0].keys() == {n for n in job.everything()[1][0] if n < 50}


def test_another_width_names_the_table_and_both(tmp_path: Path) -> None:
    _, directory = source(tmp_path)
    plan = plan_of(1, (TABLES[0], replace(ITEM, width=5)))
    tables = Tables(plan, 0)
    with pytest.raises(InvalidJob, match="'item' has width 2 there; the job has it with width 5"):
        fill_first_rows(tables, directory, plan, 0)
    assert [len(table) for table in tables.tables] == [0, 0]


def test_a_shard_begins_with_them_whoever_asks_for_how_often(tmp_path: Path) -> None:
    job, directory = source(tmp_path)
    engine = engine_of(plan_of(1))
    with served(engine) as client:
        fence = fence_of(client)
        assert client.initialize(fence, counting(engine.plan), INITIAL, str(directory))
        assert not client.initialize(fence, counting(engine.plan), INITIAL, str(directory))
        status = client.get_status()
    assert status.initialized
    assert [t.rows for t in status.tables] == [len(table) for table, _ in job.everything()]


def test_a_shard_that_cannot_read_them_is_not_initialized(tmp_path: Path) -> None:
    _, directory = source(tmp_path)
    path = directory / "rows-1-of-2-1.safetensors"
    good = path.read_bytes()
    engine = engine_of(plan_of(1))
    with served(engine) as client:
        fence, values = fence_of(client), counting(engine.plan)
        path.write_bytes(good[:-1] + b"x")
        with pytest.raises(CheckpointError, match=r"rows-1-of-2-1.safetensors has SHA-256"):
            client.initialize(fence, values, INITIAL, str(directory))
        path.unlink()
        with pytest.raises(CheckpointError, match="No such file"):
            client.initialize(fence, values, INITIAL, str(directory))
        status = client.get_status()
        assert not status.initialized
        assert [t.rows for t in status.tables] == [0, 0]
        path.write_bytes(good)
        assert client.initialize(fence, values, INITIAL, str(directory))
