"""When rows are written in parts, and when whole."""

from __future__ import annotations

import errno
from pathlib import Path

import numpy as np
import pytest

from psrpc.checkpoint.directory import remove_checkpoint
from psrpc.core.tables import Rows, TableSpec
from psrpc.files.storage import Disk
from tests.pserver.table_shards import Job, everything, merged
from tests.psrpc.rows import ADAM, UNIFORM


def test_a_table_without_a_known_predecessor_is_written_whole(tmp_path: Path) -> None:
    job = Job(tmp_path)
    job.train(10, ids=30)
    first = job.checkpoint()

    def next_parts(base: str) -> int:
        job.train(1, ids=2)
        return job.parts(job.checkpoint(base))[0]

    assert next_parts(first) == 2
    assert next_parts("") == 1
    assert next_parts("checkpoints/step-99999999") == 1
    job.generation = 2
    assert next_parts(first) == 1
    other = Job(tmp_path)  # the same shard, started again
    other.version, other.held, other.generation = job.version, job.held, 2
    other.train(1, ids=2)
    assert other.parts(other.checkpoint(f"checkpoints/step-{job.version:08d}"))[0] == 1


@pytest.mark.parametrize(("most", "expected"), [(3, [1, 2, 3, 1, 2]), (1, [1] * 5)])
def test_so_many_parts_and_no_more(tmp_path: Path, most: int, expected: list[int]) -> None:
    job = Job(tmp_path, most=most)
    job.train(10, ids=40)
    base = ""
    counts = []
    for _ in range(5):
        base = job.checkpoint(base)
        counts += job.parts(base)
        job.train(1, ids=2)
    assert counts == expected


def test_rows_of_higher_versions_than_the_shard_has_are_not_written_again(tmp_path: Path) -> None:
    job = Job(tmp_path, tables=(TableSpec("user", 3, None, UNIFORM, ADAM),))

    def touch(stop: int, version: int) -> None:
        rows = Rows(np.arange(stop), np.ones((stop, 3), np.float32))
        job.held[0].apply({0: rows}, 1.0, version - 1, version)

    touch(100, 500)
    job.version = 2
    base = job.checkpoint()
    touch(3, 501)
    job.version = 3
    assert job.parts(job.checkpoint(base)) == [2]


def test_a_part_of_more_than_half_or_parts_of_more_than_twice_are_not_worth_it(
    tmp_path: Path,
) -> None:
    job = Job(tmp_path, tables=(TableSpec("user", 3, None, UNIFORM, ADAM),))

    def touch(first: int, stop: int) -> None:
        job.version += 1
        rows = Rows(np.arange(first, stop), np.ones((stop - first, 3), np.float32))
        job.held[0].apply({0: rows}, 1.0, job.version - 1, job.version)

    touch(0, 100)
    base = job.checkpoint()
    counts = []
    for rows in (51, 50, 40, 11, 10):
        touch(0, rows)
        base = job.checkpoint(base)
        counts += job.parts(base)
    assert counts == [1, 2, 3, 1, 2]


@pytest.mark.parametrize("number", [errno.EPERM, errno.ENOTSUP, errno.EXDEV, errno.EMLINK])
def test_without_links_rows_are_written_whole(tmp_path: Path, number: int) -> None:
    class NoLinks(Disk):
        links = 0

        def link(self, old: Path, new: Path) -> None:
            self.links += 1
            if self.links > 2:  # half-way through the second chain
                raise OSError(number, "no")
            super().link(old, new)

    job = Job(tmp_path, storage=NoLinks())
    job.train(10, ids=30)
    first = job.checkpoint()
    base = first
    for links in (2, 1, 1):
        job.train(1, ids=2)
        base = job.checkpoint(base)
        assert job.parts(base) == [links]
        assert merged(map(everything, job.restored(base, 1))) == job.everything()


def test_a_base_that_is_gone_is_no_loss(tmp_path: Path) -> None:
    job = Job(tmp_path)
    job.train(10, ids=30)
    first = job.checkpoint()
    remove_checkpoint(tmp_path / first)
    job.train(1, ids=2)
    assert job.parts(job.checkpoint(first)) == [1]
