"""Row updates: equal to Keras on dense rows, and only touched rows change."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from pserver.tables.rules import make_row_rule
from pserver.tables.table import Table
from pserver.updates.schedules import make_schedule
from psrpc.checkpoint.rows_chain import optimizer_kind
from psrpc.core.errors import InvalidJob
from psrpc.core.tables import Rows
from tests.pserver.tables.table_cases import ids_of, optimizer, spec

IDS = np.arange(40)
WIDTH = 5
SCHEDULE = {
    "class_name": "ExponentialDecay",
    "config": {
        "initial_learning_rate": 0.1,
        "decay_steps": 2,
        "decay_rate": 0.5,
        "staircase": False,
        "name": "ExponentialDecay",
    },
}
CASES: list[tuple[str, dict[str, Any]]] = [
    ("SGD", {}),
    ("SGD", {"momentum": 0.9}),
    ("SGD", {"momentum": 0.9, "nesterov": True, "clipvalue": 0.5}),
    ("SGD", {"learning_rate": SCHEDULE}),
    ("Adagrad", {"initial_accumulator_value": 0.2}),
    ("Adam", {}),
    ("Adam", {"amsgrad": True, "beta_1": 0.8}),
    ("Ftrl", {}),
    ("Ftrl", {"l1_regularization_strength": 0.05, "l2_regularization_strength": 0.1}),
    ("Ftrl", {"learning_rate_power": -0.3, "beta": 0.5}),
    ("Ftrl", {"l2_shrinkage_regularization_strength": 0.01, "clipvalue": 0.5}),
    ("Ftrl", {"learning_rate_power": 0.0, "l1_regularization_strength": 0.2}),
]


def steps(n: int = 5) -> list[npt.NDArray[np.float32]]:
    rng = np.random.default_rng(3)
    return [rng.normal(size=(len(IDS), WIDTH)).astype(np.float32) for _ in range(n)]


def table_of(name: str, config: dict[str, Any]) -> Table:
    return Table(spec(width=WIDTH, optimizer=optimizer(name, **config)), 0, 1)


def values(table: Table) -> npt.NDArray[np.float32]:
    into = np.empty((len(IDS), WIDTH), np.float32)
    table.read(IDS, into)
    return into


@pytest.mark.slow
@pytest.mark.parametrize(("name", "config"), CASES)
def test_equal_to_keras(name: str, config: dict[str, Any]) -> None:
    import keras

    table = table_of(name, config)
    arguments = {"learning_rate": 0.125} | config
    if config.get("learning_rate") is SCHEDULE:
        arguments["learning_rate"] = keras.optimizers.schedules.ExponentialDecay(
            **SCHEDULE["config"]
        )
    theirs = getattr(keras.optimizers, name)(**arguments)
    variable = keras.Variable(values(table))
    for step, gradient in enumerate(steps()):
        table.apply(Rows(IDS, gradient), 1.0, step, step + 1)
        theirs.apply([keras.ops.convert_to_tensor(gradient)], [variable])
    np.testing.assert_allclose(values(table), np.asarray(variable), rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize(("name", "config"), CASES)
def test_rows_do_not_depend_on_what_is_updated_with_them(name: str, config: dict[str, Any]) -> None:
    whole, parts = table_of(name, config), table_of(name, config)
    for step, gradient in enumerate(steps()):
        whole.apply(Rows(IDS, gradient), 0.5, step, step + 1)
        order = np.random.default_rng(step).permutation(len(IDS))
        for part in np.array_split(order, 7):
            some = np.sort(part)
            parts.apply(Rows(IDS[some], gradient[some]), 0.5, step, step + 1)
    np.testing.assert_array_equal(values(parts), values(whole))


def test_one_accumulator_a_row() -> None:
    table = table_of("RowwiseAdagrad", {"initial_accumulator_value": 0.5, "epsilon": 0.01})
    w = values(table).astype(np.float64)
    s = np.full((len(IDS), 1), 0.5)
    for step, gradient in enumerate(steps()):
        table.apply(Rows(IDS, gradient), 1.0, step, step + 1)
        s += np.square(gradient.astype(np.float64)).mean(axis=1, keepdims=True)
        w -= 0.125 * gradient / (np.sqrt(s) + 0.01)
    np.testing.assert_allclose(values(table), w, rtol=1e-5, atol=1e-7)
    frozen = table.freeze()
    (accumulators,) = frozen.block(frozen.since(-1)).slots.values()
    np.testing.assert_allclose(accumulators, s, rtol=1e-6)


def test_row_wise_adagrad_follows_a_schedule() -> None:
    """The first steps of two rows, one after the other, differ by the rate alone."""
    table = table_of("RowwiseAdagrad", {"learning_rate": SCHEDULE})
    before, rate_of = values(table), make_schedule(SCHEDULE)
    ones = np.ones((1, WIDTH), np.float32)
    for step in (0, 7):
        table.apply(Rows(ids_of(step), ones), 1.0, step, step + 1)
    moved = (before - values(table))[[0, 7], 0]
    np.testing.assert_allclose(moved, [rate_of(0), rate_of(7)], rtol=1e-5)
    assert rate_of(0) != rate_of(7)


def test_row_wise_adagrad_begins_from_nothing() -> None:
    """The first step is ``learning_rate`` times the gradient over its root mean square."""
    table = table_of("RowwiseAdagrad", {})
    before, gradient = values(table), steps(1)[0]
    table.apply(Rows(IDS, gradient), 1.0, 0, 1)
    rms = np.sqrt(np.square(gradient).mean(axis=1, keepdims=True))
    np.testing.assert_allclose(values(table), before - 0.125 * gradient / rms, rtol=1e-4, atol=1e-6)
    now = values(table)
    table.apply(Rows(ids_of(1000), np.zeros((1, WIDTH), np.float32)), 1.0, 1, 2)
    row = np.empty((1, WIDTH), np.float32)
    table.read(ids_of(1000), row)
    assert np.isfinite(row).all(), "a gradient of zeros changes nothing"
    np.testing.assert_array_equal(values(table), now)


def test_untouched_rows_stay_as_they_are() -> None:
    table = table_of("Adam", {})
    first, second = steps(2)
    table.apply(Rows(IDS, first), 1.0, 0, 1)
    before = values(table)
    table.apply(Rows(IDS[::2], second[::2]), 1.0, 1, 2)
    after = values(table)
    np.testing.assert_array_equal(after[1::2], before[1::2])
    assert (after[::2] != before[::2]).all()


def test_the_rate_is_scaled() -> None:
    table = table_of("SGD", {})
    before = values(table)
    ones = np.ones((1, WIDTH), np.float32)
    table.apply(Rows(ids_of(3), ones), 0.5, 0, 1)
    np.testing.assert_array_equal(values(table)[3], before[3] - np.float32(0.0625))


@pytest.mark.parametrize(
    ("name", "config", "message"),
    [
        ("SGD", {"weight_decay": 0.1}, r"'items' has SGD\(weight_decay=0.1\).*leave it out"),
        ("Adam", {"clipnorm": 1.0}, r"'items' has Adam\(clipnorm=1.0\).*it takes .*clipvalue"),
        ("Ftrl", {"use_ema": True}, r"'items' has Ftrl\(use_ema=True\)"),
        ("Ftrl", {"learning_rate_power": 0.5}, r"Ftrl\(learning_rate_power=0.5\); expected 0 or"),
        ("RowwiseAdagrad", {"epsilon": float("nan")}, r": RowwiseAdagrad\(epsilon=...\) is nan"),
        ("RMSprop", {}, r"table 'items' has optimizer RMSprop"),
        ("SGD", {"learning_rate": {"class_name": "Own", "config": {}}}, r"'items': .*Own"),
    ],
)
def test_optimizers_that_rows_cannot_have(name: str, config: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidJob, match=message):
        table_of(name, config)


OPTIMIZERS = [
    optimizer("SGD"),
    optimizer("SGD", learning_rate=0.5, momentum=0.0),
    optimizer("SGD", momentum=0.9),
    optimizer("SGD", momentum=0.5, nesterov=True),
    optimizer("Adagrad"),
    optimizer("RowwiseAdagrad"),
    optimizer("Adam"),
    optimizer("Adam", beta_1=0.5),
    optimizer("Adam", amsgrad=True),
    optimizer("Ftrl"),
    optimizer("Ftrl", beta=1.0, l1_regularization_strength=0.1),
]


@pytest.mark.parametrize("one", OPTIMIZERS, ids=str)
def test_optimizers_of_one_kind_have_the_same_slots(one: dict[str, Any]) -> None:
    """Or a checkpoint would be found not to fit only when shards restore it."""
    mine = spec(optimizer=one)
    for other in OPTIMIZERS:
        theirs = spec(optimizer=other)
        same = make_row_rule(mine).slots.keys() == make_row_rule(theirs).slots.keys()
        assert (optimizer_kind(mine) == optimizer_kind(theirs)) <= same
        if one["class_name"] == other["class_name"]:
            assert (optimizer_kind(mine) == optimizer_kind(theirs)) == same
