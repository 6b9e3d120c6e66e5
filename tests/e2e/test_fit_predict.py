"""``model.evaluate`` and ``model.predict`` on a local cluster give what they give without one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import pserver
from psrpc.core.errors import InvalidJob, JobFailed
from tests.e2e.cluster import LIMIT_S, processes_of, until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.fit,
    # Of Keras, which writes arrays of TensorFlow with h5py.
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
]

RECORDS = 203
RNG = np.random.default_rng(3)
X = RNG.normal(size=(RECORDS, 6)).astype("float32")
Y = (X.sum(1, keepdims=True) > 0.2).astype("float32")
WEIGHTS = RNG.uniform(0.1, 2, RECORDS).astype("float32")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[pserver.Cluster]:
    where = tmp_path_factory.mktemp("cluster") / "runs"
    with pserver.Cluster(workers=2, run_dir=where, intra_op_threads=1) as entered:
        yield entered


def plain(cluster: pserver.Cluster, method: str, *args: Any, **options: Any) -> Any:
    """Calls Keras's own method."""
    return cluster._plain[method](*args, verbose=0, **options)


def one(*layers: keras.layers.Layer) -> keras.Model:
    keras.utils.set_random_seed(5)
    last = keras.layers.Dense(1, "sigmoid")
    return keras.Sequential([keras.Input((6,)), *layers, keras.layers.Dense(8, "relu"), last])


def two(nest: type = dict) -> keras.Model:
    keras.utils.set_random_seed(5)
    inputs = {"a": keras.Input((4,), name="a"), "b": keras.Input((2,), name="b")}
    hidden = keras.layers.Dense(8, "tanh")(keras.layers.concatenate(list(inputs.values())))
    made = {
        "yes": keras.layers.Dense(1, "sigmoid", name="yes")(hidden),
        "kind": keras.layers.Dense(3, "softmax", name="kind")(hidden),
    }
    if nest is dict:
        return keras.Model(inputs, made)
    return keras.Model(list(inputs.values()), list(made.values()))


def words() -> keras.Model:
    keras.utils.set_random_seed(5)
    layer = keras.layers.TextVectorization(output_sequence_length=3)
    layer.adapt(["to be or", "not to be"])
    hidden = keras.layers.Embedding(layer.vocabulary_size(), 4)
    inputs = keras.Input((), dtype="string")
    return keras.Model(inputs, keras.layers.Flatten()(hidden(layer(inputs))))


def assert_same(ours: Any, kerass: Any) -> None:
    keras.tree.assert_same_structure(ours, kerass)
    for one, other in zip(keras.tree.flatten(ours), keras.tree.flatten(kerass), strict=True):
        assert type(one) is type(other)
        np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-6)
        assert getattr(one, "dtype", None) == getattr(other, "dtype", None)


class Batches(keras.utils.PyDataset):  # type: ignore[misc]  # Keras has no types
    """Batches by index, of 32 records but for the last one."""

    def __len__(self) -> int:
        return -(-RECORDS // 32)

    def __getitem__(self, index: int) -> Any:
        rows = slice(32 * index, 32 * index + 32)
        return X[rows], Y[rows], WEIGHTS[rows]


class Odd(keras.layers.Layer):  # type: ignore[misc]
    """Returns nests of other kinds: a tuple in a dict, text, integers, rows of other lengths."""

    def call(self, inputs: Any) -> Any:
        text = tf.strings.as_string(inputs[:, 0])
        lengths = tf.RaggedTensor.from_row_lengths(
            tf.range(tf.reduce_sum(tf.range(tf.shape(inputs)[0]))), tf.range(tf.shape(inputs)[0])
        )
        half = tf.cast(inputs, tf.bfloat16)
        return {"z": (tf.cast(inputs > 0, tf.int64), [text]), "a": lengths, "half": half}


INPUTS = {"a": X[:, :4], "b": X[:, 4:]}
LABELS = {"yes": Y, "kind": RNG.integers(0, 3, RECORDS)}

PREDICTIONS: dict[str, Any] = {
    "arrays": (one, X, {}),
    "a batch size": (one, X, {"batch_size": 50}),
    "steps": (one, X, {"batch_size": 32, "steps": 3}),
    "fewer batches than workers": (one, X[:9], {}),
    "float64": (one, X.astype("float64"), {}),
    "dicts": (two, INPUTS, {}),
    "lists": (lambda: two(list), list(INPUTS.values()), {}),
    "text": (words, np.array(["to be", "or not", "to"] * 40, object), {}),
    "tf.data": (one, lambda: tf.data.Dataset.from_tensor_slices((X, Y)).batch(40), {}),
    "endless tf.data": (
        one,
        lambda: tf.data.Dataset.from_tensor_slices(X).batch(7).repeat(),
        {"steps": 5},
    ),
    "PyDataset": (one, lambda: Batches(), {}),
}


@pytest.mark.parametrize("case", PREDICTIONS)
def test_predict_gives_the_outputs_of_keras_in_order(cluster: pserver.Cluster, case: str) -> None:
    make, data, options = PREDICTIONS[case]
    model = make()
    found = [data() if callable(data) else data for _ in range(2)]
    ours = model.predict(found[0], verbose=0, **options)
    assert_same(ours, plain(cluster, "predict", model, found[1], **options))


def test_outputs_of_any_kind_come_back(cluster: pserver.Cluster) -> None:
    inputs = keras.Input((6,))
    model = keras.Model(inputs, Odd()(inputs))
    ours = model.predict(X, verbose=0)
    kerass = plain(cluster, "predict", model, X)
    assert ours.keys() == kerass.keys()
    assert isinstance(ours["z"], tuple)
    np.testing.assert_array_equal(ours["z"][0], kerass["z"][0])
    np.testing.assert_array_equal(ours["z"][1][0], kerass["z"][1][0])
    assert ours["z"][0].dtype == np.int64
    assert ours["half"].dtype == kerass["half"].dtype
    np.testing.assert_array_equal(ours["half"], kerass["half"])
    assert isinstance(ours["a"], tf.RaggedTensor)
    assert ours["a"].to_list() == kerass["a"].to_list()


class Largest(keras.metrics.Metric):  # type: ignore[misc]
    """A running maximum, whose states of batches do not add up."""

    def __init__(self, name: str = "largest", dtype: Any = None) -> None:
        super().__init__(name=name, dtype=dtype)
        self.most = self.add_weight(name="most", initializer="zeros")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self.most.assign(keras.ops.maximum(self.most, keras.ops.max(y_pred)))

    def result(self) -> Any:
        return self.most.value


def evaluated(case: str) -> tuple[keras.Model, tuple[Any, ...], dict[str, Any]]:
    """Returns a model and the arguments of its ``evaluate``."""
    model = one()
    if case == "no metrics":
        model.compile(None, "mse")
        return model, (X, Y), {}
    if case == "a metric that does not add up":
        model.compile("sgd", "mse", metrics=[Largest(), "mae"])
        return model, (X, Y), {}
    if case == "few records, and a metric that does not add up":
        model.compile("sgd", "mse", metrics=[Largest()])
        return model, (X[:4], Y[:4]), {"batch_size": 1}
    if case == "several outputs in a list":
        model = two(list)
        losses = ["binary_crossentropy", "sparse_categorical_crossentropy"]
        model.compile("sgd", losses, metrics=[["accuracy"], ["accuracy"]])
        return model, (list(INPUTS.values()), list(LABELS.values())), {"sample_weight": WEIGHTS}
    if case == "several outputs":
        model = two()
        model.compile(
            "sgd",
            {"yes": "binary_crossentropy", "kind": "sparse_categorical_crossentropy"},
            loss_weights={"yes": 0.5, "kind": 2.0},
            metrics={"yes": ["accuracy", keras.metrics.AUC(name="auc")], "kind": ["accuracy"]},
        )
        return model, (INPUTS, LABELS), {}
    metrics = ["accuracy", keras.metrics.AUC(), keras.metrics.F1Score(threshold=0.5)]
    model.compile("adam", "binary_crossentropy", metrics=metrics, weighted_metrics=["mae"])
    if case == "sample weights":
        return model, (X, Y), {"sample_weight": WEIGHTS, "batch_size": 30}
    if case == "PyDataset":
        return model, (Batches(),), {"steps": 5}
    assert case == "accuracy and AUC"
    return model, (X, Y), {}


@pytest.mark.parametrize(
    "case",
    [
        "accuracy and AUC",
        "sample weights",
        "several outputs",
        "several outputs in a list",
        "PyDataset",
        "no metrics",
        "a metric that does not add up",
        "few records, and a metric that does not add up",
    ],
)
def test_evaluate_gives_the_results_of_keras(cluster: pserver.Cluster, case: str) -> None:
    model, args, options = evaluated(case)
    ours = model.evaluate(*args, verbose=0, **options)
    by_name = model.evaluate(*args, verbose=0, return_dict=True, **options)
    kerass = plain(cluster, "evaluate", model, *args, return_dict=True, **options)
    assert list(by_name) == list(kerass)
    for name, value in kerass.items():
        np.testing.assert_allclose(by_name[name], value, rtol=1e-6, atol=1e-6)
    assert_same(ours, model._flatten_metrics_in_order(by_name))


def test_callbacks_come_once_and_batch_hooks_once_per_part(cluster: pserver.Cluster) -> None:
    heard: list[Any] = []

    class Hears(keras.callbacks.Callback):  # type: ignore[misc]
        def on_test_begin(self, logs: Any = None) -> None:
            heard.append("test")

        def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
            heard.append((batch, sorted(logs)))

        def on_test_end(self, logs: Any = None) -> None:
            heard.append(logs)

        def on_predict_begin(self, logs: Any = None) -> None:
            heard.append("predict")

        def on_predict_batch_begin(self, batch: int, logs: Any = None) -> None:
            heard.append(batch)

        def on_predict_batch_end(self, batch: int, logs: Any = None) -> None:
            heard.append((batch, len(logs["outputs"])))

        def on_predict_end(self, logs: Any = None) -> None:
            heard.append("end")

    model, args, _ = evaluated("accuracy and AUC")
    found = model.evaluate(*args, verbose=0, callbacks=[Hears()], return_dict=True)
    assert heard == ["test", (2, sorted(found)), (6, sorted(found)), found]
    heard.clear()
    model.predict(X, verbose=0, callbacks=[Hears()])
    assert heard == ["predict", 0, (2, 96), 3, (6, 107), "end"]


def test_a_callback_of_fit_predicts_in_its_own_process(cluster: pserver.Cluster) -> None:
    model, args, _ = evaluated("accuracy and AUC")
    found: list[Any] = []

    def look(epoch: int, logs: Any) -> None:
        found.append((model.predict(X, verbose=0), model.evaluate(*args, verbose=0)))

    looking = keras.callbacks.LambdaCallback(on_epoch_end=look)
    model.fit(*args, verbose=0, callbacks=[looking])
    ((outputs, results),) = found
    assert_same(outputs, model.predict(X, verbose=0))
    np.testing.assert_allclose(results[:3], model.evaluate(*args, verbose=0)[:3], rtol=1e-6)


class Dies(keras.layers.Layer):  # type: ignore[misc]
    """Kills the process that makes its graph, unless it is the caller, ``times`` in all."""

    def __init__(self, folder: str, times: int, caller: int) -> None:
        super().__init__()
        self.folder = folder
        self.times = times
        self.caller = caller

    def call(self, inputs: Any) -> Any:
        for number in range(self.times if os.getpid() != self.caller else 0):
            mark = Path(self.folder) / str(number)
            try:
                mark.touch(exist_ok=False)
            except FileExistsError:
                continue
            os.kill(os.getpid(), signal.SIGKILL)
        return inputs


def test_a_part_that_is_killed_is_started_again(cluster: pserver.Cluster, tmp_path: Path) -> None:
    model = one(Dies(str(tmp_path), 1, os.getpid()))
    ours = model.predict(X, verbose=0)
    assert [mark.name for mark in tmp_path.iterdir()] == ["0"]
    assert_same(ours, plain(cluster, "predict", model, X))


def test_a_part_that_is_killed_again_and_again_ends_the_call(
    cluster: pserver.Cluster, tmp_path: Path
) -> None:
    model = one(Dies(str(tmp_path), 10**6, os.getpid()))
    with pytest.raises(JobFailed, match=r"^part-0 was killed 4 times, signal SIGKILL; see .*log$"):
        model.predict(X[:20], verbose=0)
    assert len(list(tmp_path.iterdir())) == 4


class Raises(keras.layers.Layer):  # type: ignore[misc]
    """Raises where it is made again."""

    def __init__(self, caller: int) -> None:
        super().__init__()
        self.caller = caller

    def call(self, inputs: Any) -> Any:
        if os.getpid() != self.caller:
            raise LookupError("no such row")
        return inputs


def test_a_layer_that_raises_ends_the_call_with_its_reason(cluster: pserver.Cluster) -> None:
    model = one(Raises(os.getpid()))
    with pytest.raises(JobFailed, match=r"LookupError.*no such row") as raised:
        model.predict(X, verbose=0)
    assert raised.value.code == "PS103"
    assert "\n" not in str(raised.value)
    assert not processes_of(cluster._base / "predict")
    # The cluster goes on.
    model = one()
    assert_same(model.predict(X, verbose=0), plain(cluster, "predict", model, X))


def test_what_is_no_question_of_processes_is_refused_by_name(cluster: pserver.Cluster) -> None:
    class Own(keras.Model):  # type: ignore[misc]
        def test_step(self, data: Any) -> Any:
            return super().test_step(data)

    inputs = keras.Input((6,))
    model = Own(inputs, keras.layers.Dense(1)(inputs))
    with pytest.raises(InvalidJob, match=r"is not compiled; call model\.compile"):
        model.evaluate(X, Y, verbose=0)
    model.compile("sgd", "mse")
    with pytest.raises(InvalidJob, match=r"^Own overrides test_step\(\)"):
        model.evaluate(X, Y, verbose=0)
    with pytest.raises(InvalidJob, match=r"^model is a str; predict takes a keras\.Model"):
        cluster.predict("model", X)


SCRIPT = """
import sys
import keras
import numpy as np
import pserver


class Waits(keras.utils.PyDataset):
    def __init__(self, gate):
        super().__init__()
        self.gate = gate

    def __len__(self):
        return 8

    def __getitem__(self, index):
        if index == 4:
            print("reads", flush=True)
            open(self.gate).read()
        return (np.full((2, 3), index, "float32"),)


model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
x = np.ones((64, 3), "float32")
with pserver.Cluster(workers=2, run_dir="runs") as cluster:
    print(model.predict(x, verbose=0).shape, flush=True)
    try:
        print("waits", flush=True)
        model.predict(Waits(sys.argv[1]), verbose=0)
    except KeyboardInterrupt:
        print("interrupted", flush=True)
    print(model.predict(x, verbose=0).shape, flush=True)
assert keras.Model.predict(model, x, verbose=0).shape == (64, 2)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_nothing_is_left_of_a_call_that_is_broken_off(tmp_path: Path, number: int) -> None:
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    runs = tmp_path / "runs"
    with (
        (tmp_path / "stderr").open("w") as stderr,
        subprocess.Popen(
            [sys.executable, script, gate],
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
        ) as caller,
    ):
        try:
            assert caller.stdout is not None
            assert caller.stdout.readline() == "(64, 2)\n", (tmp_path / "stderr").read_text()
            assert caller.stdout.readline() == "waits\n"

            def reads() -> bool:
                logs = runs.glob("predict-*/logs/part-1.log")
                return any("reads" in log.read_text() for log in logs)

            until(reads, "the second part to read its data")
            assert processes_of(runs)
            caller.send_signal(number)
            output, _ = caller.communicate(timeout=LIMIT_S)
        finally:
            caller.kill()
    if number == signal.SIGINT:
        assert caller.returncode == 0, (tmp_path / "stderr").read_text()
        assert output == "interrupted\n(64, 2)\n"
    until(lambda: not processes_of(runs), "the processes of the cluster to end")
