"""The examples with embedding tables: what jobs they are, and that they learn on a real cluster."""

from __future__ import annotations

from pathlib import Path

import pytest

from psrpc.core.errors import InvalidJob
from tests.e2e.cluster import EXAMPLES, up
from worker.describe.describe import describe
from worker.job.loader import load_job

pytestmark = pytest.mark.slow

MOVIELENS, CRITEO = EXAMPLES / "movielens.py", EXAMPLES / "criteo_deepfm.py"


@pytest.mark.parametrize(("network", "dense"), [("factors", 1), ("towers", 1 + 4 * (32 * 32 + 32))])
def test_movielens_is_a_job(network: str, dense: int) -> None:
    document = describe(load_job(MOVIELENS, ["data=synthetic", f"network={network}"]))
    assert (document["train_records"], document["eval_records"]) == (18_000, 2_000)
    tables = {table["name"]: table for table in document["tables"]}
    assert {name: table["width"] for name, table in tables.items()} == {"users": 33, "items": 33}
    assert {name: table["vocabulary"] for name, table in tables.items()} == {
        "users": 400,
        "items": 300,
    }
    assert all(table["optimizer"]["class_name"] == "Adam" for table in tables.values())
    assert sum(size(variable) for variable in document["variables"]) == dense
    assert document["metrics"] == ["loss", "rmse"]


def size(variable: dict[str, list[int]]) -> int:
    count = 1
    for length in variable["shape"]:
        count *= length
    return count


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ([], r"movielens.py: this example needs ratings: download .*--set data="),
        (["data=absent/u.data"], r"there is no file 'absent/u.data'"),
        (["data=synthetic", "network=tower"], "network=tower: expected factors or towers"),
    ],
)
def test_options_that_movielens_needs(settings: list[str], says: str) -> None:
    with pytest.raises(InvalidJob, match=says):
        load_job(MOVIELENS, settings)


def test_movielens_learns(tmp_path: Path) -> None:
    """In sync mode; the other example is async."""
    mode = ("--mode", "sync", "--replicas", "2")
    settings = ("--set", "data=synthetic", "--set", "epochs=2")
    run = up(MOVIELENS, tmp_path / "run", "--shards", "2", "--workers", "1", *mode, *settings)
    # The ratings' standard deviation is 1.03, of which 0.58 cannot be predicted.
    assert 0.58 < run.summary["eval"]["rmse"] < 0.85


def test_criteo_is_a_job() -> None:
    document = describe(load_job(CRITEO, ["rows=10000", "eval_rows=500"]))
    assert (document["train_records"], document["eval_records"]) == (10_000, 500)
    (table,) = document["tables"]
    assert (table["name"], table["width"], table["vocabulary"]) == ("categories", 9, None)
    assert table["optimizer"]["class_name"] == "RowwiseAdagrad"
    vectors = 39 * 8
    dense = (13 + 1) + 13 * 8 + (vectors * 64 + 64) + (64 * 64 + 64) + (64 + 1)
    assert sum(size(variable) for variable in document["variables"]) == dense


def test_criteo_reads_a_file(tmp_path: Path) -> None:
    from examples.criteo.generate import main

    path = tmp_path / "clicks.tsv"
    main(["--rows", "700", "--to", str(path)])
    settings = [f"data={path}", "eval_rows=100"]
    job = load_job(CRITEO, settings).job
    made = load_job(CRITEO, ["rows=600", "eval_rows=100"]).job
    assert job.eval is not None
    assert made.eval is not None
    assert (job.train.num_records, job.eval.num_records) == (600, 100)
    assert load_job(CRITEO, [*settings, "rows=50"]).job.train.num_records == 50
    for ours, theirs in ((job.train, made.train), (job.eval, made.eval)):
        (x, y), (expected, labels) = ours.read_range(3, 99), theirs.read_range(3, 99)
        assert (x["categorical"] == expected["categorical"]).all()
        assert (x["numeric"] == expected["numeric"]).all()
        assert (y == labels).all()
    assert job.train.fingerprint() != made.train.fingerprint()
    with pytest.raises(InvalidJob, match="700 records, eval_rows is 700; none is left"):
        load_job(CRITEO, [f"data={path}", "eval_rows=700"])


def test_criteo_learns(tmp_path: Path) -> None:
    settings = ["rows=20000", "eval_rows=5000", "batch_size=500", "truth_seed=2"]
    words = [word for setting in settings for word in ("--set", setting)]
    run = up(CRITEO, tmp_path / "run", "--shards", "2", "--workers", "1", *words)
    # So few records come to about half of what there is to know.
    assert run.summary["eval"]["auc"] > 0.6
