"""Tables that cannot go on: redefined, damaged or full. One clear line, and the rows stay as they
are."""

from __future__ import annotations

import hashlib
import re
import shutil
from pathlib import Path

import pytest

from psrpc.checkpoint.rows_chain import load_table
from tests.e2e.cluster import up

pytestmark = pytest.mark.slow

JOB = """
import os
import keras, numpy as np
from worker import Arrays, Embedding, Job
rng = np.random.default_rng(5)
x = rng.integers(0, 300, (200, 3))
y = rng.normal(size=(200, 1)).astype("float32")
TABLE = eval(os.environ.get("TABLE", "{}"))
def model():
    ids = keras.Input((3,), dtype="int64")
    rows = Embedding(**({"width": 4, "name": "things", "optimizer": "sgd"} | TABLE))(ids)
    return keras.Model(ids, keras.layers.Dense(1)(keras.layers.Flatten()(
        keras.layers.GlobalAveragePooling1D()(keras.layers.Dense(2)(rows)))))
job = Job(model=model, loss="mse", optimizer="sgd", train=Arrays(x, y), batch_size=20, epochs=1,
          engine="numpy")
"""

SHARDS = ("--shards", "2")


def digests(run_dir: Path) -> dict[str, str]:
    """Of all files of all checkpoints."""
    return {
        str(path): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted((run_dir / "checkpoints").glob("*/*"))
    }


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that has ended; its job file is beside it."""
    root = tmp_path_factory.mktemp("trained")
    (root / "job.py").write_text(JOB)
    run = up(root / "job.py", root / "run", *SHARDS)
    assert load_table(run.checkpoint, "things").ids.size > 100
    return root


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ('{"width": 5}', "width 4; the job has it with 5: set it back, or give"),
        (
            '{"optimizer": keras.optimizers.SGD(momentum=0.9)}',
            "optimizer 'SGD'; the job has it with 'SGD with momentum' (its own, or the job's",
        ),
    ],
)
def test_a_table_that_was_redefined(trained: Path, change: str, why: str) -> None:
    """tests/psrpc/checkpoint/test_rows.py has every way to redefine one."""
    before = digests(trained / "run")
    more = ("--resume", "--set", "epochs=2")
    run = up(trained / "job.py", trained / "run", *SHARDS, *more, check=False, TABLE=change)
    assert run.code == 2, run.stderr
    (line,) = [line for line in run.stderr.splitlines() if line.startswith("error")]
    assert "cannot resume: " in line
    assert f"table 'things' with {why}" in line
    assert digests(trained / "run") == before


def test_rows_that_cannot_be_read(trained: Path, tmp_path: Path) -> None:
    """They are damaged; tests/psrpc/checkpoint/test_rows.py has a part that is missing."""
    shutil.copytree(trained / "run", tmp_path / "run")
    for path in (tmp_path / "run" / "checkpoints").glob("*/rows-1-of-2-0.safetensors"):
        path.write_bytes(path.read_bytes()[:-1] + b"x")
    before = digests(tmp_path / "run")
    more = ("--resume", "--set", "epochs=2")
    run = up(trained / "job.py", tmp_path / "run", *SHARDS, *more, check=False)
    assert run.code == 2, run.stderr
    (line,) = [line for line in run.stderr.splitlines() if line.startswith("error")]
    why = r"cannot resume: no good checkpoint .*rows-1-of-2-0.safetensors has SHA-256"
    assert re.search(why, line)
    assert digests(tmp_path / "run") == before


def test_a_table_that_is_full_and_evicts_nothing(trained: Path, tmp_path: Path) -> None:
    limit = repr({"max_rows": 20})
    run = up(trained / "job.py", tmp_path / "run", *SHARDS, check=False, TABLE=limit)
    assert run.code == 1, run.stderr
    assert re.search(
        r"error PS508: job failed: .*table 'things' is full: shard \d of 2 has 0 rows of at most "
        r"10 \(max_rows=20\), and an update creates \d+ more; raise max_rows or min_count, "
        r"or set eviction to",
        run.stderr,
    )
    (first,) = (tmp_path / "run" / "checkpoints").iterdir()
    assert first.name == "step-00000000"
    assert load_table(first, "things").ids.size == 0
