"""Both engines, over several shards, against ``optimizer.apply`` in one process.

Tolerances: the engines compute what Keras computes, in another association. XLA contracts
``a * b + c`` into one rounding and has its own ``pow``; Adam's ``1 - beta_2**t`` loses four digits
at t = 1, which leaves 3e-5 of an update. Values here are of the order of 1, updates of 0.01 to 0.1,
six steps: 1e-6 is a few units in the last place of the largest values, and a missing or doubled
term would show at 1e-3.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest

from pserver.updates.allowlist import AVERAGES
from pserver.updates.engine import EngineKind
from pserver.updates.factory import make_engine
from pserver.updates.keras_objects import keras_slot_names
from psrpc.core.encoding import Encoding, round_to
from psrpc.core.placement import make_plan
from psrpc.core.plan import Placement, VariableSpec
from tests.pserver.engine_cases import (
    CONSTRAINED,
    MODEL,
    Shards,
    Values,
    buffers,
    plain_keras,
    schedule,
    serialized,
)

pytestmark = pytest.mark.slow

STEPS = 6

NAMED = {
    "SGD": serialized("SGD", learning_rate=0.1),
    "momentum": serialized("SGD", learning_rate=0.1, momentum=0.9),
    "Nesterov": serialized("SGD", learning_rate=0.1, momentum=0.9, nesterov=True),
    "Adagrad": serialized("Adagrad", learning_rate=0.1),
    "Adam": serialized("Adam"),
}

IN_NUMPY_TOO = {
    "AdamW": serialized("AdamW", weight_decay=0.05),
    "Adam with amsgrad": serialized("Adam", amsgrad=True, beta_2=0.5),
    "clipvalue": serialized("SGD", learning_rate=0.1, clipvalue=0.5),
    "weight decay": serialized("Adagrad", learning_rate=0.1, weight_decay=0.1),
    "ExponentialDecay": serialized(
        "SGD",
        learning_rate=schedule(
            "ExponentialDecay",
            initial_learning_rate=0.1,
            decay_steps=3,
            decay_rate=0.5,
            staircase=False,
        ),
    ),
    "PiecewiseConstantDecay": serialized(
        "SGD",
        learning_rate=schedule(
            "PiecewiseConstantDecay", boundaries=[1, 3], values=[0.1, 0.05, 0.01]
        ),
    ),
    "PolynomialDecay": serialized(
        "SGD",
        learning_rate=schedule(
            "PolynomialDecay",
            initial_learning_rate=0.1,
            decay_steps=4,
            end_learning_rate=0.01,
            power=2.0,
            cycle=True,
        ),
    ),
    "InverseTimeDecay": serialized(
        "SGD",
        learning_rate=schedule(
            "InverseTimeDecay",
            initial_learning_rate=0.1,
            decay_steps=2,
            decay_rate=0.5,
            staircase=True,
        ),
    ),
    "CosineDecay with warm-up": serialized(
        "Adam",
        learning_rate=schedule(
            "CosineDecay",
            initial_learning_rate=0.0,
            decay_steps=5,
            alpha=0.1,
            warmup_target=0.1,
            warmup_steps=2,
        ),
    ),
    "CosineDecayRestarts": serialized(
        "SGD",
        learning_rate=schedule(
            "CosineDecayRestarts",
            initial_learning_rate=0.1,
            first_decay_steps=2,
            t_mul=2.0,
            m_mul=0.5,
            alpha=0.0,
        ),
    ),
}

CUT = {
    "Adadelta": serialized("Adadelta", learning_rate=1.0),
    "Adamax": serialized("Adamax"),
    "Ftrl": serialized("Ftrl", learning_rate=0.1, l1_regularization_strength=0.01, beta=0.1),
    "Lion": serialized("Lion"),
    "Nadam": serialized("Nadam"),
    "RMSprop": serialized("RMSprop"),
    "RMSprop centered": serialized("RMSprop", momentum=0.9, centered=True, epsilon=1e-3),
    "ScheduleFreeAdamW": serialized("ScheduleFreeAdamW", warmup_steps=3, weight_decay=0.01),
    "averages": serialized("SGD", learning_rate=0.1, use_ema=True, ema_momentum=0.9),
    "averages written back": serialized(
        "SGD", learning_rate=0.1, use_ema=True, ema_momentum=0.9, ema_overwrite_frequency=2
    ),
    "accumulation": serialized("Adam", gradient_accumulation_steps=2),
}

WHOLE = {
    "Adafactor": serialized("Adafactor"),
    "Lamb": serialized("Lamb"),
    "clipnorm": serialized("SGD", learning_rate=0.1, clipnorm=0.7),
    "weight-decay exclusion": serialized("AdamW", weight_decay=0.2)
    | {"excluded_from_weight_decay": ["net/dense/bias", "net/scale"]},
}


def assert_equal_values(actual: Values, expected: Values, tolerance: float = 1e-6) -> None:
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(
            actual[name], value, rtol=tolerance, atol=tolerance, err_msg=name
        )


def trained(kind: EngineKind, optimizer: dict[str, Any], shards: int) -> Values:
    cluster = Shards(kind, optimizer, shards)
    if kind == "keras":
        check_slot_names(cluster, optimizer)
    cluster.train(range(STEPS))
    return cluster.values()


def check_slot_names(cluster: Shards, optimizer: dict[str, Any]) -> None:
    """The slots of all shards have the names that are known without an engine."""
    slots = [engine.slots() for engine in cluster.engines]
    names = {name for one in slots for name in (*one.elements, *one.variables, *one.scalars)}
    whole = make_plan(MODEL, 1, cluster.plan.placement)
    assert keras_slot_names(optimizer, whole) == sorted(names)


@pytest.mark.parametrize("name", NAMED)
def test_named_optimizers_equal_plain_keras_in_both_engines(name: str) -> None:
    """:func:`test_slots_go_on_in_the_other_engine` has that of Keras on two shards and on one."""
    optimizer = NAMED[name]
    expected = plain_keras(optimizer, STEPS)
    by_keras = trained("keras", optimizer, 3)
    assert_equal_values(by_keras, expected)
    for shards in (1, 2, 3):
        by_numpy = trained("numpy", optimizer, shards)
        assert_equal_values(by_numpy, expected)
    assert_equal_values(by_keras, by_numpy)


@pytest.mark.parametrize("name", IN_NUMPY_TOO)
def test_arguments_and_schedules_equal_plain_keras_in_both_engines(name: str) -> None:
    optimizer = IN_NUMPY_TOO[name]
    expected = plain_keras(optimizer, STEPS)
    assert_equal_values(trained("numpy", optimizer, 2), expected)
    assert_equal_values(trained("keras", optimizer, 2), expected)


@pytest.mark.parametrize(
    ("kind", "name", "encoding"),
    [
        *product(["numpy"], ["momentum", "clipvalue", "Adam"], ["bfloat16", "float16"]),
        # An engine of Keras widens before its optimizer sees anything.
        ("keras", "momentum", "bfloat16"),
        ("keras", "clipvalue", "float16"),
        *product(["keras"], ["Adam"], ["bfloat16", "float16"]),
    ],
)
def test_rounded_gradients_equal_plain_keras(
    kind: EngineKind, name: str, encoding: Encoding
) -> None:
    """Beside a float64 arena and one of state, which are always plain; 287 elements on three
    shards, none of which has a round number of them."""
    variables = (*MODEL, VariableSpec("net/double", (40,), "float64", "trainable"))
    optimizer = (NAMED | IN_NUMPY_TOO)[name]
    cluster = Shards(kind, optimizer, 3, variables, encoding=encoding)
    cluster.train(range(STEPS))
    expected = plain_keras(optimizer, STEPS, variables, encoding=encoding)
    assert_equal_values(cluster.values(), expected)


@pytest.mark.parametrize("encoding", ["bfloat16", "float16"])
def test_rounded_gradients_of_whole_variables_equal_plain_keras(encoding: Encoding) -> None:
    optimizer = WHOLE["Lamb"]
    cluster = Shards("keras", optimizer, 2, encoding=encoding)
    assert cluster.plan.placement == "whole"
    cluster.train(range(STEPS))
    assert_equal_values(cluster.values(), plain_keras(optimizer, STEPS, encoding=encoding))


TIES = [1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-11, 1 + 3 * 2**-11]
ENDS = [65504, 65519.9, 65520, -7e4, 3.3e38, -3.4e38, np.inf, -np.inf, np.nan]
ODD = np.array([0, -0.0, *TIES, *ENDS, np.pi, 1e-3, 6.1e-5, 3e-7, -1e-9], np.float32)
"""With half-precision subnormals at its end."""


@pytest.mark.parametrize("kind", ["numpy", "keras"])
@pytest.mark.parametrize("placement", ["cut", "whole"])
@pytest.mark.parametrize("length", [1, 20, 1037])
def test_snapshots_in_every_encoding(kind: EngineKind, placement: Placement, length: int) -> None:
    variables = (
        VariableSpec("first", (length,), "float32", "trainable"),
        VariableSpec("second", (3,), "float32", "trainable"),
        VariableSpec("double", (5,), "float64", "trainable"),
        VariableSpec("mean", (20,), "float32", "state"),
    )
    plan = make_plan(variables, 1, placement)
    engine = make_engine(kind, serialized("SGD", learning_rate=1.0), plan, 0, "bfloat16")
    values = {a.name: np.resize(ODD, a.length).astype(a.dtype) for a in plan.arenas}
    engine.load({name: array.copy() for name, array in values.items()})
    encodings: tuple[Encoding, ...] = ("plain", "bfloat16", "float16")
    taken = {encoding: engine.snapshot(encoding) for encoding in encodings}
    gradients = buffers(plan, 0)
    for array in gradients.values():
        array.fill(1)
    engine.apply(gradients)
    for encoding, snapshot in taken.items():
        assert list(snapshot) == [a.name for a in plan.arenas]
        for name, array in snapshot.items():
            expected = values[name]
            if name == "float32.trainable" and encoding != "plain":
                expected = round_to(expected, encoding)
            assert array.dtype == expected.dtype
            assert not array.flags.writeable
            # By value: what kind of NaN comes out is left open.
            wide, expected = array.astype(np.float64), expected.astype(np.float64)
            np.testing.assert_array_equal(wide, expected, f"{encoding} {name}")
            np.testing.assert_array_equal(np.signbit(wide), np.signbit(expected))
    again = engine.snapshot("bfloat16")["float32.trainable"]
    assert float(again[0]) == -1
    with pytest.raises(ValueError, match="int8"):
        engine.snapshot("int8")


@pytest.mark.parametrize("kind", ["numpy", "keras"])
def test_snapshots_of_shards_that_own_nothing(kind: EngineKind) -> None:
    plan = make_plan([VariableSpec("w", (3,), "float32", "trainable")], 2, "whole")
    engine = make_engine(kind, serialized("SGD"), plan, 1, "float16")
    staging = buffers(plan, 1, "float16")
    engine.load({n: a.astype(np.float32) for n, a in staging.items()})
    engine.apply(staging)
    (array,) = engine.snapshot("float16").values()
    assert array.dtype == np.float16
    assert len(array) == 0


@pytest.mark.parametrize("name", CUT)
def test_other_elementwise_optimizers_equal_plain_keras(name: str) -> None:
    cluster = Shards("keras", CUT[name], 2)
    assert cluster.plan.placement == "cut"
    check_slot_names(cluster, CUT[name])
    cluster.train(range(STEPS))
    assert_equal_values(cluster.values(), plain_keras(CUT[name], STEPS))


@pytest.mark.parametrize("name", WHOLE)
def test_updates_of_whole_variables_equal_plain_keras(name: str) -> None:
    cluster = Shards("keras", WHOLE[name], 2)
    assert cluster.plan.placement == "whole"
    check_slot_names(cluster, WHOLE[name])
    cluster.train(range(STEPS))
    assert_equal_values(cluster.values(), plain_keras(WHOLE[name], STEPS))


def test_muon_equals_plain_keras() -> None:
    """Newton-Schulz iterations on a matrix product amplify rounding: 1e-5. The embedding, told
    by its path, is left to Adam."""
    optimizer = serialized("Muon", exclude_layers=["tall"])
    cluster = Shards("keras", optimizer, 2)
    check_slot_names(cluster, optimizer)
    cluster.train(range(STEPS))
    assert_equal_values(cluster.values(), plain_keras(optimizer, STEPS), 1e-5)
    plainer = Shards("keras", serialized("Muon", exclude_embeddings=False), 2)
    plainer.train(range(STEPS))
    for name, differs in (
        ("net/embedding/embeddings", True),
        ("net/tall/kernel", True),
        ("net/dense/kernel", False),
    ):
        same = np.allclose(plainer.values()[name], cluster.values()[name], atol=1e-5)
        assert same != differs, name


def test_constraints_equal_plain_keras() -> None:
    optimizer = serialized("Adam", learning_rate=0.1)
    cluster = Shards("keras", optimizer, 2, CONSTRAINED)
    assert cluster.plan.placement == "whole"
    cluster.train(range(STEPS))
    values = cluster.values()
    assert_equal_values(values, plain_keras(optimizer, STEPS, CONSTRAINED))
    assert values["net/dense/kernel"].min() == 0
    np.testing.assert_allclose(np.linalg.norm(values["net/tall/kernel"], axis=0), 1, rtol=1e-5)


def test_the_averages_slot_is_what_keras_ends_a_fit_with() -> None:
    optimizer = CUT["averages"]
    cluster = Shards("keras", optimizer, 2)
    cluster.train(range(STEPS))
    given = [engine.slots().elements[AVERAGES] for engine in cluster.engines]
    expected = plain_keras(optimizer, STEPS, finalize=True)
    state = {v.name for v in MODEL if v.role == "state"}
    averages = {n: v for n, v in cluster.join(given).items() if n not in state}
    assert_equal_values(averages, {n: v for n, v in expected.items() if n not in state})


def test_global_clipnorm_equals_plain_keras_on_one_shard() -> None:
    optimizer = serialized("SGD", learning_rate=0.1, global_clipnorm=1.0)
    assert_equal_values(trained("keras", optimizer, 1), plain_keras(optimizer, STEPS))


def test_float64_variables_beside_float32_equal_plain_keras() -> None:
    variables = (*MODEL, VariableSpec("net/double", (40,), "float64", "trainable"))
    for kind in ("numpy", "keras"):
        cluster = Shards(kind, serialized("Adam"), 2, variables)
        cluster.train(range(STEPS))
        assert_equal_values(cluster.values(), plain_keras(serialized("Adam"), STEPS, variables))


@pytest.mark.parametrize("kind", ["numpy", "keras"])
@pytest.mark.parametrize("placement", ["cut", "whole"])
def test_an_update_replaces_integers(kind: EngineKind, placement: Placement) -> None:
    variables = (
        VariableSpec("w", (20,), "float32", "trainable"),
        VariableSpec("count", (3,), "int64", "state"),
    )
    plan = make_plan(variables, 1, placement)
    engine = make_engine(kind, serialized("SGD", learning_rate=1.0), plan, 0)
    loaded = buffers(plan, 0)
    loaded["int64.state"][:] = [5, -(2**63), 2**63 - 1]
    loaded["float32.trainable"].fill(0)
    engine.load(loaded)
    before = engine.snapshot()["int64.state"]
    given = buffers(plan, 0)
    given["float32.trainable"].fill(1)
    given["int64.state"][:] = [2**53 + 1, 2**63 - 1, -(2**63)]
    engine.apply(given, rate_scale=0.5)
    given["int64.state"].fill(0)  # it is the caller's again
    assert engine.snapshot()["int64.state"].tolist() == [2**53 + 1, 2**63 - 1, -(2**63)]
    assert before.tolist() == [5, -(2**63), 2**63 - 1]


RESTORED = {
    "SGD momentum": NAMED["momentum"],
    "Adagrad": NAMED["Adagrad"],
    "Adam": NAMED["Adam"],
    "Nadam": CUT["Nadam"],
    "ScheduleFreeAdamW": CUT["ScheduleFreeAdamW"],
    "averages written back": CUT["averages written back"],
    "accumulation": CUT["accumulation"],
    "schedule": IN_NUMPY_TOO["CosineDecay with warm-up"],
    "Adafactor": WHOLE["Adafactor"],
    "Lamb": WHOLE["Lamb"],
}


@pytest.mark.parametrize("name", RESTORED)
def test_slots_go_on_in_another_number_of_shards(name: str) -> None:
    """tests/worker/fit/test_mirror.py takes the slots of each optimizer from two shards, too."""
    optimizer = RESTORED[name]
    before = Shards("keras", optimizer, 3 if name in ("Adam", "accumulation", "Lamb") else 1)
    before.train(range(3))
    after = Shards("keras", optimizer, 2, values=before.values())
    before.move_slots_to(after)
    after.train(range(3, STEPS))
    assert_equal_values(after.values(), plain_keras(optimizer, STEPS))
    assert all(engine.slots().iterations == STEPS for engine in after.engines)


def test_muon_slots_go_on_though_matrices_have_no_velocity() -> None:
    optimizer = serialized("Muon")
    before = Shards("keras", optimizer, 3)
    before.train(range(3))
    after = Shards("keras", optimizer, 1, values=before.values())
    before.move_slots_to(after)
    after.train(range(3, STEPS))
    assert_equal_values(after.values(), plain_keras(optimizer, STEPS), 1e-5)


@pytest.mark.parametrize("name", NAMED)
@pytest.mark.parametrize(("first", "second"), [("numpy", "keras"), ("keras", "numpy")])
def test_slots_go_on_in_the_other_engine(name: str, first: EngineKind, second: EngineKind) -> None:
    before = Shards(first, NAMED[name], 2)
    before.train(range(3))
    after = Shards(second, NAMED[name], 1, values=before.values())
    before.move_slots_to(after)
    after.train(range(3, STEPS))
    assert_equal_values(after.values(), plain_keras(NAMED[name], STEPS))
