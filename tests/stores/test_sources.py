"""Data sources that read objects of S3."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from psrpc.core.batch import BatchId
from psrpc.core.errors import InvalidData
from psrpc.files import remote
from tests.stores.conftest import Bucket
from worker import Csv, Npz, Parquet, TfRecords
from worker.data import csv as data_csv
from worker.data import files as data_files
from worker.data.tfrecord import masked_crc32c

pytestmark = pytest.mark.slow

CSV = "a,y\n" + "".join(f"{i},{i % 3}\n\n" for i in range(50))


def parse(record: Any) -> Any:
    number = tf.strings.to_number(tf.strings.strip(record), tf.int64)
    return number, number


def records(numbers: range) -> bytes:
    """A TFRecord file of numbers, as text of several lengths."""
    return b"".join(map(record, numbers))


def record(number: int) -> bytes:
    data = str(number).ljust(number % 7).encode()
    length = len(data).to_bytes(8, "little")
    checksum = int(masked_crc32c(np.frombuffer(length, np.uint8)[np.newaxis])[0])
    return length + checksum.to_bytes(4, "little") + data + bytes(4)


@pytest.mark.parametrize("window", [11, 1 << 5, 1 << 25])
def test_tfrecords_give_the_batches_that_local_files_give(
    tmp_path: Path, bucket: Bucket, window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "WINDOW_NBYTES", window)
    monkeypatch.setattr(remote, "_PIECE_NBYTES", 9)
    for part in range(3):
        data = records(range(part * 10, part * 10 + 10))
        (tmp_path / f"part-{part}").write_bytes(data)
        bucket.put(f"train/part-{part}", data)
    bucket.put("train/another", b"no records")
    here = TfRecords(f"{tmp_path}/part-*", parse)
    there = TfRecords(bucket.url("train/part-*"), parse)
    mixed = TfRecords(
        [bucket.url("train/part-0"), tmp_path / "part-1", f"file://{tmp_path}/part-2"], parse
    )
    for source in (there, mixed):
        assert source.num_records == 30
        for first in (0, 8, 16):
            batch = BatchId(1, first, 8)
            assert source.read(3, batch)[0].tolist() == here.read(3, batch)[0].tolist()
        source.close()
    here.close()


@pytest.mark.parametrize("scan", [7, 1 << 24])
def test_csv_gives_the_lines_that_a_local_file_gives(
    tmp_path: Path, bucket: Bucket, scan: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data_csv, "_SCAN_NBYTES", scan)
    monkeypatch.setattr(remote, "WINDOW_NBYTES", 16)
    (tmp_path / "data.csv").write_text(CSV)
    here = Csv(tmp_path / "data.csv", y="y")
    there = Csv(bucket.put("data.csv", CSV.encode()), y="y")
    assert there.num_records == 50
    for first in (0, 25):
        ours, theirs = (source.read(3, BatchId(0, first, 25)) for source in (there, here))
        np.testing.assert_array_equal(ours[0], theirs[0])
        np.testing.assert_array_equal(ours[1], theirs[1])
    here.close()


def test_parquet_gives_the_records_that_local_files_give(tmp_path: Path, bucket: Bucket) -> None:
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    for part in range(2):
        numbers = list(range(part * 20, part * 20 + 20))
        path = tmp_path / f"part-{part}.parquet"
        pq.write_table(pa.table({"a": numbers, "y": numbers}), path, row_group_size=7)
        bucket.put(f"data/{path.name}", path.read_bytes())
    here = Parquet(tmp_path, y="y", mix=1)
    there = Parquet(bucket.url("data/"), y="y", mix=1)
    assert there.num_records == 40
    assert there.fingerprint() == here.fingerprint()
    for first in (0, 20):
        ours, theirs = (source.read(3, BatchId(0, first, 20)) for source in (there, here))
        np.testing.assert_array_equal(ours[0], theirs[0])
        np.testing.assert_array_equal(ours[1], theirs[1])
    here.close()
    bucket.put("data/part-1.parquet", b"PAR1")
    with pytest.raises(InvalidData, match="it was changed since it was opened"):
        there.read_range(20, 40)


def test_npz_is_read_by_way_of_a_copy_that_is_removed(
    tmp_path: Path, bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    file = io.BytesIO()
    np.savez(file, x=np.arange(12).reshape(6, 2), y=np.arange(6))
    source = Npz(bucket.put("deep/data.npz", file.getvalue()))
    assert source.num_records == 6
    assert source.read_range(2, 4)[0].tolist() == [[4, 5], [6, 7]]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("nbytes", [0, 1, 1000, 5000])
def test_a_fingerprint_is_of_the_contents_wherever_they_lie(
    tmp_path: Path, bucket: Bucket, nbytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data_files, "_PIECE_NBYTES", 64)
    monkeypatch.setattr(data_files, "_PIECES", 32)
    monkeypatch.setattr(data_files, "_PIECES_AT_ONCE", 5)
    data = np.random.default_rng(0).bytes(nbytes)
    (tmp_path / "part").write_bytes(data)
    url = bucket.put("part", data)
    there, here = (TfRecords(name, parse).fingerprint() for name in (url, tmp_path / "part"))
    assert there == here
    bucket.put("part", data + b"x")
    assert TfRecords(url, parse).fingerprint() != here


def test_missing_objects_are_named(bucket: Bucket) -> None:
    with pytest.raises(InvalidData, match=f"Csv: there is no file 's3://{bucket.name}/no.csv'"):
        _ = Csv(bucket.url("no.csv"), y="y").num_records
    with pytest.raises(InvalidData, match=r"Npz: there is no file 's3://no-such-bucket/x.npz'"):
        _ = Npz("s3://no-such-bucket/x.npz").num_records
    with pytest.raises(InvalidData, match=r"TfRecords: no file matches 's3://.*/no-"):
        _ = TfRecords(bucket.url("no-*"), parse).num_records


def test_an_object_that_has_become_shorter_is_named(bucket: Bucket) -> None:
    url = bucket.put("data.csv", CSV.encode())
    source = Csv(url, y="y")
    assert source.num_records == 50
    for kept in (-4, 20):
        bucket.put("data.csv", CSV[:kept].encode())
        with pytest.raises(InvalidData, match=rf"{url} .*it was changed since it was") as no:
            source.read_range(0, 50)
        assert no.value.code == "PS109"


def test_a_url_in_a_path_is_named() -> None:
    with pytest.raises(InvalidData, match=r"'s3:/bucket/x.csv' is a URL in a Path, which takes"):
        _ = Csv(Path("s3://bucket/x.csv"), y="y").num_records
