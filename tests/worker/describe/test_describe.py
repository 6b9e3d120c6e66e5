"""Output of ``worker describe``."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from psrpc.core.errors import InvalidJob
from psrpc.core.tables import TableSpec
from tests.worker.described_jobs import Line, classes, dense, described, line_loss, loaded, make_job
from worker import Arrays, Embedding
from worker.describe.describe import describe

pytestmark = pytest.mark.slow
layers = keras.layers


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
        "local_learning_rate": None,
        "scale_lr": None,
        "warmup_epochs": 0.0,
        "batch_size": 10,
        "epochs": 2,
        "seed": 0,
        "train_records": 60,
        "unsummed_metrics": [],
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
        "slots": ["iterations"],
        "placement": "cut",
        "needs_single_shard": None,
        "checkpoint_every": 9,
        "full_checkpoint_every": 16,
        "keep_checkpoints": 5,
        "keep_best": None,
        "stop_early": None,
        "reduce_lr": None,
        "evaluate_every_epoch": False,
        "intra_op_threads": None,
        "exact": True,
        "dense": "shards",
        "slices": None,
        "wire_dtype": "float32",
        "prefetch_rows": False,
        "compression": None,
        "topk": 0.01,
        "total_updates": 4,
        "metrics": ["loss", "accuracy"],
    }
    assert optimizer["class_name"] == "SGD"


def test_kept_checkpoints_are_described() -> None:
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
    assert document["local_learning_rate"] == pytest.approx(0.1)
    falling = keras.optimizers.SGD(keras.optimizers.schedules.CosineDecay(0.1, 12))
    assert described(optimizer=falling, local_steps=3)["local_learning_rate"] is None
    # Two batches of 30 records an epoch, of three local steps each.
    assert (document["total_updates"], seen) == (4, [12])
    with pytest.raises(InvalidJob, match=r"local_steps needs SGD, .* but optimizer is Adam"):
        described(optimizer="adam", local_steps=3)
    with pytest.raises(InvalidJob, match=r"global batch of 90 \(batch_size 10 x local_steps 9\)"):
        described(local_steps=9)


@pytest.mark.parametrize("rounds", [{}, {"mode": "sync", "replicas": 1}])
def test_a_batch_may_be_larger_than_the_data(rounds: dict[str, Any]) -> None:
    """It is what is left over in the epoch, as the last batch of any epoch is."""
    document = described(train=classes(9), **rounds)
    assert (document["train_records"], document["batch_size"]) == (9, 10)
    assert document["total_updates"] == 1


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


def test_variables_without_influence_on_the_loss_are_state() -> None:
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


def test_the_search_of_a_job_file_is_told() -> None:
    searched = replace(loaded(make_job()), search={"width": "choice(1, 2)"})
    assert describe(searched)["search"] == {"width": "choice(1, 2)"}
    assert "search" not in described()


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


def test_optimizers_beyond_the_numpy_engine_are_refused_before_a_shard_starts() -> None:
    with pytest.raises(InvalidJob, match="the numpy engine has no Lion"):
        described(engine="numpy", optimizer="lion")


@pytest.mark.parametrize(
    ("dtypes", "kind"),
    [(["int64"], None), (["string"], "strings"), (["string", "int64"], "both")],
)
def test_the_plan_says_what_a_table_is_given(dtypes: list[str], kind: str | None) -> None:
    """So that who looks rows up by the other kind can be told."""

    def model() -> keras.Model:
        inputs = [keras.Input((), dtype=dtype, name=dtype) for dtype in dtypes]
        rows = [Embedding(2, table="users", name=f"of_{i.name}")(i) for i in inputs]
        return keras.Model(inputs, keras.layers.Dense(3)(sum(rows[1:], rows[0])))

    values = {"int64": np.arange(60), "string": np.array(["anna", "ben"] * 30)}
    x = {dtype: values[dtype] for dtype in dtypes}
    data = Arrays(x if len(x) > 1 else x[dtypes[0]], np.arange(60) % 3)
    [table] = described(model=model, train=data, metrics=[])["tables"]
    assert table.get("id_kind") == kind
    assert TableSpec.from_json(table).id_kind == (kind or "numbers")
