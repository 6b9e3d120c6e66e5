"""Tables that evict rows, and that admit ids late, in a run of which a shard is killed: the rows,
the files of what was evicted, and what is looked up in the restored run are those of a plain
table."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from pserver.client.lookup import RowReader
from psrpc.checkpoint.manifest import read_manifest
from psrpc.checkpoint.rows_chain import load_table
from psrpc.core.batch import batches_per_epoch, cut_batch
from psrpc.core.tables import Rows, TableSpec, shard_of
from psrpc.security.credentials import PLAINTEXT
from tests.e2e.cluster import JOBS, Run, by_hand
from tests.e2e.test_recovery import EPOCHS, faulty
from tests.e2e.test_table_files import export
from tests.pserver.tables.table_cases import Model, Row

pytestmark = pytest.mark.slow

EVICTING = JOBS / "evicting.py"
SHARDS = 2


class Plain:
    """A table in one process: a dict of rows for each shard, which has its part of ``max_rows``."""

    def __init__(self, spec: TableSpec) -> None:
        limit = spec.max_rows and spec.max_rows // SHARDS
        self._shards = [Model(replace(spec, max_rows=limit)) for _ in range(SHARDS)]

    def apply(self, rows: Rows, version: int) -> None:
        owners = shard_of(rows.ids, SHARDS)
        for shard, model in enumerate(self._shards):
            mine = owners == shard
            model.apply(Rows(rows.ids[mine], rows.values[mine]), 1.0, version)

    @property
    def rows(self) -> dict[int, Row]:
        return self._shards[0].rows | self._shards[1].rows

    @property
    def evicted(self) -> dict[int, Row]:
        """As they were when they were evicted last."""
        return self._shards[0].evicted | self._shards[1].evicted

    def read(self, id_: int) -> list[float]:
        """The initial value, where it has no row."""
        row: list[float] = (
            self._shards[int(shard_of(np.array([id_]), SHARDS)[0])].read(id_).tolist()
        )
        return row


def trained(specs: tuple[TableSpec, ...]) -> dict[str, Plain]:
    """The job's result, an update at a time."""
    from tests.e2e.jobs import evicting

    job, tables = evicting.job, {spec.name: Plain(spec) for spec in specs}
    per_epoch = batches_per_epoch(evicting.RECORDS, evicting.BATCH)
    for step in range(EPOCHS * per_epoch):
        epoch, index = divmod(step, per_epoch)
        batch = cut_batch(epoch, index, evicting.RECORDS, evicting.BATCH)
        x, worth = job.train.read(job.seed, batch)
        ids, places = np.unique(x, return_inverse=True)
        sums = np.bincount(places.ravel(), np.repeat(worth, x.shape[1])).astype(np.float32)
        values = np.repeat(-sums[:, np.newaxis] / np.float32(evicting.BATCH), 2, axis=1)
        for table in tables.values():
            table.apply(Rows(ids, values), step + 1)
    return tables


def assert_rows(ids: np.ndarray, rows: np.ndarray, expected: dict[int, Row]) -> None:
    assert ids.tolist() == sorted(expected)
    np.testing.assert_array_equal(rows, [expected[id_].value for id_ in ids.tolist()])


def finished(folder: Path) -> Run:
    """A run of which a shard was killed."""
    with faulty(folder, "--set", "keep_checkpoints=2", job=EVICTING) as cluster:
        generation = cluster.until_trained(after=0)
        cluster.kill("pserver")
        cluster.until_trained(after=generation)
        return cluster.end()


def test_evictions_and_admissions_match_a_plain_table_after_a_loss(
    tmp_path: Path,
) -> None:
    run = finished(tmp_path)
    tables = trained(read_manifest(run.checkpoint).plan.tables)
    assert {name: len(table.evicted) > 150 for name, table in tables.items()} == {
        "aged": True,
        "frequent": True,
        "rare": False,
    }
    for name, table in tables.items():
        found = load_table(run.checkpoint, name)
        assert_rows(found.ids, found.values, table.rows)
        assert found.counts.tolist() == [table.rows[id_].count for id_ in found.ids.tolist()]

    export(run, "--evicted", tmp_path / "evicted")
    assert {path.stem for path in (tmp_path / "evicted").iterdir()} == {"aged", "frequent"}
    for name in ("aged", "frequent"):
        file = load_file(tmp_path / "evicted" / f"{name}.safetensors")
        assert_rows(file["ids"], file["rows"], tables[name].evicted)

    assert_looked_up(tmp_path, tables)


def assert_looked_up(folder: Path, tables: dict[str, Plain]) -> None:
    """The run is restored on one shard, and has these rows and no others."""
    from tests.e2e.jobs import evicting

    ids = np.unique(evicting.x)
    with by_hand(folder) as hand:
        more = ("--resume", "--shards", "1", "--set", "epochs=1000000")
        address = hand.coordinator(EVICTING, *more).wait_for(r"127\.0\.0\.1:\d+")[0]
        hand.start("shard", "pserver", "serve", "--shard", "0", "--coordinator", address)
        with RowReader(address, security=PLAINTEXT) as reader:
            for name, table in tables.items():
                found = reader.read(name, ids)
                assert found.present.tolist() == [id_ in table.rows for id_ in ids.tolist()]
                expected = [table.read(id_) for id_ in ids.tolist()]
                np.testing.assert_array_equal(found.rows, np.array(expected, np.float32))
        watching = ("--coordinator", address, "--watch", "--json")
        rows = sum(len(table.rows) for table in tables.values())
        hand.start("status", "coordinator", "status", *watching).wait_for(
            rf'"table_rows": {rows}, "table_nbytes": [1-9]'
        )
        table = tables["aged"]
        there, gone = min(table.rows), min(table.evicted.keys() - table.rows)
        asked = ("--coordinator", address, "--json", str(there), str(gone))
        command = hand.start("lookup", "pserver", "lookup", "aged", *asked)
        assert command.wait() == 0, command.text()
        first, second = json.loads(command.text().strip().splitlines()[-1])["rows"]
        assert first == {"id": there, "present": True, "row": table.read(there)}
        assert second == {"id": gone, "present": False, "row": table.read(gone)}
