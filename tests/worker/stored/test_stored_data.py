"""Data of ``fit`` in files, and the order in which workers read it."""

from __future__ import annotations

import itertools
import json
import mmap
import resource
import shutil
from collections import namedtuple
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import structlog
import tensorflow as tf

from psrpc.core.batch import BatchId, cut_batch
from psrpc.core.errors import InvalidData, InvalidJob, PsError
from tests.worker.described_jobs import described
from tests.worker.flat_jobs import FEATURES, RECORDS, JobStepper, make_job, noisy_model
from tests.worker.stored.test_arguments import Squares, of_sizes
from worker import Arrays, Csv, DataSource, Function, Job, Npz, Parquet, TfRecords
from worker.data.source import arrays_of
from worker.stored.arguments import FitData, prediction_data, training_data
from worker.stored.stored_data import open_stored, store
from worker.stored.stored_records import open_records

pytestmark = pytest.mark.slow

SEED = 3
NUMBERS = np.arange(10)
_Usage = namedtuple("_Usage", "total used free")


def kept(folder: Path, data: FitData) -> tuple[dict[str, Any], DataSource]:
    """The description, as the job file gets it, and the source that it opens."""
    description = json.loads(json.dumps(store(folder / "data", data, say=lambda _: None)))
    return description, open_stored(folder / "data", description)


def epoch_of(source: DataSource, epoch: int, batch_size: int = 4) -> list[list[int]]:
    """The records of each batch, by their x."""
    count = -(-source.num_records // batch_size)
    ids = [cut_batch(epoch, i, source.num_records, batch_size) for i in range(count)]
    return [source.read(SEED, each)[0].tolist() for each in ids]


def flat(batches: list[list[int]]) -> list[int]:
    return [record for batch in batches for record in batch]


def test_an_epoch_has_every_record_once_in_an_order_of_its_own(tmp_path: Path) -> None:
    description, source = kept(tmp_path, training_data(NUMBERS, NUMBERS**2, batch_size=4)[0])
    epochs = [flat(epoch_of(source, epoch)) for epoch in range(3)]
    assert all(sorted(each) == list(range(10)) for each in epochs)
    assert len(set(map(tuple, epochs))) == 3
    plain = Arrays(NUMBERS, NUMBERS)
    assert epochs == [flat(epoch_of(plain, epoch)) for epoch in range(3)]
    assert (description["steps"], description["batch_size"]) == (3, 4)
    x, y = source.read(SEED, BatchId(1, 2, 5))
    np.testing.assert_array_equal(y, x**2)


def test_without_shuffling_the_order_is_kept(tmp_path: Path) -> None:
    _, source = kept(tmp_path, training_data(NUMBERS, NUMBERS, batch_size=4, shuffle=False)[0])
    assert epoch_of(source, 0) == epoch_of(source, 7) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


def test_within_batches_each_batch_keeps_its_records(tmp_path: Path) -> None:
    _, source = kept(tmp_path, training_data(NUMBERS, NUMBERS, batch_size=4, shuffle="batch")[0])
    epochs = [epoch_of(source, epoch) for epoch in range(3)]
    for batches in epochs:
        assert [sorted(each) for each in batches] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert epochs[0] != epochs[1] != epochs[2]
    for position, record in enumerate(flat(epochs[1])):
        assert named(source, 1, position) == f"record {record}"
    # Workers read parts of a batch.
    parts = [source.read(SEED, BatchId(1, at, 2))[0].tolist() for at in range(0, 10, 2)]
    assert flat(parts) == flat(epochs[1])


def named(source: Any, epoch: int, position: int) -> str:
    return str(source.record_name(SEED, epoch, position))


@pytest.mark.parametrize("shuffle", [True, False, "batch"])
def test_fewer_steps_than_a_pass_go_on_through_it(tmp_path: Path, shuffle: bool | str) -> None:
    data, _ = training_data(NUMBERS, NUMBERS, batch_size=4, steps_per_epoch=2, shuffle=shuffle)
    _, source = kept(tmp_path, data)
    assert source.num_records == 8
    # Five epochs are four passes.
    epochs = [flat(epoch_of(source, epoch)) for epoch in range(5)]
    passes = np.reshape([record for each in epochs for record in each], (4, 10)).tolist()
    assert all(sorted(each) == list(range(10)) for each in passes)
    assert len(set(map(tuple, passes))) == (1 if shuffle is False else 4)
    for epoch, records in enumerate(epochs):
        for position, record in enumerate(records):
            assert named(source, epoch, position) == f"record {record}"
    with pytest.raises(InvalidData, match=r"has 8 records; \[6, 10\) is not a part"):
        source.read(SEED, BatchId(0, 6, 4))


def test_validation_reads_the_first_steps_alone(tmp_path: Path) -> None:
    data = prediction_data(NUMBERS, y=NUMBERS, batch_size=4, steps=2)
    _, source = kept(tmp_path, data)
    assert source.num_records == 8
    np.testing.assert_array_equal(source.read_range(0, 8)[0], NUMBERS[:8])
    with pytest.raises(InvalidData, match="8 records"):
        source.read_range(0, 9)


def is_mapped(array: Any) -> bool:
    while isinstance(array, np.ndarray):
        array = array.base
    return isinstance(getattr(array, "obj", array), mmap.mmap)


def test_workers_map_the_files_without_a_copy(tmp_path: Path) -> None:
    ragged = tf.ragged.constant([[1.0] * n for n in range(10)])
    x = {"dense": np.ones((10, 3)), "ragged": ragged}
    description, source = kept(tmp_path, training_data(x, NUMBERS, sample_weight=np.ones(10))[0])
    inner = open_records(tmp_path / "data", description["parts"])
    for each in (inner.read_range(2, 7), source.read_range(2, 7)):
        dense, *_ = [array for array in arrays_of(each) if array.ndim == 2]
        assert is_mapped(dense)
        assert not dense.flags.writeable
        assert is_mapped(each[0]["ragged"].values)
        assert is_mapped(each[1])
    assert not is_mapped(source.read(SEED, BatchId(0, 0, 3))[1])  # rows at random are copied


def test_an_array_that_is_given_twice_is_stored_once(tmp_path: Path) -> None:
    x = np.ones((1000, 10), np.float32)
    kept(tmp_path, training_data(x, (x, x[:, :5]))[0])
    sizes = sorted(each.stat().st_size // 1000 for each in (tmp_path / "data").iterdir())
    assert sizes == [20, 40]


def test_an_array_larger_than_a_piece_is_stored_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("worker.stored.columns.PIECE_NBYTES", 100)
    x = np.arange(300.0).reshape(30, 10)[:, ::2]
    _, source = kept(tmp_path, training_data(x, x, shuffle=False)[0])
    np.testing.assert_array_equal(source.read_range(0, 30)[0], x)


def test_the_fingerprint_is_that_of_the_records_and_their_order(tmp_path: Path) -> None:
    def fingerprint(name: str, x: Any, **arguments: Any) -> str:
        return kept(tmp_path / name, training_data(x, NUMBERS, **arguments)[0])[1].fingerprint()

    first = fingerprint("first", NUMBERS)
    assert fingerprint("again", NUMBERS.copy()) == first
    others = [
        fingerprint("other", NUMBERS + 1),
        fingerprint("kept", NUMBERS, shuffle=False),
        fingerprint("steps", NUMBERS, batch_size=2, steps_per_epoch=2),
    ]
    assert len({first, *others}) == 4


def test_a_torn_file_is_named(tmp_path: Path) -> None:
    _, source = kept(tmp_path, training_data(NUMBERS, NUMBERS)[0])
    file = tmp_path / "data" / "0.npy"
    file.write_bytes(file.read_bytes()[:-8])
    with pytest.raises(InvalidData, match=r"cannot be read from '.*/0.npy': .*call fit again"):
        source.read_range(0, 1)


def test_files_are_closed_and_opened_again(tmp_path: Path) -> None:
    _, source = kept(tmp_path, training_data(NUMBERS, NUMBERS)[0])
    before = epoch_of(source, 0)
    source.close()
    assert epoch_of(source, 0) == before


# PyDataset


class Counting(Squares):
    """Counts how often each batch is made."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[int] = []

    def __getitem__(self, index: int) -> tuple[Any, ...]:
        self.made.append(index)
        x, y = super().__getitem__(index)
        return x, y, np.array([len(self.made)] * len(x))


def test_batches_of_a_py_dataset_come_whole_and_in_another_order(tmp_path: Path) -> None:
    _, source = kept(tmp_path, training_data(of_sizes(4, 4, 4, 4, 2))[0])
    whole = [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [12, 13, 14, 15], [16, 17]]
    epochs = [epoch_of(source, epoch) for epoch in range(4)]
    for batches in epochs:
        assert sorted(batches) == whole
        assert batches[-1] == [16, 17]  # a short one stays the last
    assert len({str(each) for each in epochs}) > 1
    for position, record in enumerate(flat(epochs[1])):
        assert named(source, 1, position) == f"record {record}"


def test_batches_of_a_py_dataset_are_made_once_for_their_parts(tmp_path: Path) -> None:
    _, source = kept(tmp_path, training_data(Counting(), shuffle=False)[0])
    parts = [source.read(SEED, BatchId(0, at, 2)) for at in (0, 2, 4, 6, 8)]
    assert [each[0].tolist() for each in parts] == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9]]
    # Two were made to measure them, and one to look for labels.
    made = [int(each[2][0]) for each in parts]
    assert made == [3, 3, 4, 4, 5]
    # A batch across batches, as a last short one leads to.
    assert source.read(SEED, BatchId(0, 3, 6))[0].tolist() == [3, 4, 5, 6, 7, 8]


def test_a_py_dataset_whose_batches_differ_is_refused(tmp_path: Path) -> None:
    _, source = kept(tmp_path, training_data(of_sizes(4, 3, 4), shuffle=False)[0])
    with pytest.raises(InvalidData, match=r"Squares\[1\] has 3 records; expected 4"):
        source.read(SEED, BatchId(0, 4, 4))


@pytest.mark.parametrize(
    ("item", "labels"),
    [
        (NUMBERS, False),
        ((NUMBERS,), False),
        ({"a": NUMBERS}, False),
        ((NUMBERS, NUMBERS), True),
        ([tf.constant(NUMBERS), {"a": NUMBERS, "b": NUMBERS}], True),
    ],
    ids=str,
)
def test_items_are_taken_as_keras_does(tmp_path: Path, item: Any, labels: bool) -> None:
    class Items(keras.utils.PyDataset):  # type: ignore[misc]  # Keras has no types
        def __len__(self) -> int:
            return 2

        def __getitem__(self, index: int) -> Any:
            return item

    description, source = kept(tmp_path, training_data(Items())[0])
    assert description["labels"] == labels
    batch = source.read_range(5, 15)
    for array in arrays_of(batch):
        np.testing.assert_array_equal(array, [5, 6, 7, 8, 9, 0, 1, 2, 3, 4])
    assert isinstance(batch[1], tuple) != labels


# Sources of the project


def test_an_own_source_arrives_without_what_it_has_opened(tmp_path: Path) -> None:
    file = tmp_path / "data.npz"
    np.savez(file, x=np.arange(1 << 16), y=np.arange(1 << 16))
    given = Npz(file)
    expected = given.read(SEED, BatchId(0, 0, 9))
    _, source = kept(tmp_path, training_data(given)[0])
    np.testing.assert_array_equal(source.read(SEED, BatchId(0, 0, 9))[0], expected[0])
    assert (tmp_path / "data" / "object.pickle").stat().st_size < 1 << 14
    assert named(source, 0, 5) == f"record {expected[0][5]}"


def records_in(folder: Path) -> dict[str, DataSource]:
    """Ten records in each kind of source that is opened or made on first use."""
    (folder / "data.csv").write_text("x,y\n" + "".join(f"{i},{i}\n" for i in range(10)))
    with tf.io.TFRecordWriter(str(folder / "data.tfrecord")) as writer:
        for i in range(10):
            writer.write(bytes([i]))
    return {
        "csv": Csv(folder / "data.csv", y="y"),
        "parquet": Parquet(folder / "data.parquet", y="y"),
        "tfrecords": TfRecords(
            folder / "data.tfrecord",
            parse=lambda data: (tf.io.decode_raw(data, tf.uint8)[0], 1),
        ),
        "function": Function(lambda start, stop: (NUMBERS[start:stop], NUMBERS[start:stop]), 10),
    }


@pytest.mark.parametrize("kind", ["csv", "parquet", "tfrecords", "function"])
def test_sources_arrive_after_they_have_been_read(tmp_path: Path, kind: str) -> None:
    if kind == "parquet":
        pq = pytest.importorskip("pyarrow.parquet")
        table = pytest.importorskip("pyarrow").table({"x": range(10), "y": range(10)})
        pq.write_table(table, tmp_path / "data.parquet", row_group_size=3)
    given = records_in(tmp_path)[kind]
    expected = given.read(SEED, BatchId(0, 0, 10))
    _, source = kept(tmp_path, training_data(given)[0])
    for one, other in zip(
        arrays_of(source.read(SEED, BatchId(0, 0, 10))), arrays_of(expected), strict=True
    ):
        np.testing.assert_array_equal(one, other)
    source.close()


# tf.data.Dataset


def dataset_of(*sizes: int) -> tf.data.Dataset:
    def make() -> Iterator[Any]:
        for size in sizes:
            yield np.arange(size), np.zeros((size, 2), np.float32)

    return tf.data.Dataset.from_generator(
        make, output_signature=(tf.TensorSpec([None], tf.int64), tf.TensorSpec([None, 2]))
    )


def test_a_dataset_is_read_once_and_keeps_its_batches(tmp_path: Path) -> None:
    read: list[int] = []

    def make() -> Iterator[Any]:
        for i in range(10):
            read.append(i)
            yield i, [f"label {i}"] * (i % 3)

    spec = (tf.TensorSpec([], tf.int32), tf.TensorSpec([None], tf.string))
    dataset = tf.data.Dataset.from_generator(make, output_signature=spec).ragged_batch(4)
    description, source = kept(tmp_path, training_data(dataset)[0])
    assert read == list(range(10))
    assert (description["records"], description["batch_size"]) == (10, 4)
    assert epoch_of(source, 0) == epoch_of(source, 1) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    x, y = source.read(SEED, BatchId(0, 3, 3))
    assert x.dtype == np.int32
    np.testing.assert_array_equal(y.values, [b"label 4", b"label 5", b"label 5"])
    np.testing.assert_array_equal(y.row_splits, [0, 0, 1, 3])


def test_no_more_of_a_dataset_is_read_than_its_epochs_reach(tmp_path: Path) -> None:
    """It never ends, and does not say so."""
    dataset = tf.data.Dataset.from_generator(
        itertools.count, output_signature=tf.TensorSpec([], tf.int64)
    ).batch(4)
    data, _ = training_data(dataset, steps_per_epoch=2)
    description, source = kept(tmp_path, data.cut(3))
    assert (description["records"], description["steps"]) == (8, 2)
    assert [epoch_of(source, epoch)[0][0] for epoch in range(3)] == [0, 8, 16]
    assert training_data(np.zeros(9), steps_per_epoch=1)[0].cut(1).records == 9


def test_the_size_of_a_dataset_is_said_beforehand(tmp_path: Path) -> None:
    said: list[str] = []
    of_known = tf.data.Dataset.from_tensor_slices(np.zeros((1000, 250), np.float32)).shuffle(9)
    for name, dataset in (("one", of_known.batch(10)), ("other", dataset_of(10, 5))):
        store(tmp_path / name, training_data(dataset)[0], say=said.append)
    assert said[0].endswith(
        "/one': 100 batches, about 1.0 MB; it shuffles, and the order of this reading holds for "
        "all epochs"
    )
    assert said[1].endswith("/other': batches of 0.2 kB, it does not say how many")


@pytest.mark.parametrize("known", [True, False])
def test_a_dataset_larger_than_the_disk_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, known: bool
) -> None:
    monkeypatch.setattr("worker.stored.spool._CHECKED_NBYTES", 1000)
    written: list[int] = []

    def usage(folder: Path) -> Any:
        used = sum(each.stat().st_size for each in Path(folder).iterdir())
        written.append(used)
        return _Usage(0, 0, (256 << 20) + 5000 - used)

    monkeypatch.setattr(shutil, "disk_usage", usage)
    dataset = tf.data.Dataset.from_tensor_slices(np.zeros((1000, 25), np.float32)).batch(4)
    if not known:
        dataset = dataset.repeat().take(10**9).filter(lambda _: True)
    with pytest.raises(PsError, match=r"takes .* has 268.4 MB free, of which 268.4 MB") as raised:
        kept(tmp_path, training_data(dataset)[0])
    assert raised.value.code == "PS502"
    assert written[-1] <= (1000 if known else 6000)


@contextmanager
def files_of_at_most(nbytes: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_write_that_fails_is_named_with_its_reason(tmp_path: Path) -> None:
    data, _ = training_data(np.ones((1000, 100)), np.ones(1000))
    with (
        files_of_at_most(10000),
        pytest.raises(PsError, match=r"data cannot be written to '.*/0.npy': File too") as raised,
    ):
        kept(tmp_path, data)
    assert raised.value.code == "PS502"


DATA = tf.data.Dataset.from_tensor_slices((np.zeros((10, 2)), NUMBERS))

REFUSED = {
    "single records": (DATA, r"has single records, not batches.*end with .batch\(n\)"),
    "a short one amid": (
        DATA.batch(4).repeat(2),
        r"batch 2 of the dataset has 2 records, and the first one 4.*.unbatch\(\).batch\(4\)",
    ),
    "a larger one": (dataset_of(4, 5), "batch 1 of the dataset has 5 records, and the first one 4"),
    "other rows": (
        tf.data.Dataset.range(8).map(lambda i: tf.range(i + 1)).padded_batch(4),
        r"x of batch 1 of the dataset is \[n, 8\] of int64, and that of the first one \[n, 4\]"
        ".*padded_shapes",
    ),
    "lengths": (
        tf.data.Dataset.from_tensors((np.zeros(3), np.zeros(2))),
        "batch 0 of the dataset: data of different lengths: x has 3 records, y has 2",
    ),
    "four parts": (
        tf.data.Dataset.from_tensors(([1], [1], [1], [1])),
        r"batch 0 of the dataset has 4 parts; expected x, \(x, y\)",
    ),
    "sparse": (
        tf.data.Dataset.from_tensors(tf.sparse.from_dense([[0, 1]])),
        "batch 0 of the dataset: x is sparse",
    ),
    "nothing": (DATA.batch(4).filter(lambda _, y: tf.reduce_min(y) > 99), "gave 0 batches"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_dataset_that_cannot_be_stored_is_refused(tmp_path: Path, case: str) -> None:
    dataset, message = REFUSED[case]
    with pytest.raises(InvalidData, match=message) as raised:
        kept(tmp_path, training_data(dataset)[0])
    assert "\n" not in str(raised.value)
    assert not list(tmp_path.iterdir())


def test_more_steps_than_a_dataset_has_are_said_when_it_is_read(tmp_path: Path) -> None:
    with structlog.testing.capture_logs() as logs:
        description, _ = kept(tmp_path, training_data(DATA.batch(4), steps_per_epoch=9)[0])
    assert description["steps"] == 3
    assert [each["log_level"] for each in logs] == ["warning"]


# Through a job


def test_a_step_on_stored_records_is_that_on_arrays(tmp_path: Path) -> None:
    generator = np.random.default_rng(5)
    x = generator.normal(size=(RECORDS, FEATURES)).astype(np.float32)
    y = generator.integers(0, 3, RECORDS)
    _, source = kept(tmp_path, training_data(x, y, batch_size=8)[0])
    steppers = [JobStepper(make_job(noisy_model, train=each)) for each in (Arrays(x, y), source)]
    one, other = (each.by_variable(each.run(BatchId(1, 8, 8))) for each in steppers)
    for name in one:
        np.testing.assert_array_equal(one[name], other[name])


def test_every_label_is_checked_before_training(tmp_path: Path) -> None:
    labels = np.zeros(60, np.int64)
    labels[41] = 3
    _, source = kept(tmp_path, training_data(np.ones((60, 4)), labels)[0])
    with pytest.raises(InvalidJob, match=r"record 41 has label 3; .* from 0 to 2"):
        described(train=source)


class Autoencoder(keras.Model):  # type: ignore[misc]  # Keras has no types
    def __init__(self) -> None:
        super().__init__()
        self.dense = keras.layers.Dense(FEATURES)

    def call(self, x: Any) -> Any:
        return self.dense(x)

    def compute_loss(self, x: Any = None, y: Any = None, y_pred: Any = None, *_: Any) -> Any:
        assert y is None
        return keras.ops.mean((x - y_pred) ** 2)


def test_a_model_with_its_own_loss_trains_without_labels(tmp_path: Path) -> None:
    x = np.random.default_rng(5).normal(size=(RECORDS, FEATURES)).astype(np.float32)
    description, source = kept(tmp_path, training_data(x, batch_size=8)[0])
    assert not description["labels"]
    fields: dict[str, Any] = {"model": Autoencoder, "optimizer": "sgd", "batch_size": 8}
    fields |= {"train": source, "eval": source}
    assert described(loss=None, metrics=(), **fields)["metrics"] == ["loss"]
    stepper = JobStepper(Job(**fields))
    kernel = stepper.replica.model.dense.kernel.numpy()
    batch = source.read(0, BatchId(0, 0, 8))[0]
    expected = float(np.mean((batch - batch @ kernel) ** 2))
    assert stepper.run(BatchId(0, 0, 8)).loss == pytest.approx(expected, rel=1e-5)
