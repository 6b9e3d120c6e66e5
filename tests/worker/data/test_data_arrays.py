"""Arrays and .npz files: what is read, in which order, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from psrpc.core.batch import BatchId, batches_per_epoch, cut_batch
from psrpc.core.errors import InvalidJob
from worker import Arrays, Batch, DataSource, Npz, Ragged


def source(records: int = 23, **options: Any) -> Arrays:
    x = np.arange(records * 2, dtype=np.float32).reshape(records, 2)
    return Arrays(x, np.arange(records), **options)


def epoch_labels(data: DataSource, seed: int, epoch: int, batch_size: int) -> list[int]:
    """The labels of an epoch's batches, in order; they are the records' numbers."""
    labels: list[int] = []
    for index in range(batches_per_epoch(data.num_records, batch_size)):
        batch = cut_batch(epoch, index, data.num_records, batch_size)
        x, y = data.read(seed, batch)
        assert len(x) == len(y) == batch.count
        labels += y.tolist()
    return labels


def test_an_epoch_holds_every_record_once_in_its_own_order() -> None:
    data = source()
    first, second = (epoch_labels(data, 0, epoch, 5) for epoch in (0, 1))
    assert sorted(first) == sorted(second) == list(range(23))
    assert first != second
    # Positions decide, not how batches are cut.
    assert epoch_labels(data, 0, 0, 7) == first
    assert epoch_labels(source(), 0, 0, 23) == first


def test_x_and_y_stay_together_and_are_contiguous() -> None:
    x, y = source().read(3, BatchId(0, 4, 6))
    assert (x[:, 0] == 2 * y).all()
    assert x.flags.c_contiguous
    assert y.flags.c_contiguous


def test_a_range_is_in_the_order_of_the_source() -> None:
    assert source().read_range(3, 7)[1].tolist() == [3, 4, 5, 6]


def test_inputs_may_be_nested_and_weighted() -> None:
    x = {"a": np.arange(10), "b": (np.arange(10) * 2, np.arange(10) * 3)}
    data = Arrays(x, np.arange(10), np.arange(10) / 10)
    inputs, y, weight = data.read(0, BatchId(0, 2, 3))
    assert (inputs["a"] == y).all()
    assert (inputs["b"][1] == 3 * y).all()
    assert (weight == y / 10).all()


def test_a_map_sees_whole_batches() -> None:
    def add(x: np.ndarray, y: np.ndarray) -> Batch:
        return x.sum(axis=1), y + 1

    x, y = source(map=add).read_range(0, 4)
    assert x.tolist() == [1, 5, 9, 13]
    assert y.tolist() == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("mapped", "says"),
    [
        (lambda x, y: (x[:-1], y), "map gave 3 records; it was asked for 4"),
        (lambda x, _y: x, "map gave ndarray; expected (x, y)"),
        (lambda x, y: (x, y, x, y), "map gave 4 parts; expected (x, y)"),
        (lambda x, y: (x, y.sum()), "map gave a scalar; it was asked for 4"),
    ],
)
def test_a_map_must_keep_the_batch_whole(mapped: Any, says: str) -> None:
    with pytest.raises(InvalidJob) as raised:
        source(map=mapped).read_range(0, 4)
    assert says in str(raised.value)


@pytest.mark.parametrize("strings", [["a", "", "\u00e4b"], [b"a", b"\xe4", b""]])
def test_strings_as_pandas_has_them(strings: list[Any]) -> None:
    data = Arrays(np.array(strings, object), np.zeros(3))
    x, _ = data.read_range(0, 3)
    assert x.tolist() == strings
    assert not x.dtype.hasobject


@pytest.mark.parametrize(
    ("x", "y", "says"),
    [
        (np.zeros((5, 2)), np.zeros(4), "lengths: x has 5 records, y has 4 records; expected one"),
        (
            {"u": np.zeros(2), "g": (np.zeros(2), Ragged.from_rows([[1]]))},
            np.zeros(2),
            "x['g'][0] has 2 records, x['g'][1] has 1 record, y has 2 records",
        ),
        (np.zeros(3), np.float32(1), "Arrays: y is 1.0; expected an array with one row per record"),
        ({"u": [None] * 2}, np.zeros(2), "Arrays: x['u'][0] is None; expected an array with one"),
        (
            {"u": np.array([None] * 2)},
            np.zeros(2),
            "x['u'] has dtype object and shape (2,), w",
        ),
        (
            np.array([[1], "a", "b", None], object),
            np.zeros(4),
            "[1] at record 0, 'a' at record 1, None at record 3; exp",
        ),
        (
            Ragged.from_rows([["a"], [None]]),
            np.zeros(2),
            "(2, None), with 'a' at record 0 column 0, None at record 1 column 0; ",
        ),
        (
            Ragged.from_rows([[1, 2], [], [3, "n/a"]], object),
            np.zeros(3),
            "(3, None), with 1 at record 0 column 0, 'n/a' at record 2 column 1; ",
        ),
        (
            np.array([[1.5, 2.5, 3.5], [4.5, 5.5, "n/a"]], object),
            np.zeros(2),
            "dtype object and shape (2, 3), with 1.5 at record 0 column 0, 'n/a' at record 1 "
            "column 2; expected",
        ),
    ],
)
def test_values_that_are_no_arrays_are_named(x: Any, y: Any, says: str) -> None:
    with pytest.raises(InvalidJob) as raised:
        Arrays(x, y)
    assert says in str(raised.value)
    assert raised.value.code == "PS106"


@pytest.mark.parametrize("batch", [BatchId(0, 20, 4), BatchId(0, 23, 1), BatchId(0, 0, 0)])
def test_positions_outside_the_data_are_refused(batch: BatchId) -> None:
    with pytest.raises(InvalidJob, match="Arrays has 23 records"):
        source().read(0, batch)


def test_fingerprints_tell_contents_apart() -> None:
    x, y = np.arange(12.0).reshape(6, 2), np.arange(6)
    same = Arrays(x, y).fingerprint()
    assert Arrays(x.copy(), y.copy()).fingerprint() == same
    changed = x.copy()
    changed[4, 1] += 1
    others = [Arrays(changed, y), Arrays(x.astype(np.float32), y), Arrays(x.reshape(6, 1, 2), y)]
    assert len({same, *(other.fingerprint() for other in others)}) == 4


@pytest.fixture
def npz(tmp_path: Path) -> Path:
    path = tmp_path / "data.npz"
    np.savez(path, x=np.arange(20).reshape(10, 2), z=np.arange(10) * 2, y=np.arange(10))
    return path


def test_npz_reads_what_arrays_read(npz: Path) -> None:
    data = Npz(npz)
    assert data.num_records == 10
    expected = Arrays(np.arange(20).reshape(10, 2), np.arange(10)).read(1, BatchId(2, 3, 5))
    x, y = data.read(1, BatchId(2, 3, 5))
    assert (x == expected[0]).all()
    assert (y == expected[1]).all()
    data.close()
    assert data.read_range(2, 3)[1].tolist() == [2]


def test_npz_takes_several_inputs_and_a_part_of_the_file(npz: Path) -> None:
    data = Npz(npz, x={"pair": "x", "double": "z"}, sample_weight="z", records=(4, 8))
    assert data.num_records == 4
    x, y, weight = data.read_range(0, 2)
    assert x["double"].tolist() == weight.tolist() == [8, 10]
    assert x["pair"].tolist() == [[8, 9], [10, 11]]
    assert y.tolist() == [4, 5]


@pytest.mark.parametrize(
    "records", [100, 0, (5,), (3, 3), (4, 2), (-2, 4), (0.0, 5.0), (0, 5, 1), "05"]
)
def test_records_of_an_npz_are_a_pair(records: Any) -> None:
    """The file has nothing to do with it, and is not even there."""
    with pytest.raises(InvalidJob) as raised:
        Npz("a.npz", records=records)
    said = str(raised.value)
    assert said.startswith(f"Npz: records is {records!r}; expected a pair (start, stop)")
    assert said.endswith(": records=(0, 100) takes the first 100") == (records == 100)


def test_records_of_an_npz_may_be_numpys(npz: Path) -> None:
    start, stop = np.array([2, 5])
    assert Npz(npz, records=(start, stop)).read_range(0, 3)[1].tolist() == [2, 3, 4]


def test_npz_says_what_is_wrong(npz: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidJob, match="no file"):
        Npz(tmp_path / "absent.npz").read_range(0, 1)
    with pytest.raises(InvalidJob, match="has no array 'label'; it has x, z, y"):
        _ = Npz(npz, y="label").num_records
    with pytest.raises(
        InvalidJob,
        match=r"records is \(5, 20\), and array 'x' of '.*' has 10 records; expected a stop of at "
        "most 10",
    ):
        _ = Npz(npz, records=(5, 20)).num_records
    for name, content in (("text.npz", b"hello"), ("cut.npz", npz.read_bytes()[:200])):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(InvalidJob, match=rf"{name}' is no .npz file, or a damaged one") as said:
            _ = Npz(tmp_path / name).num_records
        assert "pickle" not in str(said.value)
    with (tmp_path / "one.npy").open("wb") as file:
        np.save(file, np.zeros(3))
    with pytest.raises(InvalidJob, match=r"one.npy' is no .npz file"):
        _ = Npz(tmp_path / "one.npy").num_records


def test_npz_never_unpickles(tmp_path: Path) -> None:
    np.savez(tmp_path / "o.npz", x=np.array([{"a": 1}], object), y=np.zeros(1))
    with pytest.raises(InvalidJob, match=r"as .npz: it has an array of Python objects; save"):
        _ = Npz(tmp_path / "o.npz").num_records


def test_npz_fingerprint_is_of_contents_and_settings_not_of_the_place(
    npz: Path, tmp_path: Path
) -> None:
    same = Npz(npz).fingerprint()
    copy = tmp_path / "elsewhere.npz"
    copy.write_bytes(npz.read_bytes())
    assert Npz(copy).fingerprint() == same
    assert Npz(npz, x="z").fingerprint() != same
    content = bytearray(npz.read_bytes())
    content[200] ^= 1
    copy.write_bytes(content)
    assert Npz(copy).fingerprint() != same


def test_large_files_are_hashed_by_pieces(tmp_path: Path) -> None:
    from worker.data.files import hash_files

    path = tmp_path / "large"
    with path.open("wb") as file:
        file.truncate(70 << 20)
    same = hash_files([path])
    assert hash_files([path]) == same
    with path.open("r+b") as file:
        file.seek((70 << 20) - 10)
        file.write(b"x")
    assert hash_files([path]) != same
