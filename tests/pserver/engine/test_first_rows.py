"""Tables that begin with the rows of another job's checkpoint: their values, and nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from pserver.core.assembly import shard_extents
from pserver.engine import first_rows
from pserver.engine.first_rows import FirstRows, fill_first_rows
from pserver.tables.tables import Tables
from pserver.wire import streams
from psrpc.checkpoint.initial_values import load_first_rows
from psrpc.core.encoding import plain
from psrpc.core.errors import CheckpointError, InvalidJob, NotReady
from psrpc.core.tables import TableSpec, shard_of
from psrpc.v1 import parameter_server_pb2 as pb
from psrpc.v1 import types_pb2 as types
from psrpc.wire.codec import encode_stream
from tests.pserver.shards import (
    INCARNATION,
    INITIAL,
    counting,
    engine_of,
    fence_of,
    served,
    session_of,
)
from tests.pserver.table_shards import TABLES, Job, everything, plan_of
from tests.psrpc.rows import ADAGRAD, ADAM, UNIFORM

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


def test_a_shard_begins_with_them_once_after_repeated_requests(tmp_path: Path) -> None:
    job, directory = source(tmp_path)
    engine = engine_of(plan_of(1), first_rows=str(directory))
    with served(engine) as client:
        fence = fence_of(client)
        assert client.initialize(fence, counting(engine.plan), INITIAL)
        assert not client.initialize(fence, counting(engine.plan), INITIAL)
        status = client.get_status()
    assert status.initialized
    assert [t.rows for t in status.tables] == [len(table) for table, _ in job.everything()]


def test_a_shard_that_cannot_read_them_is_not_initialized(tmp_path: Path) -> None:
    _, directory = source(tmp_path)
    path = directory / "rows-1-of-2-1.safetensors"
    good = path.read_bytes()
    engine = engine_of(plan_of(1), first_rows=str(directory))
    with served(engine) as client:
        fence, values = fence_of(client), counting(engine.plan)
        path.write_bytes(good[:-1] + b"x")
        with pytest.raises(CheckpointError, match=r"rows-1-of-2-1.safetensors has SHA-256"):
            client.initialize(fence, values, INITIAL)
        path.unlink()
        with pytest.raises(CheckpointError, match="No such file"):
            client.initialize(fence, values, INITIAL)
        status = client.get_status()
        assert not status.initialized
        assert [t.rows for t in status.tables] == [0, 0]
        path.write_bytes(good)
        assert client.initialize(fence, values, INITIAL)


def test_a_path_that_a_worker_names_is_not_looked_at(tmp_path: Path) -> None:
    """Field 3 of the header was one. A client that still sends it, or any other, opens nothing."""
    _, directory = source(tmp_path)
    engine = engine_of(plan_of(1))
    header = pb.InitializeHeader(
        fence=types.Fence(
            generation=1,
            policy=1,
            plan_hash=engine.plan.hash,
            shard_incarnation=INCARNATION,
            session=session_of("worker-1"),
        ),
        grant=INITIAL,
        extents=streams.to_extents(shard_extents(engine.plan, 0)),
    )
    path = str(directory).encode()
    assert len(path) < 128
    header.MergeFromString(bytes([3 << 3 | 2, len(path)]) + path)
    values = {name: plain(array) for name, array in counting(engine.plan).items()}
    with served(engine) as client:
        stream = encode_stream(header, streams.gradient_parts(engine.plan, values))
        assert not client._initialize(stream, timeout=30).already
        assert [t.rows for t in client.get_status().tables] == [0, 0]


def test_files_are_read_without_the_shards_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or a slow disk would hold up all other calls."""
    _, directory = source(tmp_path)
    engine = engine_of(plan_of(1), first_rows=str(directory))
    free: list[bool] = []

    def loading(*args: Any) -> Iterator[Any]:
        with ThreadPoolExecutor(1) as threads:
            free.append(threads.submit(engine._changed.acquire, timeout=1.0).result(30))
            threads.submit(engine._changed.release).result(30)
        yield from load_first_rows(*args)

    monkeypatch.setattr(first_rows, "load_first_rows", loading)
    with served(engine) as client:
        assert client.initialize(fence_of(client), counting(engine.plan), INITIAL)
    assert free == [True]


def test_rows_that_were_read_wait_for_a_caller_that_comes_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, directory = source(tmp_path)
    held = FirstRows(str(directory), plan_of(1), 0)
    tables = held.load(0.0)
    assert tables is not None
    assert [len(table) for table in tables.tables] == [len(rows) for rows, _ in job.everything()]
    monkeypatch.setattr(first_rows, "load_first_rows", None)
    assert held.load(0.0) is tables
    held._lock.acquire()
    with pytest.raises(NotReady, match=r"shard 0 reads the first rows of its tables from .*step-"):
        held.load(0.001)
