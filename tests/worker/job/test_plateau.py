"""``stop_early`` and ``reduce_lr``, as a user writes them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.core.plateau import ReduceLr, StopEarly
from coordinator.core.retention import Objective
from psrpc.core.errors import InvalidJob
from worker import Arrays, Job
from worker.job.plateau import parse_reduce_lr, parse_stop_early

STOP = {"metric": "loss", "lower": True, "patience": 0, "min_delta": 0.0, "restore_best": False}
REDUCE = {
    "metric": "loss",
    "lower": True,
    "factor": 0.1,
    "patience": 10,
    "min_delta": 1e-4,
    "cooldown": 0,
    "min_lr": 0.0,
}


def make_job(**fields: Any) -> Job:
    data = Arrays(np.zeros((8, 1), np.float32), np.zeros(8, np.float32))
    defaults: dict[str, Any] = {
        "model": lambda: None, "loss": "mse", "optimizer": "sgd", "train": data, "eval": data,
        "batch_size": 2,
    }  # fmt: skip
    return Job(**(defaults | fields))


def test_defaults_are_those_of_keras() -> None:
    keras = pytest.importorskip("keras")
    assert parse_stop_early("min:loss") == STOP
    assert parse_reduce_lr("loss") == REDUCE
    early = keras.callbacks.EarlyStopping()
    assert (early.patience, early.min_delta) == (STOP["patience"], STOP["min_delta"])
    slower = keras.callbacks.ReduceLROnPlateau()
    for name in ("factor", "patience", "min_delta", "cooldown", "min_lr"):
        assert getattr(slower, name) == REDUCE[name], name


@pytest.mark.parametrize(
    ("text", "instead"),
    [
        ("loss:3", "min:loss patience=3"),
        ("min:val_loss:3", "min:val_loss patience=3"),
        ("accuracy=5", "max:accuracy patience=5"),
    ],
)
def test_patience_without_its_name_is_answered_with_how_it_is_written(
    text: str, instead: str
) -> None:
    for parse, field in ((parse_stop_early, "stop_early"), (parse_reduce_lr, "reduce_lr")):
        with pytest.raises(InvalidJob) as raised:
            parse(text)
        assert str(raised.value) == (
            f"{field} is {text!r}; expected a result and settings, such as {instead!r}"
        )


def test_settings_stand_behind_the_name() -> None:
    found = parse_stop_early("max:accuracy patience=3 min_delta=1e-3 restore_best=true")
    assert found == {
        "metric": "accuracy", "lower": False, "patience": 3, "min_delta": 0.001,
        "restore_best": True,
    }  # fmt: skip
    assert parse_reduce_lr("min:loss factor=0.5 cooldown=2")["cooldown"] == 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "min:loss patience=-1",
            "stop_early has patience=-1; expected a whole number of at least 0",
        ),
        ("min:loss patience=2.5", "expected a whole number"),
        ("min:loss min_delta=nan", "min_delta=nan; expected a number of at least 0"),
        ("min:loss patiense=2", "no setting 'patiense=2'; did you mean 'patience'?"),
        ("min:loss factor=0.5", "no setting 'factor=0.5'; its settings are patience"),
        ("min:loss patience", "stop_early: patience has no value; expected, say, patience=0"),
        ("min:loss restore_best", "restore_best has no value; expected, say, restore_best=true"),
        ("min:loss patience=1 patience=2", "has patience twice"),
        ("min:loss restore_best=yes", "restore_best=yes; expected true or false"),
        ("gain patience=2", "stop_early is 'gain'; say in which direction it gets better"),
        ("", "stop_early is ''; say in which direction"),
        (3, "stop_early is 3 (int); expected a name like 'min:loss'"),
    ],
)
def test_wrong_values_are_refused_with_the_reason(text: object, message: str) -> None:
    with pytest.raises(InvalidJob) as error:
        make_job(stop_early=text)
    assert message in str(error.value)


@pytest.mark.parametrize("factor", ["0", "1", "2"])
def test_a_factor_makes_the_rate_smaller(factor: str) -> None:
    with pytest.raises(InvalidJob, match="expected a number above 0 and below 1"):
        make_job(reduce_lr=f"min:loss factor={factor}")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"stop_early": "min:loss", "eval": None}, "stop_early is 'min:loss', but eval is None"),
        ({"reduce_lr": "min:loss", "eval": None}, "reduce_lr is 'min:loss', but eval is None"),
        (
            {"reduce_lr": "min:loss", "then": "sync", "then_after": 1, "epochs": 2, "replicas": 2},
            "reduce_lr and then exclude each other",
        ),
        (
            {"reduce_lr": "min:loss", "local_steps": 2},
            "reduce_lr and local_steps exclude each other",
        ),
    ],
)
def test_conflicting_settings_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidJob) as error:
        make_job(**fields)
    assert message in str(error.value)


JOB = """
import keras, numpy as np
from worker import Arrays, Job
x = np.zeros((8, 2), np.float32)
job = Job(
    model=lambda: keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)]),
    loss="mse", optimizer=lambda: keras.optimizers.SGD({rate}), train=Arrays(x, x[:, :1]),
    eval=Arrays(x, x[:, :1]), metrics=["mae"], batch_size=4, {fields},
)
"""


def described(tmp_path: Any, fields: str, rate: str = "0.1") -> dict[str, Any]:
    from worker.describe.describe import describe
    from worker.job.loader import load_job

    (tmp_path / "job.py").write_text(JOB.format(rate=rate, fields=fields))
    return describe(load_job(str(tmp_path / "job.py"), []))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fields", "rate", "message"),
    [
        (
            "stop_early='max:f1'",
            "0.1",
            "stop_early is 'max:f1', but evaluations have no 'f1'; they",
        ),
        ("reduce_lr='max:f1'", "0.1", "they have loss, mae"),
        (
            "reduce_lr='min:loss'",
            "keras.optimizers.schedules.CosineDecay(0.1, 10)",
            "the optimizer's learning rate is CosineDecay, a schedule",
        ),
        (
            "keep_best='max:mae', stop_early='min:loss restore_best=true'",
            "0.1",
            "restores the best of something else",
        ),
    ],
)
def test_unsupported_schedules_are_refused(
    tmp_path: Any, fields: str, rate: str, message: str
) -> None:
    with pytest.raises(InvalidJob) as error:
        described(tmp_path, fields, rate)
    assert message in str(error.value)


@pytest.mark.slow
def test_a_description_says_both_and_keeps_the_best_to_restore(tmp_path: Any) -> None:
    found = described(tmp_path, "stop_early='min:loss restore_best=true', reduce_lr='min:mae'")
    assert found["stop_early"] == {**STOP, "restore_best": True}
    assert found["reduce_lr"] == {**REDUCE, "metric": "mae"}
    assert found["keep_best"] == {"metric": "loss", "lower": True}
    assert described(tmp_path, "stop_early='min:loss'")["keep_best"] is None


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
@settings(derandomize=True, max_examples=60)
@given(
    st.lists(st.integers(0, 5).map(float), min_size=1, max_size=14),
    st.integers(0, 4),
    st.sampled_from([0.0, 1.0]),
    st.integers(0, 3),
    st.booleans(),
)
def test_both_decide_as_keras_does(
    results: list[float], patience: int, min_delta: float, cooldown: int, lower: bool
) -> None:
    keras = pytest.importorskip("keras")
    objective = Objective("m", lower)
    mode = "min" if lower else "max"
    model = keras.Sequential([keras.Input((1,))])
    model.compile(keras.optimizers.SGD(1.0))
    model.stop_training = False
    early = keras.callbacks.EarlyStopping("m", min_delta=min_delta, patience=patience, mode=mode)
    slower = keras.callbacks.ReduceLROnPlateau(
        "m", factor=0.5, patience=patience, mode=mode, min_delta=min_delta, cooldown=cooldown,
        min_lr=0.125,
    )  # fmt: skip
    for callback in (early, slower):
        callback.set_model(model)
        callback.on_train_begin()
    stop = StopEarly(objective, patience, min_delta)
    reduce = ReduceLr(objective, 0.5, patience, min_delta, cooldown, 0.125)
    stopped = False
    for epoch, value in enumerate(results):
        slower.on_epoch_end(epoch, {"m": value})
        rate = reduce.rate(results[: epoch + 1], 1.0)
        assert rate == pytest.approx(float(model.optimizer.learning_rate.numpy()))
        if not stopped:
            early.on_epoch_end(epoch, {"m": value})
            stopped = model.stop_training
            found = stop.judge(results[: epoch + 1])
            assert (found is not None) == stopped
            if found is not None:
                assert (found.epoch, found.best) == (epoch + 1, early.best_epoch + 1)
