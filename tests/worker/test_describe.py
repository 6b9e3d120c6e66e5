"""What ``worker describe`` says of a job, and what it refuses."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from psrpc.errors import InvalidJob
from worker import Arrays, Job
from worker.describe import describe
from worker.loader import LoadedJob, UserCodeFailed

pytestmark = pytest.mark.slow

layers = keras.layers


def dense(units: int = 3, **options: Any) -> keras.Model:
    return keras.Sequential([keras.Input((4,)), layers.Dense(units, **options)])


def classes(records: int = 60, count: int = 3) -> Arrays:
    return Arrays(np.ones((records, 4), np.float32), np.arange(records) % count)


def make_job(**fields: Any) -> Job:
    return Job(
        **{
            "model": dense,
            "loss": keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            "optimizer": "sgd",
            "metrics": ["accuracy"],
            "train": classes(),
            "batch_size": 10,
            **fields,
        }
    )


def loaded(job: Job, **arguments: str) -> LoadedJob:
    return LoadedJob(job, Path("/jobs/example.py"), "ab" * 32, "example", arguments)


def described(**fields: Any) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(json.dumps(describe(loaded(make_job(**fields)))))
    return document


def test_a_description_holds_what_the_coordinator_needs() -> None:
    document = described(mode="sync", replicas=4, epochs=2, eval=classes(20), checkpoint_every=9)
    optimizer = document.pop("optimizer")
    assert document == {
        "format": 1,
        "name": "example",
        "job_sha256": "ab" * 32,
        "policy": {"mode": "sync", "replicas": 4},
        "then": None,
        "local_steps": 1,
        "scale_lr": None,
        "warmup_epochs": 0.0,
        "batch_size": 10,
        "epochs": 2,
        "seed": 0,
        "train_records": 60,
        "eval_records": 20,
        "data_fingerprint": classes().fingerprint(),
        "variables": [
            {
                "name": f"sequential/dense/{name}",
                "shape": shape,
                "dtype": "float32",
                "role": "trainable",
                "constraint": None,
            }
            for name, shape in (("kernel", [4, 3]), ("bias", [3]))
        ],
        "engine": "keras",
        "placement": "cut",
        "needs_single_shard": None,
        "checkpoint_every": 9,
        "keep_checkpoints": 5,
        "keep_best": None,
        "intra_op_threads": None,
        "wire_dtype": "float32",
        "compression": None,
        "topk": 0.01,
        "total_updates": 4,
        "metrics": ["loss", "accuracy"],
    }
    assert optimizer["class_name"] == "SGD"


def test_what_is_kept_is_told() -> None:
    document = described(keep_checkpoints=2, keep_best="accuracy", eval=classes(20))
    assert document["keep_checkpoints"] == 2
    assert document["keep_best"] == {"metric": "accuracy", "lower": False}
    with pytest.raises(InvalidJob, match=r"evaluations have no 'auc'; they have loss, accuracy$"):
        described(keep_best="auc", eval=classes(20))


def test_a_rule_and_the_recipe_for_large_batches_are_told() -> None:
    rule = {"mode": "sync", "replicas": 4, "then": "async", "then_after": 1, "max_staleness": 8}
    document = described(**rule, epochs=3, scale_lr="linear", warmup_epochs=2)
    assert document["policy"] == {"mode": "sync", "replicas": 4}
    assert document["then"] == {"policy": {"mode": "async", "max_staleness": 8}, "epoch": 1}
    assert (document["scale_lr"], document["warmup_epochs"]) == ("linear", 2.0)
    assert document["total_updates"] == 2 + 2 * 6


def test_with_local_steps_shards_add_up_what_workers_push() -> None:
    seen = []

    def optimizer(total_updates: int) -> keras.optimizers.Optimizer:
        seen.append(total_updates)
        return keras.optimizers.SGD(0.1, momentum=0.9)

    document = described(optimizer=optimizer, local_steps=3, epochs=2)
    assert (document["batch_size"], document["local_steps"]) == (10, 3)
    config = document["optimizer"]["config"]
    assert (config["learning_rate"], config["momentum"]) == (1.0, 0.0)
    # Two batches of 30 records an epoch, of three local steps each.
    assert (document["total_updates"], seen) == (4, [12])
    with pytest.raises(InvalidJob, match=r"local_steps needs SGD, .* but optimizer is Adam"):
        described(optimizer="adam", local_steps=3)
    with pytest.raises(InvalidJob, match=r"global batch of 90 \(batch_size 10 x local_steps 9\)"):
        described(local_steps=9)


def test_how_tensors_travel_is_told() -> None:
    document = described(wire_dtype="float16", compression="topk", topk=0.1)
    told = [document[name] for name in ("wire_dtype", "compression", "topk")]
    assert told == ["float16", "topk", 0.1]


@pytest.mark.parametrize("setting", [{"wire_dtype": "bfloat16"}, {"compression": "int8"}])
def test_a_setting_without_effect_is_refused(setting: dict[str, Any]) -> None:
    (name,) = setting
    with pytest.raises(InvalidJob, match=f"{name} is .* no trainable variable is float32"):
        described(model=lambda: dense(dtype="float64"), **setting)


def test_names_are_the_same_however_often_a_model_is_made() -> None:
    assert described()["variables"] == described()["variables"]


def test_state_comes_after_what_is_trained_and_seeds_are_left_out() -> None:
    def model() -> keras.Model:
        frozen = layers.Dense(3, name="frozen", trainable=False)
        return keras.Sequential(
            [
                keras.Input((4,)),
                frozen,
                layers.BatchNormalization(name="norm"),
                layers.Dropout(0.5),
                layers.Dense(3, name="out"),
            ]
        )

    found = [(v["name"].split("/", 1)[1], v["role"]) for v in described(model=model)["variables"]]
    assert found == [
        ("norm/gamma", "trainable"),
        ("norm/beta", "trainable"),
        ("out/kernel", "trainable"),
        ("out/bias", "trainable"),
        ("frozen/kernel", "state"),
        ("frozen/bias", "state"),
        ("norm/moving_mean", "state"),
        ("norm/moving_variance", "state"),
    ]


def test_what_the_loss_does_not_depend_on_is_state() -> None:
    class Unused(keras.Model):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.used = layers.Dense(3, name="used")
            self.spare = layers.Dense(3, name="spare")

        def call(self, x: tf.Tensor) -> tf.Tensor:
            self.spare(x)
            return self.used(x)

    roles = {v["name"]: v["role"] for v in described(model=Unused)["variables"]}
    assert roles == {
        "unused/used/kernel": "trainable",
        "unused/used/bias": "trainable",
        "unused/spare/kernel": "state",
        "unused/spare/bias": "state",
    }


def test_a_model_that_is_built_by_its_first_data() -> None:
    document = described(model=lambda: keras.Sequential([layers.Dense(3)]))
    assert [v["shape"] for v in document["variables"]] == [[4, 3], [3]]


def test_a_schedule_ends_with_the_job_in_either_mode() -> None:
    def optimizer(total_updates: int) -> keras.optimizers.Optimizer:
        return keras.optimizers.SGD(keras.optimizers.schedules.CosineDecay(0.1, total_updates))

    for fields, updates in (({}, 18), ({"mode": "sync", "replicas": 4}, 6)):
        document = described(optimizer=optimizer, epochs=3, **fields)
        schedule = document["optimizer"]["config"]["learning_rate"]["config"]
        assert schedule["decay_steps"] == document["total_updates"] == updates


@pytest.mark.parametrize(
    "optimizer",
    [
        "adam",
        keras.optimizers.Adam,
        keras.optimizers.Adam(0.001),
        lambda: keras.optimizers.Adam(0.001),
    ],
)
def test_an_optimizer_is_given_in_many_ways(optimizer: Any) -> None:
    found = described(optimizer=optimizer)["optimizer"]
    assert found["class_name"] == "Adam"
    assert found["config"]["learning_rate"] == pytest.approx(0.001)


def test_overrides_reach_the_optimizer() -> None:
    document = describe(loaded(make_job(), learning_rate="0.5", momentum="0.25"))
    config = document["optimizer"]["config"]
    assert (config["learning_rate"], config["momentum"]) == (0.5, 0.25)
    schedule = keras.optimizers.schedules.CosineDecay(0.1, 10)
    job = make_job(optimizer=keras.optimizers.SGD(schedule))
    document = json.loads(json.dumps(describe(loaded(job, learning_rate="0.5"))))
    config = document["optimizer"]["config"]["learning_rate"]["config"]
    assert (config["initial_learning_rate"], config["decay_steps"]) == (0.5, 10)
    with pytest.raises(InvalidJob, match=r"--set optimizer.momentum=2: .*momentum.*between"):
        describe(loaded(make_job(), momentum="2"))


def test_updates_that_need_whole_variables_or_one_shard() -> None:
    assert described(optimizer=keras.optimizers.SGD(clipnorm=1.0))["placement"] == "whole"
    document = described(model=lambda: dense(kernel_constraint="non_neg"))
    assert document["placement"] == "whole"
    assert document["variables"][0]["constraint"]["class_name"] == "NonNeg"
    norm = described(optimizer=keras.optimizers.SGD(global_clipnorm=1.0))
    assert "global_clipnorm" in norm["needs_single_shard"]
    excluding = keras.optimizers.AdamW()
    excluding.exclude_from_weight_decay(var_names=["bias"])
    document = described(optimizer=excluding)
    assert document["optimizer"]["excluded_from_weight_decay"] == ["sequential/dense/bias"]
    assert document["placement"] == "whole"


class Line(tf.Module):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.layers = [{"w": tf.Variable(tf.zeros([4, 1]))}, tf.Variable(0.0)]
        self.seen = tf.Variable(0.0, trainable=False)


def line_loss(module: Line, x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    predicted = x @ module.layers[0]["w"] + module.layers[1]
    module.seen.assign_add(1.0)
    return tf.reduce_mean(tf.square(predicted - tf.cast(y, tf.float32)))


def test_a_module_names_variables_by_its_attributes() -> None:
    document = described(model=Line, loss=line_loss, metrics=[])
    assert [(v["name"], v["role"]) for v in document["variables"]] == [
        ("layers/0/w", "trainable"),
        ("layers/1", "trainable"),
        ("seen", "state"),
    ]
    assert document["metrics"] == ["loss"]


def test_a_module_may_make_its_variables_when_it_is_first_called() -> None:
    class Lazy(tf.Module):  # type: ignore[misc]
        def __call__(self, x: tf.Tensor) -> tf.Tensor:
            if not hasattr(self, "w"):
                self.w = tf.Variable(tf.zeros([x.shape[1], 1]))
            return x @ self.w

    document = described(
        model=Lazy, metrics=[], loss=lambda module, x, _y: tf.reduce_mean(module(x))
    )
    assert [v["name"] for v in document["variables"]] == ["w"]


def weights_only() -> keras.Model:
    return keras.Sequential([keras.Input((4,)), layers.Flatten()])


def counting() -> keras.Model:
    return keras.Sequential([keras.Input((4,)), layers.Normalization(name="n"), layers.Dense(3)])


def one_hot(records: int = 60) -> Arrays:
    return Arrays(np.ones((records, 4), np.float32), np.eye(3)[np.arange(records) % 3])


def spoilt(record: int, label: float) -> Arrays:
    labels = (np.arange(60) % 3).astype(np.float64)
    labels[record] = label
    return Arrays(np.ones((60, 4), np.float32), labels)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"train": classes(0)}, "train holds no records"),
        ({"eval": classes(0)}, "eval holds no records"),
        ({"train": classes(9)}, "train holds 9 records, less than one global batch of 10"),
        (
            {"mode": "sync", "replicas": 7},
            "train holds 60 records, less than one global batch of 70 (batch_size 10 x replicas 7)",
        ),
        ({"model": weights_only}, "the model has no trainable variables"),
        ({"model": counting}, "state variable 'sequential/n/count' has dtype int64"),
        (
            {"model": lambda: dense(dtype="float16")},
            "trainable variable 'sequential/dense/kernel' has dtype float16",
        ),
        ({"model": lambda: 3}, "model() made a int; expected a keras.Model or a tf.Module"),
        ({"train": classes(count=5)}, "train: record 3 has label 3; sparse_categorical_cross"),
        ({"train": spoilt(57, 3)}, "record 57 has label 3.0"),
        ({"train": spoilt(57, -1)}, "record 57 has label -1.0"),
        ({"train": spoilt(57, 0.5)}, "record 57 has label 0.5"),
        ({"eval": spoilt(59, 9)}, "eval: record 59 has label 9.0"),
        ({"train": one_hot()}, "labels of shape (3,) per example do not fit the loss sparse_"),
        ({"train": one_hot()}, "one-hot labels need categorical_crossentropy"),
        (
            {"loss": "categorical_crossentropy"},
            "labels of shape () per example do not fit the loss categorical_crossentropy and a "
            "model whose output has shape (3,); expected labels of shape (3,); integer class "
            "labels need sparse_categorical_crossentropy",
        ),
        ({"loss": "mse"}, "labels of shape () per example do not fit the loss mean_squared_error"),
        (
            {"loss": keras.losses.MeanSquaredError()},
            "labels of shape () per example do not fit the loss mean_squared_error",
        ),
        ({"loss": "msse"}, "loss is 'msse'; Keras has no loss of that name"),
        ({"metrics": ["acuracy"]}, "metrics contains 'acuracy'; Keras has no metric"),
        ({"metrics": ["accuracy", "accuracy"]}, "two metrics are named 'accuracy'"),
        ({"optimizer": "sdg"}, "optimizer is 'sdg'; Keras has no optimizer of that name"),
        ({"optimizer": lambda: 3}, "optimizer() made a int; expected a Keras optimizer"),
        ({"init_from": "absent.keras"}, "init_from is 'absent.keras'; there is no such file"),
        ({"model": Line, "metrics": []}, "but the model is a tf.Module; expected a function"),
        ({"model": Line, "loss": line_loss}, "metrics need a keras.Model"),
        (
            {"loss": lambda _y, p: tf.stop_gradient(tf.reduce_sum(p, -1))},
            "the loss depends on none of the trainable variables (sequential/dense/bias",
        ),
        (
            {"model": Line, "metrics": [], "loss": lambda m, x, _y: x @ m.layers[0]["w"]},
            "the loss has shape (10, 1); expected the mean, a scalar",
        ),
    ],
)
def test_a_job_that_cannot_be_trained_is_refused(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidJob) as raised:
        described(**fields)
    assert says in str(raised.value)
    assert "\n" not in str(raised.value)


def twins() -> keras.Model:
    class Twins(keras.Model):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.parts = [layers.Dense(3, name="twin"), layers.Dense(3, name="twin")]

        def call(self, x: tf.Tensor) -> tf.Tensor:
            return self.parts[1](self.parts[0](x))

    return Twins()


def test_two_variables_of_one_name_are_refused() -> None:
    with pytest.raises(InvalidJob, match="2 variables are named 'twins/twin/kernel'"):
        described(model=twins)


@pytest.mark.parametrize(
    "fields",
    [
        {"train": spoilt(57, 1.0)},
        {"loss": "categorical_crossentropy", "train": one_hot()},
        {"loss": "crossentropy"},
        {"loss": "mse", "model": lambda: dense(1), "metrics": []},
        {"loss": lambda y, p: tf.square(tf.cast(y, tf.float32) - p[:, 0])},
        {
            "loss": keras.losses.SparseCategoricalCrossentropy(ignore_class=-1),
            "train": spoilt(57, -1),
        },
        {"loss": "poisson", "model": lambda: dense(1), "metrics": [keras.metrics.MeanSquaredError]},
        {
            "metrics": [
                keras.metrics.SparseTopKCategoricalAccuracy(k=2),
                "sparse_categorical_accuracy",
            ]
        },
    ],
)
def test_labels_that_fit(fields: dict[str, Any]) -> None:
    assert described(**fields)["train_records"] == 60


def test_weights_and_several_inputs() -> None:
    def model() -> keras.Model:
        a, b = keras.Input((2,), name="a"), keras.Input((3,), name="b")
        return keras.Model({"a": a, "b": b}, layers.Dense(3)(layers.Concatenate()([a, b])))

    x = {"a": np.ones((60, 2), np.float32), "b": np.ones((60, 3), np.float32)}
    document = described(model=model, train=Arrays(x, np.arange(60) % 3, np.ones(60)))
    assert document["variables"][0]["shape"] == [5, 3]


def test_an_error_of_a_library_is_one_line() -> None:
    with pytest.raises(UserCodeFailed) as raised:
        described(train=Arrays(np.ones((60, 9), np.float32), np.arange(60) % 3))
    assert "the model raised" in str(raised.value)
    assert "\n" not in str(raised.value)


NOISE = """
import os
print("on stdout")
os.write(1, b"on descriptor 1")
"""
JOB = """
import keras, numpy as np
from worker import Arrays, Job

def loss(y, p):
    return {loss}

job = Job(
    model=lambda: keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)]),
    loss=loss, optimizer="sgd", batch_size=2, train=Arrays(np.zeros((8, 1)), np.zeros((8, 1))),
)
"""
RUN = "import sys; from worker.describe import describe_main; "
RUN += "sys.exit(describe_main(sys.argv[1], sys.argv[2:], 'sync'))"


def run(path: Path, *settings: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", RUN, str(path), *settings], capture_output=True, text=True
    )


def test_stdout_holds_one_document_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "noisy.py"
    path.write_text(NOISE + JOB.format(loss="keras.ops.square(y - p)"))
    done = run(path, "replicas=2")
    assert done.returncode == 0
    document = json.loads(done.stdout)
    assert document["name"] == "noisy"
    assert document["policy"] == {"mode": "sync", "replicas": 2}
    assert "on stdout" in done.stderr
    assert "on descriptor 1" in done.stderr


def test_what_the_numpy_engine_cannot_do_is_refused_before_a_shard_starts() -> None:
    with pytest.raises(InvalidJob, match="the numpy engine has no Lion"):
        described(engine="numpy", optimizer="lion")


def test_errors_are_shown_on_stderr_with_the_users_frames_alone(tmp_path: Path) -> None:
    path = tmp_path / "bad.py"
    path.write_text(JOB.format(loss="y - p.no_such_part"))
    refused = run(path)
    assert (refused.returncode, refused.stdout) == (2, "")
    assert refused.stderr.splitlines() == [
        "error PS105: mode is 'sync' but replicas is not set; say how many micro-batches "
        "make a round: Job(replicas=3) or --replicas 3"
    ]
    failed = run(path, "replicas=2")
    assert (failed.returncode, failed.stdout) == (2, "")
    *frames, last = failed.stderr.splitlines()
    assert last.startswith("error PS103: the training step raised AttributeError: ")
    assert "no_such_part" in last
    assert any(f'File "{path}"' in frame for frame in frames)
    assert not any("worker/" in frame or "site-packages" in frame for frame in frames)
