"""A run that has ended is restored, on another number of shards, and its rows are looked up."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from pserver.lookup import RowReader
from psrpc.rows_chain import load_table
from psrpc.security import PLAINTEXT
from tests.e2e.cluster import by_hand, up
from tests.e2e.test_table_refused import JOB

pytestmark = pytest.mark.slow


def test_rows_of_a_restored_run_are_looked_up(tmp_path: Path) -> None:
    job = tmp_path / "job.py"
    job.write_text(JOB)
    with by_hand(tmp_path) as hand:
        kept = load_table(up(job, hand.run_dir, "--shards", "2").checkpoint, "things")
        more = ("--resume", "--shards", "1", "--set", "epochs=1000000")
        coordinator = hand.coordinator(job, *more)
        address = coordinator.wait_for(r"127\.0\.0\.1:\d+")[0]
        hand.start("shard", "pserver", "serve", "--shard", "0", "--coordinator", address)
        with RowReader(address, security=PLAINTEXT) as reader:
            found = reader.read("things", kept.ids[:50])
        assert found.present.all()
        np.testing.assert_array_equal(found.rows, kept.values[:50])
        asked = ("--coordinator", address, "--json", str(kept.ids[0]))
        command = hand.start("lookup", "pserver", "lookup", "things", *asked)
        assert command.wait() == 0, command.text()
        (row,) = json.loads(command.text().strip().splitlines()[-1])["rows"]
        assert row == {"id": kept.ids[0], "present": True, "row": kept.values[0].tolist()}
