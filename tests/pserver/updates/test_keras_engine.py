"""Promises of the keras engine beside its arithmetic: buffers, snapshots, odd shards."""

from __future__ import annotations

import json
import mmap
import os
import subprocess
import sys
from contextlib import nullcontext
from typing import Any

import keras
import numpy as np
import pytest

from pserver.updates.engine import NDArray
from pserver.updates.factory import make_engine
from psrpc.core.encoding import Encoding, wire_dtype
from psrpc.core.errors import InvalidArgument, InvalidJob
from psrpc.core.placement import make_plan
from psrpc.core.plan import Placement, VariableSpec, aligned_empty
from tests.pserver.engine_cases import (
    MODEL,
    Shards,
    buffers,
    initial,
    odd_shards,
    serialized,
)
from tests.pserver.rows_cases import tables

pytestmark = pytest.mark.slow

NAME = "float32.trainable"


def aligned(values: NDArray) -> NDArray:
    copy = aligned_empty(len(values), str(values.dtype))
    np.copyto(copy, values)
    return copy


@pytest.mark.parametrize(
    ("optimizer", "variables"),
    [
        (serialized("Adam"), MODEL),
        (serialized("Lamb"), MODEL),
        (serialized("Lamb"), (VariableSpec("w", (64, 64), "float32", "trainable"),)),
    ],
    ids=["cut", "whole", "whole, one variable"],
)
def test_a_snapshot_and_its_slots_stay_while_updates_go_on(
    optimizer: dict[str, Any], variables: tuple[VariableSpec, ...]
) -> None:
    cluster = Shards("keras", optimizer, 1, variables)
    (engine,) = cluster.engines
    cluster.train(range(2))
    snapshot, slots = engine.snapshot(), engine.slots()
    held = [*snapshot.values(), *(a for s in slots.elements.values() for a in s.values())]
    held += slots.scalars.values()
    before = [array.copy() for array in held]
    cluster.train(range(2, 5))
    for array, copy in zip(held, before, strict=True):
        np.testing.assert_array_equal(array, copy)
        assert not array.flags.writeable
    later = engine.snapshot()
    for name, array in snapshot.items():
        assert not np.array_equal(later[name], array), name
    assert engine.slots().iterations == 5


def test_a_snapshot_with_cut_placement_is_no_copy() -> None:
    plan = make_plan([VariableSpec("w", (4096,), "float32", "trainable")], 1, "cut")
    engine = make_engine("keras", serialized("SGD"), plan, 0)
    engine.load({NAME: np.ones(4096, np.float32)})
    assert np.shares_memory(engine.snapshot()[NAME], engine.snapshot()[NAME])


def test_loaded_values_become_the_parameters() -> None:
    plan = make_plan([VariableSpec("w", (4096,), "float32", "trainable")], 1, "cut")
    engine = make_engine("keras", serialized("SGD", learning_rate=1.0), plan, 0)
    values = aligned(np.ones(4096, np.float32))
    engine.load({NAME: values})
    first = engine.snapshot()[NAME]
    assert np.shares_memory(first, values)
    staging = buffers(plan, 0)
    staging[NAME].fill(1)
    engine.apply(staging)
    assert (first == 1).all()
    assert (engine.snapshot()[NAME] == 0).all()


@pytest.mark.parametrize("placement", ["cut", "whole"])
def test_staged_gradients_are_left_alone(placement: Placement) -> None:
    """Aligned arrays, which TensorFlow could alias: ours to write on again after each call."""
    plan = make_plan([VariableSpec("w", (8192,), "float32", "trainable")], 1, placement)
    engine = make_engine("keras", serialized("SGD", learning_rate=1.0), plan, 0)
    engine.load({NAME: aligned(np.full(8192, 3, np.float32))})
    staging = buffers(plan, 0)
    for step in range(3):
        staging[NAME].fill(step)
        engine.apply(staging)
        assert (staging[NAME] == step).all()
        staging[NAME].fill(np.nan)
    assert (engine.snapshot()[NAME] == 0).all()
    held = engine.slots()
    engine.load_slots(held)
    staging[NAME].fill(1)
    engine.apply(staging)
    assert held.iterations == 3
    assert engine.slots().iterations == 4


@pytest.mark.parametrize("encoding", ["plain", "bfloat16", "float16"])
@pytest.mark.parametrize("optimizer", ["SGD", "accumulating"])
def test_nothing_is_kept_of_gradients_in_shared_memory(encoding: Encoding, optimizer: str) -> None:
    """Their memory can be closed, which Python refuses while anything looks at it."""
    plan = make_plan([VariableSpec("w", (8192,), "float32", "trainable")], 1, "cut")
    document = serialized("SGD", learning_rate=1.0)
    if optimizer == "accumulating":
        document = serialized("SGD", learning_rate=1.0, gradient_accumulation_steps=2)
    engine = make_engine("keras", document, plan, 0, encoding)
    engine.load({NAME: np.zeros(8192, np.float32)})
    dtype = wire_dtype(encoding, "float32")
    for _ in range(2):
        memory = mmap.mmap(-1, 8192 * dtype.itemsize)
        gradient = np.frombuffer(memory, np.uint8).view(dtype)
        gradient.fill(1)
        engine.apply({NAME: gradient})
        gradient.fill(np.nan)
        del gradient
        memory.close()
    expected = -1 if optimizer == "accumulating" else -2
    assert (engine.snapshot(encoding)[NAME].astype(np.float32) == expected).all()


def test_load_compiles_what_the_job_will_use(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = make_plan([VariableSpec("w", (100,), "float32", "trainable")], 1, "cut")
    engine = make_engine("keras", serialized("SGD"), plan, 0, "bfloat16")
    engine.load({NAME: np.ones(100, np.float32)})

    def traced(*arrays: object) -> None:
        raise AssertionError("traced")

    monkeypatch.setattr(engine, "_update", traced)
    monkeypatch.setattr(engine, "_concatenated", traced)
    encodings: tuple[Encoding, ...] = ("plain", "bfloat16", "float16")
    for encoding in encodings:
        late = encoding == "float16"
        staging = buffers(plan, 0, encoding)
        staging[NAME].fill(1)
        with pytest.raises(AssertionError, match="traced") if late else nullcontext():
            engine.apply(staging)
        with pytest.raises(AssertionError, match="traced") if late else nullcontext():
            engine.snapshot(encoding)
    assert engine.slots().iterations == 2


def test_a_rounded_snapshot_makes_no_update_copy() -> None:
    """The update stays in place, at the same address, while one is held."""
    plan = make_plan([VariableSpec("w", (4096,), "float32", "trainable")], 1, "cut")
    engine = make_engine("keras", serialized("SGD"), plan, 0, "bfloat16")
    engine.load({NAME: np.ones(4096, np.float32)})
    staging = buffers(plan, 0)
    staging[NAME].fill(1)
    addresses = set()
    held = []
    for _ in range(3):
        held.append(engine.snapshot("bfloat16")[NAME])
        engine.apply(staging)
        addresses.add(engine.snapshot()[NAME].ctypes.data)
    assert len(addresses) == 1
    assert len({array.ctypes.data for array in held}) == 3


@pytest.mark.parametrize("placement", ["cut", "whole"])
def test_any_contiguous_values_can_be_loaded(placement: Placement) -> None:
    """As they come from a file: on no boundary, read-only."""
    plan = make_plan([VariableSpec("w", (4, 25), "float32", "trainable")], 1, placement)
    engine = make_engine("keras", serialized("Adam"), plan, 0)
    shifted = b"." + np.arange(100, dtype=np.float32).tobytes()
    values = np.frombuffer(shifted, np.uint8)[1:].view(np.float32)
    assert not values.flags.writeable
    engine.load({NAME: values})
    engine.load_slots(engine.slots())
    np.testing.assert_array_equal(engine.snapshot()[NAME], values)


def test_a_shard_leaves_gpus_and_cores_to_the_workers() -> None:
    """A small shard's update is fastest on one thread."""
    script = (
        "import json, os, sys\n"
        "from pserver.updates.factory import make_engine\n"
        "from psrpc.core.placement import make_plan\n"
        "from psrpc.core.plan import VariableSpec\n"
        "plan = make_plan([VariableSpec('w', (3,), 'float32', 'trainable')], 1, 'cut')\n"
        "make_engine('keras', json.loads(sys.argv[1]), plan, 0)\n"
        "assert 'tensorflow' in sys.modules\n"
        "import tensorflow as tf\n"
        "threads = tf.config.threading.get_intra_op_parallelism_threads()\n"
        "print(os.environ['CUDA_VISIBLE_DEVICES'], threads)\n"
    )
    run = subprocess.run(
        (sys.executable, "-c", script, json.dumps(serialized("SGD"))),
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "0,1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.stdout == "-1 1\n", run.stderr


_HOSTED = """
import json, os, sys
import numpy as np
import tensorflow as tf
from pserver.updates.factory import make_engine
from psrpc.core.placement import make_plan
from psrpc.core.plan import VariableSpec, aligned_empty

cpu = tf.config.list_physical_devices("CPU")[0]
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
plan = make_plan([VariableSpec("w", (4, 25), "float32", "trainable")], 1, "cut")
with tf.device("CPU:1"):
    engine = make_engine("keras", json.loads(sys.argv[1]), plan, 0, hosted=True)
    engine.load({"float32.trainable": np.linspace(-1, 1, 100, dtype=np.float32)})
    gradient = aligned_empty(100, "float32")
    gradient[:] = np.linspace(-2, 1, 100)
    for scale in (1.0, 0.5):
        engine.apply({"float32.trainable": gradient}, scale)
made = [*engine._variables, *engine._optimizer.variables]
print({variable.value.device[-5:] for variable in made})
print(os.environ["CUDA_VISIBLE_DEVICES"], tf.config.threading.get_intra_op_parallelism_threads())
print(engine.snapshot()["float32.trainable"].tobytes().hex())
"""


def test_in_a_worker_the_engine_leaves_devices_alone_and_updates_on_the_cpu() -> None:
    """Beside a second device, where TensorFlow places what is placed nowhere else."""
    document = serialized("Adam", global_clipnorm=1.0)
    run = subprocess.run(
        (sys.executable, "-c", _HOSTED, json.dumps(document)),
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "0,1"},
        capture_output=True,
        text=True,
        check=False,
    )
    plan = make_plan([VariableSpec("w", (4, 25), "float32", "trainable")], 1, "cut")
    engine = make_engine("keras", document, plan, 0)
    engine.load({NAME: np.linspace(-1, 1, 100, dtype=np.float32)})
    gradient = buffers(plan, 0)
    gradient[NAME][:] = np.linspace(-2, 1, 100)
    for scale in (1.0, 0.5):
        engine.apply(gradient, scale)
    bits = engine.snapshot()[NAME].tobytes().hex()
    assert run.stdout == f"{{'CPU:0'}}\n0,1 0\n{bits}\n", run.stderr


def test_shards_with_rows_do_not_count_for_an_update_that_needs_one_shard() -> None:
    variables = [VariableSpec("w", (100,), "float32", "trainable")]
    document = serialized("SGD", global_clipnorm=1.0)
    make_engine("keras", document, make_plan(variables, 2, "cut", tables(), 1), 1)
    with pytest.raises(InvalidJob, match="global_clipnorm"):
        make_engine("keras", document, make_plan(variables, 3, "cut", tables(), 2), 2)


def test_another_float_type_of_keras_is_refused() -> None:
    """A worker's job file may have chosen it; the optimizer's rates would have that type."""
    plan = make_plan([VariableSpec("w", (100,), "float32", "trainable")], 1, "cut")
    keras.config.set_floatx("float64")
    try:
        with pytest.raises(InvalidJob, match="leave set_floatx out, or say engine='numpy'"):
            make_engine("keras", serialized("SGD"), plan, 0)
    finally:
        keras.config.set_floatx("float32")


def test_unfit_buffers_never_reach_tensorflow() -> None:
    plan = make_plan([VariableSpec("w", (100,), "float32", "trainable")], 1, "cut")
    engine = make_engine("keras", serialized("SGD"), plan, 0)
    engine.load({NAME: np.ones(100, np.float32)})
    shifted = aligned_empty(101, "float32")[1:]
    with pytest.raises(InvalidArgument, match="not on a 64-byte boundary"):
        engine.apply({NAME: shifted})
    frozen = aligned_empty(100, "float32")
    frozen.flags.writeable = False
    with pytest.raises(InvalidArgument, match="not contiguous and writable"):
        engine.apply({NAME: frozen})
    with pytest.raises(InvalidArgument, match="not contiguous and writable"):
        engine.apply({NAME: aligned_empty(200, "float32")[::2]})
    with pytest.raises(InvalidArgument, match="missing"):
        engine.apply({"float32.state": frozen})
    assert (engine.snapshot()[NAME] == 1).all()
    assert engine.slots().iterations == 0


def test_compiling_leaves_no_trace() -> None:
    """The compiled step is tried on zeros in ``load``; weight decay or an average would show."""
    optimizer = serialized("Nadam", weight_decay=0.5, use_ema=True)
    engine = Shards("keras", optimizer, 1).engines[0]
    slots = engine.slots()
    assert slots.scalars == {"iterations": 0, "u_product": 1}
    for slot, arrays in slots.elements.items():
        assert not arrays[NAME].any(), slot
    expected = Shards("keras", optimizer, 1).cut(initial())[0]
    for name, value in engine.snapshot().items():
        np.testing.assert_array_equal(value, expected[name])


def test_an_empty_mapping_changes_nothing() -> None:
    engine = Shards("keras", serialized("SGD"), 1).engines[0]
    before = engine.snapshot()
    engine.apply({})
    for name, value in engine.snapshot().items():
        np.testing.assert_array_equal(value, before[name])
    assert engine.slots().iterations == 0


def test_loading_again_starts_afresh() -> None:
    cluster = Shards("keras", serialized("ScheduleFreeAdamW"), 1)
    cluster.train(range(3))
    first = cluster.values()
    cluster.engines[0].load(cluster.cut(initial())[0])
    cluster.train(range(3))
    for name, value in cluster.values().items():
        np.testing.assert_array_equal(value, first[name])


def test_shards_that_own_little_or_nothing() -> None:
    engines = odd_shards("keras", "Nadam")
    for shard, engine in enumerate(engines):
        slots = engine.slots()
        assert set(slots.scalars) == ({"iterations", "u_product"} if shard == 0 else {"iterations"})
    np.testing.assert_array_equal(engines[1].snapshot()["float32.state"], [2, 2])
    engines[1].load_slots(engines[0].slots())
    engines[2].load_slots(engines[0].slots())
