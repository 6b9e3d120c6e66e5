"""Promises of the numpy engine by itself; its formulas are held against Keras elsewhere."""

from __future__ import annotations

from typing import Any, get_args

import numpy as np
import pytest

from pserver.updates import numpy_engine
from pserver.updates.engine import Slots, scalar
from pserver.updates.factory import make_engine
from pserver.updates.schedules import make_schedule
from psrpc.core.encoding import Encoding
from psrpc.core.errors import CheckpointError, InvalidArgument, InvalidJob
from psrpc.core.placement import make_plan
from psrpc.core.plan import Role, VariableSpec
from tests.pserver.engine_cases import (
    CONSTRAINED,
    MODEL,
    Shards,
    gradients,
    initial,
    odd_shards,
    schedule,
    serialized,
)

RULES = {
    "SGD": serialized("SGD"),
    "Nesterov": serialized("SGD", momentum=0.9, nesterov=True),
    "Adagrad": serialized("Adagrad", weight_decay=0.1),
    "Adam": serialized("Adam", clipvalue=0.5, amsgrad=True),
}


def bits(cluster: Shards) -> dict[str, bytes]:
    return {name: value.tobytes() for name, value in cluster.values().items()}


@pytest.mark.parametrize("name", RULES)
def test_the_same_bits_however_the_arena_is_cut(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    one = Shards("numpy", RULES[name], 1)
    one.train(range(5))
    for shards, block in ((2, 32768), (3, 32768), (1, 48), (5, 16)):
        monkeypatch.setattr(numpy_engine, "_BLOCK", block)
        other = Shards("numpy", RULES[name], shards)
        other.train(range(5))
        assert bits(other) == bits(one), (shards, block)


@pytest.mark.parametrize("encoding", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", RULES)
def test_rounded_gradients_give_the_bits_that_widened_ones_do(
    name: str, encoding: Encoding, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(numpy_engine, "_BLOCK", 48)
    rounded = Shards("numpy", RULES[name], 2, encoding=encoding)
    rounded.train(range(5))
    widened = Shards("numpy", RULES[name], 1)
    for step in range(5):
        (part,) = widened.cut(gradients(step, encoding=encoding))
        widened.engines[0].apply(part)
    assert bits(rounded) == bits(widened)


def test_one_step_of_sgd_by_hand() -> None:
    plan = make_plan([VariableSpec("w", (2,), "float32", "trainable")], 1, "cut")
    engine = make_engine("numpy", serialized("SGD", learning_rate=0.5, momentum=0.5), plan, 0)
    name = "float32.trainable"
    engine.load({name: np.array([1, 2], np.float32)})
    for _ in range(2):
        engine.apply({name: np.array([1, -2], np.float32)})
    # m1 = -0.5 g, m2 = 0.5 m1 - 0.5 g = -0.75 g, w = w0 + m1 + m2
    assert engine.snapshot()[name].tolist() == [1 - 1.25, 2 + 2.5]
    slots = engine.slots()
    assert slots.elements["momentums"][name].tolist() == [-0.75, 1.5]
    assert slots.iterations == 2


def test_loaded_values_become_the_parameters_unless_they_are_read_only() -> None:
    plan = make_plan([VariableSpec("w", (2,), "float32", "trainable")], 1, "cut")
    engine = make_engine("numpy", serialized("SGD", learning_rate=1.0), plan, 0)
    name = "float32.trainable"
    for writable, after in ((True, [0, 0]), (False, [1, 1])):
        values = np.ones(2, np.float32)
        values.flags.writeable = writable
        engine.load({name: values})
        engine.apply({name: np.ones(2, np.float32)})
        assert engine.snapshot()[name].tolist() == [0, 0]
        assert values.tolist() == after


def test_a_view_of_a_part_stays_too_and_without_one_updates_are_in_place() -> None:
    cluster = Shards("numpy", RULES["Adam"], 1)
    cluster.train(range(1))
    (engine,) = cluster.engines
    name = "float32.trainable"

    def places() -> list[int]:
        held = [engine.snapshot()[name], *(a[name] for a in engine.slots().elements.values())]
        return [array.ctypes.data for array in held]

    before = places()
    part = engine.snapshot()[name][3:9].view(np.uint8)
    velocity = engine.slots().elements["velocities"][name][3:9]
    kept = part.tobytes(), velocity.tobytes()
    cluster.train(range(1, 3))
    assert (part.tobytes(), velocity.tobytes()) == kept
    after = places()
    # Values and velocities were read; momentums and their greatest were not.
    assert [a == b for a, b in zip(before, after, strict=True)] == [False, True, False, True]
    del part, velocity
    cluster.train(range(3, 4))
    assert places() == after


def test_a_snapshot_and_its_slots_stay_while_updates_go_on() -> None:
    cluster = Shards("numpy", serialized("Adam"), 1)
    cluster.train(range(2))
    (engine,) = cluster.engines
    snapshot, slots = engine.snapshot(), engine.slots()
    held = [*snapshot.values(), *(a for s in slots.elements.values() for a in s.values())]
    before = [array.copy() for array in held]
    cluster.train(range(2, 5))
    for array, copy in zip(held, before, strict=True):
        np.testing.assert_array_equal(array, copy)
        assert not array.flags.writeable
    assert not np.array_equal(engine.snapshot()["float32.trainable"], snapshot["float32.trainable"])


@pytest.mark.parametrize("rate_scale", [1.0, 0.5])
def test_state_takes_deltas_and_no_optimizer_step(rate_scale: float) -> None:
    """The rate has no effect: the statistics of BatchNorm do not depend on it."""
    plan = make_plan(MODEL, 1, "cut")
    engine = make_engine("numpy", serialized("SGD", weight_decay=0.5), plan, 0)
    values = {a.name: np.ones(a.length, np.float32) for a in plan.arenas}
    engine.load(values)
    engine.apply({name: np.full_like(v, 0.25) for name, v in values.items()}, rate_scale)
    np.testing.assert_array_equal(engine.snapshot()["float32.state"], np.full(7, 1.25))


def test_an_empty_mapping_changes_nothing() -> None:
    cluster = Shards("numpy", serialized("Adam"), 1)
    before = bits(cluster)
    cluster.engines[0].apply({})
    assert bits(cluster) == before
    assert cluster.engines[0].slots().iterations == 0


def test_loading_again_starts_afresh() -> None:
    cluster = Shards("numpy", serialized("Adam"), 1)
    cluster.train(range(3))
    first = bits(cluster)
    cluster.engines[0].load(cluster.cut(initial())[0])
    cluster.train(range(3))
    assert bits(cluster) == first


def test_shards_that_own_little_or_nothing() -> None:
    engines = odd_shards("numpy", "Adam")
    for shard, engine in enumerate(engines):
        slots = engine.slots()
        assert set(slots.elements) == ({"momentums", "velocities"} if shard == 0 else set())
    np.testing.assert_array_equal(engines[1].snapshot()["float32.state"], [2, 2])
    engines[1].load_slots(engines[0].slots())
    assert engines[1].slots().iterations == 1


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "float32.trainable is missing"),
        (
            {"float32.trainable": np.zeros(3, np.float32)},
            r"got float32\[3\]; expected float32\[2\]",
        ),
        ({"float32.trainable": np.zeros((2, 1), np.float32)}, r"got float32\[2, 1\]"),
        ({"float32.trainable": np.zeros(2, np.float64)}, "got float64"),
        ({"float32.trainable": np.zeros(2, np.float32), "x": np.zeros(1)}, "'x' is unknown"),
        ({"float32.trainable": np.zeros(3, np.float16)}, r"got float16\[3\]"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(given: dict[str, Any], message: str) -> None:
    plan = make_plan([VariableSpec("w", (2,), "float32", "trainable")], 1, "cut")
    engine = make_engine("numpy", serialized("SGD"), plan, 0)
    with pytest.raises(InvalidArgument, match=message):
        engine.load(given)
    engine.load({"float32.trainable": np.ones(2, np.float32)})
    if given:
        with pytest.raises(InvalidArgument, match=message):
            engine.apply(given)
        assert engine.snapshot()["float32.trainable"].tolist() == [1, 1]


@pytest.mark.parametrize("arena", ["float32.state", "float64.trainable", "float64.state"])
def test_only_gradients_of_float32_may_be_rounded(arena: str) -> None:
    variables = [
        VariableSpec(f"{dtype} {role}", (2,), dtype, role)
        for dtype in ("float32", "float64")
        for role in get_args(Role)
    ]
    plan = make_plan(variables, 1, "cut")
    engine = make_engine("numpy", serialized("SGD"), plan, 0)
    values = {a.name: np.zeros(2, a.dtype) for a in plan.arenas}
    half = np.ones(2, np.float16)
    with pytest.raises(
        InvalidArgument, match=r"float32.trainable got float16\[2\]; expected float"
    ):
        engine.load(values | {"float32.trainable": half})
    engine.load(values)
    with pytest.raises(InvalidArgument, match=f"{arena} got float16"):
        engine.apply(values | {"float32.trainable": half, arena: half})
    assert not any(array.any() for array in engine.snapshot().values())
    engine.apply(values | {"float32.trainable": half})
    assert engine.snapshot()["float32.trainable"].all()


def test_slots_of_another_optimizer_are_refused() -> None:
    adam, sgd = (Shards("numpy", serialized(n), 1).engines[0] for n in ("Adam", "SGD"))
    with pytest.raises(CheckpointError, match=r"do not fit SGD.*unknown momentums/float32"):
        sgd.load_slots(adam.slots())
    with pytest.raises(CheckpointError, match=r"do not fit Adam.*missing momentums/float32"):
        adam.load_slots(sgd.slots())
    short = {"float32.trainable": np.zeros(3, np.float32)}
    slots = Slots(
        {"momentums": short, "velocities": short}, scalars={"iterations": scalar(1, "int64")}
    )
    with pytest.raises(CheckpointError, match=r"float32\[3\], expected float32\[287\]"):
        adam.load_slots(slots)
    assert adam.slots().iterations == 0


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        (serialized("RMSprop"), "has no RMSprop; it has SGD, Adagrad, Adam, AdamW"),
        (serialized("SGD", clipnorm=1.0), r"SGD\(clipnorm=1.0\).*Use engine keras"),
        (serialized("Adam", use_ema=True), r"Adam\(use_ema=True\)"),
        (serialized("Adam", gradient_accumulation_steps=2), "gradient_accumulation_steps=2"),
        (
            serialized("AdamW", weight_decay=0.1) | {"excluded_from_weight_decay": ["b"]},
            "but b are excluded",
        ),
        (
            serialized(
                "SGD",
                learning_rate=schedule(
                    "ExponentialDecay",
                    initial_learning_rate=1,
                    decay_steps=2,
                    decay_rate=0.5,
                    staircase=False,
                ),
            ),
            "has the rate 1; write 1.0",
        ),
        (serialized("MyOptimizer"), "MyOptimizer cannot be built"),
    ],
)
def test_optimizers_that_the_numpy_engine_refuses(optimizer: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidJob, match=message):
        make_engine("numpy", optimizer, make_plan(MODEL, 1, "whole"), 0)


def test_constraints_are_refused() -> None:
    with pytest.raises(InvalidJob, match="'net/dense/kernel' has NonNeg"):
        make_engine("numpy", serialized("SGD"), make_plan(CONSTRAINED, 1, "whole"), 0)


def test_a_piecewise_schedule_changes_after_its_boundary() -> None:
    rate = make_schedule(
        schedule("PiecewiseConstantDecay", boundaries=[2, 4], values=[1.0, 0.5, 0.25])
    )
    assert [float(rate(step)) for step in range(7)] == [1, 1, 1, 0.5, 0.5, 0.25, 0.25]
