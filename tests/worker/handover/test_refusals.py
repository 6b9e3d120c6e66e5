"""Models that a cluster's fit would train in another way are refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import pytest

from psrpc.core.errors import InvalidJob
from worker.embedding.embedding import Embedding
from worker.handover.refusals import check_evaluate_model, check_fit_model, check_predict_model

pytestmark = pytest.mark.slow


def dense(*layers: keras.layers.Layer) -> keras.Model:
    return keras.Sequential([keras.Input((4,)), *layers, keras.layers.Dense(1)])


def compiled(optimizer: Any = "sgd", model: keras.Model | None = None, **options: Any) -> Any:
    model = dense() if model is None else model
    model.compile(optimizer, **{"loss": "mse", **options})
    return model


def overriding(name: str) -> Callable[[], keras.Model]:
    def make() -> keras.Model:
        inputs = keras.Input((4,))
        own: dict[str, Any] = {}
        kind = type("Own", (keras.Model,), own)
        model = kind(inputs, keras.layers.Dense(1)(inputs))
        model.compile("sgd", "mse")
        method = getattr(keras.Model, name)
        setattr(kind, name, lambda self, *args, **options: method(self, *args, **options))
        return model

    return make


class OwnRate(keras.optimizers.schedules.LearningRateSchedule):  # type: ignore[misc]
    """A schedule that no shard has."""

    def __call__(self, step: Any) -> Any:
        return 0.1 / (1 + keras.ops.cast(step, "float32"))

    def get_config(self) -> dict[str, Any]:
        return {}


class OwnOptimizer(keras.optimizers.SGD):  # type: ignore[misc]
    """An optimizer that no shard has."""


def with_table() -> keras.Model:
    ids = keras.Input((2,), dtype="int64")
    rows = Embedding(4, 100, table="words")(ids)
    return compiled(model=keras.Model(ids, keras.layers.Dense(1)(keras.layers.Flatten()(rows))))


REFUSED: list[tuple[Callable[[], Any], str]] = [
    (lambda: "model.keras", "model is a str; fit takes a keras.Model"),
    (dense, "is not compiled; call model.compile"),
    (lambda: compiled(None), "has no optimizer; call model.compile"),
    (overriding("train_step"), r"Own overrides train_step\(\), which workers do not call; write"),
    (overriding("test_step"), r"Own overrides test_step\(\)"),
    (overriding("make_train_function"), r"Own overrides make_train_function\(\)"),
    (overriding("compute_metrics"), r"Own overrides compute_metrics\(\)"),
    (overriding("get_metrics_result"), r"Own overrides get_metrics_result\(\).*give a metric"),
    (overriding("compile"), r"Own overrides compile\(\).*attributes in __init__"),
    (lambda: compiled(run_eagerly=True), "run_eagerly=True"),
    (lambda: compiled(OwnOptimizer(0.1)), "OwnOptimizer.* cannot be built by the shards"),
    (lambda: compiled(keras.optimizers.SGD(OwnRate())), "schedule OwnRate.* cannot be built"),
]


@pytest.mark.parametrize(("make", "says"), REFUSED)
def test_what_workers_do_not_do_is_refused_by_name(make: Callable[[], Any], says: str) -> None:
    with pytest.raises(InvalidJob, match=says) as raised:
        check_fit_model(make())
    assert "\n" not in str(raised.value)


class OwnLoss(keras.Model):  # type: ignore[misc]
    """Adds a term to the loss."""

    def compute_loss(self, *args: Any, **options: Any) -> Any:
        return super().compute_loss(*args, **options) + 1


@pytest.mark.parametrize(
    "make",
    [
        compiled,
        lambda: compiled(jit_compile=True, steps_per_execution=8, weighted_metrics=["mae"]),
        lambda: compiled(keras.optimizers.Adam(keras.optimizers.schedules.CosineDecay(0.1, 9))),
        lambda: compiled(keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1))),
        lambda: compiled(model=OwnLoss()),
        with_table,
    ],
)
def test_what_a_job_honours_passes(make: Callable[[], keras.Model]) -> None:
    check_fit_model(make())


@pytest.mark.parametrize(
    ("check", "method"), [(check_evaluate_model, "evaluate"), (check_predict_model, "predict")]
)
def test_a_table_without_rows_is_refused(check: Callable[[keras.Model], None], method: str) -> None:
    says = f"layer 'embedding.*' is a pserver.Embedding that has not been trained.* {method}"
    with pytest.raises(InvalidJob, match=says):
        check(with_table())
