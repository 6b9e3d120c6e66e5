"""Every example: as it stands it is a job, and on a small slice it learns, in one process."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from psrpc.core.batch import batches_per_epoch, cut_batch
from worker import DataSource, Job, Npz
from worker.describe.describe import describe
from worker.job.loader import LoadedJob, load_job
from worker.model.build import build_model, serialized_optimizer

pytestmark = pytest.mark.slow

EXAMPLES = Path(__file__).resolve().parent.parent.parent / "examples"


@pytest.fixture
def load() -> Any:
    def load(name: str, *settings: str) -> LoadedJob:
        return load_job(EXAMPLES / f"{name}.py", settings)

    return load


@pytest.mark.parametrize(
    ("name", "parameters", "optimizer", "mode", "updates"),
    [
        ("mnist_sigmoid", 784 * 100 + 100 + 100 * 10 + 10, "SGD", "async", 20 * 600),
        ("mnist_softmax", 784 * 10 + 10, "SGD", "async", 50 * 600),
        (
            "mnist_dnn",
            784 * 160 + 160 + 4 * (160 * 160 + 160) + 160 * 10 + 10,
            "SGD",
            "sync",
            4 * 400,
        ),
        (
            "mnist_cnn",
            9 * 16 + 4 * 16 + 9 * 16 * 32 + 4 * 32 + 7 * 7 * 32 * 10 + 10,
            "Adam",
            "sync",
            900,
        ),
        (
            "mnist_devices",
            784 * 160 + 160 + 4 * (160 * 160 + 160) + 160 * 10 + 10,
            "SGD",
            "sync",
            2 * 600,
        ),
        ("mnist_search", 784 * 128 + 128 + 128 * 10 + 10, "Adam", "sync", 4 * 600),
        ("module_regression", 4, "SGD", "async", 500),
    ],
)
def test_an_example_is_a_job(
    load: Any, name: str, parameters: int, optimizer: str, mode: str, updates: int
) -> None:
    document = describe(load(name))
    sizes = [int(np.prod(variable["shape"])) for variable in document["variables"]]
    assert sum(sizes) == parameters
    assert document["optimizer"]["class_name"] == optimizer
    assert (document["policy"]["mode"], document["total_updates"]) == (mode, updates)
    assert document["placement"] == "cut"


@pytest.mark.parametrize("name", ["mnist_sigmoid", "mnist_softmax", "mnist_dnn", "mnist_cnn"])
def test_all_of_mnist_is_there(load: Any, name: str) -> None:
    job = load(name).job
    assert (job.train.num_records, job.eval.num_records) == (60_000, 10_000)
    x, y = job.train.read_range(0, 5)
    assert y.tolist() == [5, 0, 4, 1, 9]
    assert x.dtype == np.float32
    assert (x.min(), x.max()) == (0, 1)


def sliced(source: Any, records: int) -> DataSource:
    """The first records of an example's file, through the example's own map."""
    assert isinstance(source, Npz)
    x, y, _ = source._keys
    return Npz(source._path, x=x, y=y, map=source._map, records=(0, records))


def train(job: Job, batches: int) -> Any:
    """The trained model, by ``batches`` updates in the job's own order."""
    model = build_model(job, job.train.read_range(0, 2))
    optimizer = keras.optimizers.deserialize(serialized_optimizer(job, {}, []))
    model.compile(optimizer=optimizer, loss=job.loss, metrics=list(job.metrics), jit_compile=False)
    records = job.train.num_records
    for i in range(batches):
        epoch, index = divmod(i, batches_per_epoch(records, job.batch_size))
        batch = cut_batch(epoch, index, records, job.batch_size)
        model.train_on_batch(*job.train.read(job.seed, batch))
    return model


@pytest.mark.parametrize(
    ("name", "batches", "accuracy"),
    [
        ("mnist_dnn", 200, 0.8),
        ("mnist_softmax", 200, 0.6),
        # Statistics of batch normalization follow the weights at some distance.
        ("mnist_cnn", 60, 0.7),
    ],
)
def test_an_example_learns(load: Any, name: str, batches: int, accuracy: float) -> None:
    job = load(name, "epochs=5", "intra_op_threads=1").job
    job = replace(job, train=sliced(job.train, 4000))
    model = train(job, batches)
    x, y = job.eval.read_range(0, 1000)
    found = float((model.predict(x, verbose=0).argmax(-1) == y).mean())
    assert found > accuracy


def test_the_sigmoid_network_starts_as_in_the_report_and_learns_slowly(load: Any) -> None:
    job = load("mnist_sigmoid").job
    job = replace(job, train=sliced(job.train, 4000))
    model = build_model(job, job.train.read_range(0, 2))
    for layer in model.layers:
        kernel, bias = layer.get_weights()
        assert abs(kernel.std() - 1) < 0.05
        assert not bias.any()
    # Layers draw different numbers.
    first, last = (layer.get_weights()[0].ravel()[:10] for layer in model.layers)
    assert not np.isin(first, last).any()
    x, y = job.train.read_range(0, 1000)
    loss = keras.losses.SparseCategoricalCrossentropy()
    before = float(loss(y, model(x)))
    trained = train(job, 100)
    assert float(loss(y, trained(x))) < before - 0.1


def test_the_module_finds_its_line(load: Any) -> None:
    job = load("module_regression").job
    module = job.model()
    for i in range(300):
        batch = map(tf.convert_to_tensor, job.train.read(0, cut_batch(*divmod(i, 100), 2000, 20)))
        with tf.GradientTape() as tape:
            loss = job.loss(module, *batch)
        variables = module.trainable_variables
        for variable, gradient in zip(variables, tape.gradient(loss, variables), strict=True):
            variable.assign_sub(0.01 * gradient)
    assert module.slopes.numpy() == pytest.approx([2, -3, 0.5], abs=0.2)
    assert module.intercept.numpy() == pytest.approx(1, abs=0.2)
