"""Benchmarks of embedding tables: what is drawn, and small real runs."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.peers import Figure
from benchmarks.table import Results, Sample, tables
from benchmarks.tables import WIDTH, TableSample, known_ids, measure_shard, new_ids, table_of
from benchmarks.workloads import CASES, ROWS, Case
from psrpc.core.tables import shard_of


def test_the_peers_run_the_uniform_cases_alone() -> None:
    peers = {case.name: case.peers for case in CASES if case.workload in ROWS}
    assert peers == {
        "emb_4096": ("tf", "torch", "ray"),
        "emb_65536": ("tf", "torch", "ray"),
        "emb_4096_zipf": (),
        "emb_65536_zipf": (),
    }


def test_the_cases_have_a_table_of_their_own() -> None:
    found = [
        Sample(1, "emb_4096", who, Figure(ms))
        for who, ms in (("shm", 2.0), ("tcp", 4.0), ("tf", 6.0), ("torch", 8.0), ("ray", 5.0))
    ] + [Sample(1, "emb_4096_zipf", "shm", Figure(1.5))]
    lines = tables(Results(found), [Case("emb_4096"), Case("emb_4096_zipf")]).splitlines()
    assert lines[4:] == [
        "| emb_4096 | 2 | 4 | 6 | 8 | 5 | 2.50× (≥ 2×, met) | 1.50× (≥ 1.5×, met) |",
        "| emb_4096_zipf | 1.5 | – | – | – | – | – | – |",
    ]
    assert len({line.count("|") for line in lines[2:]}) == 1


@pytest.mark.parametrize("shards", [1, 2])
def test_new_ids_are_new_and_of_the_shard(shards: int) -> None:
    batches = [new_ids(batch, shards - 1, shards) for batch in range(3)]
    together = np.concatenate(batches)
    assert len(np.unique(together)) == len(together) > 3 * 65_000
    assert (shard_of(together, shards) == shards - 1).all()
    assert all((np.diff(ids) > 0).all() for ids in batches)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["SGD", "Adam"])
def test_a_shard_is_measured(optimizer: str) -> None:
    sample = measure_shard(optimizer, 0, 2, 150_000)
    assert sample.rows == 150_000
    assert sample.nbytes > 4 * WIDTH * 150_000
    assert sample.rows_per_s > 0
    assert len(known_ids(False, 150_000, 0, 2)) > 60_000
    assert 1_000 < sample.zipf_rows < 65_536


def test_the_table() -> None:
    lines = table_of(
        [TableSample("Adam", 10_000_000, 1.5e6, 1.2e6, 95.0, 4.2, 3.1, 30_000, 2_400_000_000)]
    ).splitlines()
    assert lines[2] == (
        "| Adam, 10.0 M | 1.50 M (met) | 1.20 M | 95 ms | 4.2 ms (met) | 3.1 ms (30,000 ids) "
        "| 240 (≤ 282, met) | 2400 MB |"
    )
    assert lines[0].count("|") == lines[2].count("|")
