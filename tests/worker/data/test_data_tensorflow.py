"""Data that TensorFlow reads or makes: TFRecord files and functions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from psrpc.core.batch import BatchId
from psrpc.core.errors import InvalidJob
from worker import Arrays, Batch, Function, Ragged, TfRecords

pytestmark = pytest.mark.slow


def example(number: int) -> bytes:
    features = {
        "x": tf.train.Feature(float_list=tf.train.FloatList(value=[number, number / 2])),
        "y": tf.train.Feature(int64_list=tf.train.Int64List(value=[number])),
    }
    serialized: bytes = tf.train.Example(
        features=tf.train.Features(feature=features)
    ).SerializeToString()
    return serialized


def parse(serialized: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    found = tf.io.parse_single_example(
        serialized,
        {"x": tf.io.FixedLenFeature([2], tf.float32), "y": tf.io.FixedLenFeature([], tf.int64)},
    )
    return found["x"], found["y"]


@pytest.fixture
def records(tmp_path: Path) -> Path:
    for part in range(3):
        with tf.io.TFRecordWriter(str(tmp_path / f"part-{part}.tfrecord")) as writer:
            for number in range(part * 10, part * 10 + 10):
                writer.write(example(number))
    return tmp_path


@pytest.fixture
def open_records() -> Iterator[Callable[..., TfRecords]]:
    opened = []

    def make(*args: Any, **options: Any) -> TfRecords:
        opened.append(TfRecords(*args, **options))
        return opened[-1]

    yield make
    for source in opened:
        source.close()


def test_records_of_all_files_are_shuffled_one_by_one(
    records: Path, open_records: Callable[..., TfRecords]
) -> None:
    data = open_records(records / "part-*.tfrecord", parse)
    assert data.num_records == 30
    labels: list[int] = []
    for first in range(0, 30, 7):
        x, y = data.read(0, BatchId(0, first, min(7, 30 - first)))
        assert x.flags.c_contiguous
        assert (x[:, 1] == y / 2).all()
        labels += y.tolist()
    # The same order as arrays have.
    assert labels == Arrays(np.zeros(30), np.arange(30)).read(0, BatchId(0, 0, 30))[1].tolist()
    assert data.read_range(8, 12)[1].tolist() == [8, 9, 10, 11]
    data.close()
    assert data.read_range(29, 30)[1].tolist() == [29]


def test_the_order_of_files_is_that_of_their_names_or_of_the_list(
    records: Path, open_records: Callable[..., TfRecords]
) -> None:
    named = [records / "part-2.tfrecord", records / "part-0.tfrecord"]
    data = open_records(named, parse)
    assert data.read_range(0, 1)[1].tolist() == [20]
    assert data.fingerprint() != open_records(named[::-1], parse).fingerprint()


def test_damaged_files_are_named(records: Path, open_records: Callable[..., TfRecords]) -> None:
    path = records / "part-0.tfrecord"
    whole = path.read_bytes()
    length = 12 + len(example(0)) + 4
    path.write_bytes(whole[:-1])
    with pytest.raises(InvalidJob, match=r"part-0.tfrecord' ends inside record 9, .* byte \d+"):
        _ = open_records(path, parse).num_records
    # A length that is wrong and yet stays inside the file.
    path.write_bytes(whole[:length] + bytes([whole[length] ^ 1]) + whole[length + 1 :])
    with pytest.raises(InvalidJob, match=f"is damaged at byte {length}, record 1"):
        _ = open_records(path, parse).num_records
    path.write_bytes(b"this is no TFRecord file at all")
    with pytest.raises(InvalidJob, match="no TFRecord file"):
        _ = open_records(path, parse).num_records
    with pytest.raises(InvalidJob, match="no file matches"):
        _ = open_records(records / "absent-*", parse).num_records
    with pytest.raises(InvalidJob, match="there is no file"):
        _ = open_records(records / "absent", parse).num_records


def test_an_empty_file_holds_no_records(
    tmp_path: Path, open_records: Callable[..., TfRecords]
) -> None:
    (tmp_path / "empty").touch()
    assert open_records(tmp_path / "empty", parse).num_records == 0


def test_parse_must_give_a_batch(records: Path, open_records: Callable[..., TfRecords]) -> None:
    data = open_records(records / "part-0.tfrecord", lambda record: parse(record)[0])
    with pytest.raises(InvalidJob, match="parse gave "):
        data.read_range(0, 3)


def numbers(start: int, stop: int) -> tf.data.Dataset:
    return tf.data.Dataset.range(start, stop).map(lambda i: ({"n": i}, i))


@pytest.mark.parametrize("batch_size", [1, 7, 10, 23, 45])
def test_a_function_gives_every_record_once(batch_size: int) -> None:
    data = Function(numbers, 45, block_records=10)
    labels: list[int] = []
    for first in range(0, 45, batch_size):
        count = min(batch_size, 45 - first)
        x, y = data.read(0, BatchId(1, first, count))
        assert len(y) == count
        assert (x["n"] == y).all()
        labels += y.tolist()
    assert sorted(labels) == list(range(45))
    assert labels == Function(numbers, 45, block_records=10).read(0, BatchId(1, 0, 45))[1].tolist()
    assert labels != Function(numbers, 45, block_records=10).read(0, BatchId(2, 0, 45))[1].tolist()


def test_few_blocks_are_kept_and_made_once_while_they_are() -> None:
    asked: list[tuple[int, int]] = []

    def make(start: int, stop: int) -> tf.data.Dataset:
        asked.append((start, stop))
        return numbers(start, stop)

    data = Function(make, 100, block_records=10)
    for first in range(0, 100, 5):
        data.read(0, BatchId(0, first, 5))
    assert sorted(asked) == [(i, i + 10) for i in range(0, 100, 10)]
    assert len(data._blocks) == 3
    data.close()
    assert not data._blocks


def test_a_function_range_is_asked_for_as_it_is() -> None:
    assert Function(numbers, 45, block_records=10).read_range(8, 23)[1].tolist() == list(
        range(8, 23)
    )


BATCHED = r"gave {}, and was asked for 10 records; leave .batch\(...\) out, or end with .unbatch"


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (
            lambda start, stop: numbers(start, stop - 2),
            r"records \[0, 10\) gave 8 records; it was asked for 10",
        ),
        (
            lambda start, stop: numbers(start, stop + 1),
            "gave more than 10 records, which it was asked for; it must end there: leave .repeat",
        ),
        (lambda start, stop: numbers(start, stop).repeat(), "gave more than 10 records"),
        (lambda _start, _stop: numbers(0, 0), "gave 0 records; it was asked for 10"),
        (lambda start, stop: numbers(start, stop).batch(5), BATCHED.format("2 batches")),
        (lambda start, stop: numbers(start, stop).batch(10).prefetch(1), BATCHED.format("1 batch")),
        # TensorFlow cannot put 4, 4 and 2 records into one tensor.
        (lambda start, stop: numbers(start, stop).batch(4), BATCHED.format("3 batches")),
        (
            lambda start, stop: tf.data.Dataset.from_generator(
                lambda: iter(numbers(start, stop).batch(5)),
                output_signature=({"n": tf.TensorSpec([None], tf.int64)}, tf.TensorSpec([None])),
            ),
            BATCHED.format("2 batches"),
        ),
        (
            lambda start, stop: numbers(start, stop).shuffle(10).map(lambda x, y: (x, y)),
            r"records \[0, 10\) is shuffled; leave .shuffle\(...\) out",
        ),
        (lambda start, stop: numbers(start, stop).take(1), "gave 1 record; it was asked for 10"),
        (lambda _start, _stop: [1, 2], "is list; expected a tf.data.Dataset"),
        (lambda start, stop: tf.data.Dataset.range(start, stop), r"expected \(x, y\)"),
    ],
)
def test_another_count_than_asked_for_names_both(make: Any, says: str) -> None:
    data = Function(make, 10, block_records=10)
    with pytest.raises(InvalidJob, match=says):
        data.read(0, BatchId(0, 0, 4))
    with pytest.raises(InvalidJob, match=says):
        data.read_range(0, 10)


def arrays(start: int, stop: int) -> Batch:
    return {"n": np.arange(start, stop)}, np.arange(start, stop)


def test_a_function_may_make_arrays() -> None:
    data, pipeline = (Function(make, 45, block_records=10) for make in (arrays, numbers))
    for batch in (BatchId(1, 0, 7), BatchId(1, 33, 12)):
        (x, y), (expected, _) = data.read(3, batch), pipeline.read(3, batch)
        assert x["n"].tolist() == y.tolist() == expected["n"].tolist()
    assert data.read_range(8, 23)[1].tolist() == list(range(8, 23))
    short = Function(lambda start, stop: arrays(start, stop - 1), 45)
    with pytest.raises(InvalidJob, match=r"\[3, 9\) gave 5 records; it was asked for 6"):
        short.read_range(3, 9)


def test_a_function_may_say_what_its_records_are() -> None:
    known = {Function(numbers, 45, content=text).fingerprint() for text in ("a", "b", "a", "")}
    assert len(known) == 3
    assert Function(numbers, 45).fingerprint() in known


@pytest.mark.parametrize(("records", "block"), [(-1, 10), (10, 0), (2.5, 10), (True, 10)])
def test_sizes_of_a_function_are_checked(records: Any, block: Any) -> None:
    with pytest.raises(InvalidJob, match="Function: "):
        Function(numbers, records, block_records=block)


# -- rows of different lengths ----------------------------------------------------------------

LENGTHS = [2, 0, 3, 1]
ROWS = Ragged.from_rows([10 * row, 10 * row + 1, 10 * row + 2][:n] for row, n in enumerate(LENGTHS))


def basket(row: int) -> bytes:
    ids = tf.train.Feature(int64_list=tf.train.Int64List(value=ROWS[row : row + 1].values))
    serialized: bytes = tf.train.Example(
        features=tf.train.Features(feature={"ids": ids})
    ).SerializeToString()
    return serialized


def parse_basket(kind: Any) -> Callable[[tf.Tensor], tuple[tf.Tensor, tf.Tensor]]:
    """Of one record or of many, by the serialized tensor."""

    def parse(serialized: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        single = serialized.shape.rank == 0
        parser = tf.io.parse_single_example if single else tf.io.parse_example
        return parser(serialized, {"ids": kind})["ids"], tf.zeros(tf.shape(serialized))

    return parse


@pytest.fixture
def baskets(tmp_path: Path) -> Path:
    with tf.io.TFRecordWriter(str(tmp_path / "baskets")) as writer:
        for row in range(len(LENGTHS)):
            writer.write(basket(row))
    return tmp_path / "baskets"


def assert_rows(found: Any, rows: list[int]) -> None:
    assert isinstance(found, Ragged)
    expected = ROWS.take(np.array(rows))
    assert found.values.tolist() == expected.values.tolist()
    assert found.row_splits.tolist() == expected.row_splits.tolist()


@pytest.mark.parametrize(
    ("kind", "batched"),
    [
        (tf.io.VarLenFeature(tf.int64), False),
        (tf.io.VarLenFeature(tf.int64), True),
        (tf.io.RaggedFeature(tf.int64), True),
    ],
)
def test_records_of_different_lengths_are_ragged_in_the_same_order(
    kind: Any, batched: bool, baskets: Path, open_records: Callable[..., TfRecords]
) -> None:
    data = open_records(baskets, parse_basket(kind), batched=batched)
    order = Arrays(np.zeros(4), np.arange(4)).read(0, BatchId(1, 0, 4))[1].tolist()
    assert_rows(data.read(0, BatchId(1, 0, 3))[0], order[:3])
    assert_rows(data.read(0, BatchId(1, 3, 1))[0], order[3:])
    assert_rows(data.read_range(1, 4)[0], [1, 2, 3])


def test_dense_tensors_of_different_lengths_are_refused_with_what_to_do(
    baskets: Path, open_records: Callable[..., TfRecords]
) -> None:
    data = open_records(baskets, parse_basket(tf.io.RaggedFeature(tf.int64)))
    with pytest.raises(InvalidJob, match=r"different lengths; .*VarLenFeature.*batched=True"):
        data.read_range(0, 4)

    def lines() -> Iterator[list[int]]:
        yield from ([0] * length for length in LENGTHS)

    dense = tf.data.Dataset.from_generator(lines, output_signature=tf.TensorSpec([None], tf.int64))
    made = Function(lambda _first, _stop: dense, 4)
    with pytest.raises(InvalidJob, match=r"different lengths; return .*ragged_batch"):
        made.read_range(0, 4)


def test_a_sparse_record_with_gaps_is_refused(
    baskets: Path, open_records: Callable[..., TfRecords]
) -> None:
    def parse(serialized: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        ids, zero = parse_basket(tf.io.VarLenFeature(tf.int64))(serialized)
        return tf.SparseTensor(ids.indices + 1, ids.values, ids.dense_shape + 1), zero

    with pytest.raises(tf.errors.InvalidArgumentError, match="not filled from its start"):
        open_records(baskets, parse).read_range(0, 4)


@pytest.mark.parametrize(
    "of",
    [
        lambda rows: rows,
        lambda rows: tf.RaggedTensor.from_row_splits(rows.values, rows.row_splits),
        lambda rows: tf.RaggedTensor.from_row_splits(rows.values, rows.row_splits).to_sparse(),
    ],
    ids=["numpy", "ragged", "sparse"],
)
def test_functions_give_rows_of_different_lengths_in_batches_and_in_datasets(of: Any) -> None:
    def batch(first: int, stop: int) -> Any:
        return of(ROWS[first:stop]), np.arange(first, stop)

    sources = [Function(batch, 4, block_records=2)]
    if tf.is_tensor(of(ROWS)):
        slices = tf.data.Dataset.from_tensor_slices
        sources.append(Function(lambda first, stop: slices(batch(first, stop)), 4, block_records=2))
    for source in sources:
        rows, order = source.read(0, BatchId(0, 0, 4))
        assert_rows(rows, order.tolist())
        assert_rows(source.read_range(1, 3)[0], [1, 2])
