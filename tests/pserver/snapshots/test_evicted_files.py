"""Evicted rows in checkpoints: each has those since the one before, and none is lost."""

from __future__ import annotations

import errno
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from psrpc.checkpoint.directory import verify
from psrpc.checkpoint.evicted_file import check_evicted, evicted_ids, evicted_sizes, fill_evicted
from psrpc.checkpoint.manifest import read_manifest
from psrpc.core.errors import CheckpointError
from psrpc.core.tables import Rows, TableSpec
from psrpc.files.storage import Disk, Written
from tests.pserver.table_shards import TABLES, Job, everything, merged
from tests.psrpc.rows import ADAGRAD, UNIFORM

KEEPING = TableSpec("item", 2, None, UNIFORM, ADAGRAD, max_rows=4, eviction="age")
KEEPING = replace(KEEPING, keep_evicted=True)


def job_of(root: Path, storage: Disk | None = None, shards: int = 1) -> Job:
    return Job(root, shards, storage or Disk(), (TABLES[0], KEEPING))


def touch(job: Job, first: int, stop: int, shard: int = 0) -> None:
    """An update of each of some rows of the table that keeps what it evicts."""
    for id_ in range(first, stop):
        job.version += 1
        rows = Rows(np.array([id_]), np.full((1, 2), job.version, np.float32))
        job.held[shard].apply({1: rows}, 1.0, job.version - 1, job.version)


def evicted(job: Job, checkpoint: str) -> list[int]:
    """The ids that a checkpoint says were evicted."""
    directory = job.root / checkpoint
    manifest = read_manifest(directory)
    verify(directory, manifest)
    ids: list[int] = evicted_ids([(directory, manifest)], "item").tolist()
    return ids


def test_a_checkpoint_has_what_was_evicted_since_the_one_before(tmp_path: Path) -> None:
    job = job_of(tmp_path)
    touch(job, 0, 4)
    first = job.checkpoint()
    assert read_manifest(tmp_path / first).files[0].evicted is None
    touch(job, 4, 6)
    second = job.checkpoint(first)
    touch(job, 6, 7)
    third = job.checkpoint(second)
    touch(job, 4, 7)
    fourth = job.checkpoint(third)
    assert [evicted(job, name) for name in (first, second, third)] == [[], [0, 1], [2]]
    assert read_manifest(tmp_path / fourth).files[0].evicted is None
    assert evicted_sizes(tmp_path / second, read_manifest(tmp_path / second)) == {"item": 2}
    # What is restored is as without.
    assert merged(map(everything, job.restored(second, 2)))[1][0].keys() == {2, 3, 4, 5}


def test_nothing_is_lost_where_another_generation_counts_anew(tmp_path: Path) -> None:
    job = job_of(tmp_path)
    touch(job, 0, 8)
    first = job.checkpoint()
    job.held[0].forget()
    job.generation, job.version = 2, 0
    touch(job, 10, 16)
    assert evicted(job, job.checkpoint(first)) == [10, 11]


def test_the_rows_are_as_they_were_and_the_last_one_of_an_id_holds(tmp_path: Path) -> None:
    job = job_of(tmp_path)
    touch(job, 0, 4)
    then = np.empty((4, 2), np.float32)
    job.held[0].read([(1, np.arange(4))], [then])
    touch(job, 4, 8)
    first = job.checkpoint()
    touch(job, 0, 2)
    touch(job, 0, 2)
    again = np.empty((2, 2), np.float32)
    job.held[0].read([(1, np.arange(2))], [again])
    touch(job, 4, 8)
    second = job.checkpoint(first)
    sources = [(tmp_path / name, read_manifest(tmp_path / name)) for name in (first, second)]
    ids = evicted_ids(sources, "item")
    assert ids.tolist() == list(range(8))
    into = np.empty((8, 2), np.float32)
    fill_evicted(sources, "item", ids, into)
    np.testing.assert_array_equal(into[:2], again)
    np.testing.assert_array_equal(into[2:4], then[2:])  # evicted once


def test_a_shard_lets_go_of_what_a_committed_checkpoint_has(tmp_path: Path) -> None:
    job = job_of(tmp_path)
    table = job.held[0].tables[1]

    def kept() -> list[int]:
        frozen = table.freeze()
        ids: list[int] = frozen.evicted(-1).ids.tolist()
        frozen.close()
        return ids

    touch(job, 0, 6)
    first = job.checkpoint()
    touch(job, 6, 7)
    assert kept() == [0, 1, 2]
    second = job.checkpoint(first)
    assert kept() == [2]
    job.version += 1  # for another name
    job.checkpoint(second)
    assert kept() == []


def test_a_checkpoint_that_fails_loses_nothing(tmp_path: Path) -> None:
    class Refusing(Disk):
        refuses = False

        def write(self, path: Path, parts: Iterable[bytes | memoryview]) -> Written:
            if self.refuses and path.name.startswith("evicted"):
                raise OSError(errno.ENOSPC, "No space left on device")
            return super().write(path, parts)

    disk = Refusing()
    job = job_of(tmp_path, storage=disk)
    touch(job, 0, 4)
    first = job.checkpoint()
    touch(job, 4, 5)
    disk.refuses = True
    (report,) = job.report(first)
    assert report.error.endswith(
        "evicted-0-of-1.safetensors cannot be written: No space left on device"
    )
    disk.refuses = False
    touch(job, 5, 6)
    job.report(first)  # written, and never committed
    touch(job, 6, 7)
    assert evicted(job, job.checkpoint(first)) == [0, 1, 2]


def test_after_a_restore_nothing_is_told_again(tmp_path: Path) -> None:
    job = job_of(tmp_path)
    touch(job, 0, 5)
    first = job.checkpoint()
    touch(job, 5, 7)
    second = job.checkpoint(first)
    assert evicted(job, second) == [1, 2]
    (job.held[0],) = job.restored(first, 1)
    job.generation, job.version = 2, job.version + 10  # for another name
    touch(job, 7, 8)
    assert evicted(job, job.checkpoint()) == [1]


def test_an_older_snapshot_lets_a_restored_table_go_of_nothing(tmp_path: Path) -> None:
    job = job_of(tmp_path)
    touch(job, 0, 5)
    first = job.checkpoint()
    order, late = job.order(first, "late"), job.snapshot(0)
    job.held[0].forget()
    touch(job, 0, 4)
    job.version = 0
    touch(job, 4, 5)
    job.files[0].write(order, late)
    job.version = 9  # for another name
    assert evicted(job, job.checkpoint()) == [0]


def test_each_shard_tells_of_its_own(tmp_path: Path) -> None:
    job = Job(tmp_path, 3, tables=(TABLES[0], replace(KEEPING, max_rows=60)))
    job.train(5, ids=20, span=1000)
    name = job.checkpoint()
    count = sum(tables.tables[1].evicted for tables in job.held)
    assert count == len(evicted(job, name)) > 10
    manifest = read_manifest(tmp_path / name)
    for file in manifest.files:
        assert file.evicted is not None
        assert file.evicted.name == f"evicted-{file.shard}-of-3.safetensors"
        check_evicted(tmp_path / name, manifest, file)


def test_damaged_evicted_rows_are_found(tmp_path: Path) -> None:
    job = job_of(tmp_path)
    touch(job, 0, 6)
    directory = tmp_path / job.checkpoint()
    manifest = read_manifest(directory)
    path = directory / "evicted-0-of-1.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    for find in (
        lambda: verify(directory, manifest),
        lambda: check_evicted(directory, manifest, manifest.files[0]),
        lambda: evicted_ids([(directory, manifest)], "item"),
    ):
        with pytest.raises(CheckpointError, match=r"evicted-0-of-1.safetensors has SHA-256"):
            find()
