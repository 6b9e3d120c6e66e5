"""A model over several devices, which are parts of the CPU here."""

from __future__ import annotations

from pathlib import Path

import keras
import pytest

from psrpc.core.errors import InvalidArgument, InvalidJob, InvalidSetting
from tests.fresh_interpreter import run_forked
from tests.worker.flat_jobs import CPU, dense_model, make_job
from worker.model.placement import check_enough, placed_layers
from worker.runtime.devices import Device

ROOT = Path(__file__).parents[3]

ON_TWO = """
import keras, numpy as np, tensorflow as tf
from collections import Counter, defaultdict
from worker.runtime.devices import Device, configure_devices
two = configure_devices("none", cpus=2, intra_op_threads=1)
assert two == Device("/CPU:0", "2 cpus", ("/CPU:1",)), two
from psrpc.core.errors import InvalidArgument
from tests.worker.flat_jobs import CPU, FEATURES, FIRST, JobStepper, make_job

Dense = keras.layers.Dense

def model(second=None):
    class Second(Dense):
        def call(self, inputs):
            with tf.device(second):
                return super().call(inputs)
    return keras.Sequential([
        keras.Input((FEATURES,)),
        keras.Sequential([Dense(7, "elu"), keras.layers.BatchNormalization()], name="a"),
        keras.Sequential([keras.layers.Dropout(0.5), Dense(5, "elu")], name="b"),
        (Second if second else Dense)(3, "softmax", name="last"),
    ])

def run(device, build=model, **fields):
    stepper = JobStepper(make_job(build, **fields), device)
    result = stepper.run(FIRST)
    (trace,) = stepper.step._traces.values()
    operations = defaultdict(Counter)
    for node in trace._concrete.graph.as_graph_def().node:
        if node.op in ("MatMul", "BiasAddGrad", "EluGrad"):
            operations[node.device[-5:]][node.name.startswith("gradient_tape"), node.op] += 1
    return result.loss, stepper.by_variable(result), operations

loss, expected, _ = run(CPU)
def same(found, close=None):
    assert abs(found[0] - loss) <= (close or 0), (found[0], loss)
    for name, gradient in expected.items():
        np.testing.assert_allclose(found[1][name], gradient, rtol=0, atol=close or 0, err_msg=name)

found = run(two, devices={"b/*": 1, "last": 1})
same(found)
forward, backward = {(False, "MatMul"): 2}, {(True, "MatMul"): 4, (True, "BiasAddGrad"): 2}
assert found[2]["CPU:1"] == Counter({**forward, **backward, (True, "EluGrad"): 1}), found[2]
assert found[2][""][True, "MatMul"] == 1, found[2]
# As a model says by itself.
found = run(two, lambda: model("/CPU:1"))
same(found)
last = {(False, "MatMul"): 1, (True, "MatMul"): 2, (True, "BiasAddGrad"): 1}
assert found[2]["CPU:1"] == Counter(last), found[2]
# Where the first device is not the host of the data either.
same(run(Device("/CPU:1", "second", ("/CPU:0",)), devices={"a": 1}))
found = run(two, devices="columns")
same(found, 1e-6)
for device in ("CPU:0", "CPU:1"):
    assert found[2][device][False, "MatMul"] == 3, found[2]
    assert found[2][device][True, "MatMul"] == 5, found[2]
same(run(CPU, devices="columns"), 1e-6)
same(run(CPU, devices={"b": 7}, soft_placement=True))

def refused(device, build=model, **fields):
    try:
        run(device, build, **fields)
    except InvalidArgument as error:
        print(error)
    else:
        raise AssertionError("not refused")
refused(CPU, lambda: model("/GPU:1"))
refused(two)
same(run(CPU, lambda: model("/GPU:1"), soft_placement=True))
print("all right")
"""


@pytest.mark.slow
def test_a_model_over_two_devices_computes_what_one_does() -> None:
    done = run_forked(ON_TWO)
    assert done.stdout.endswith("all right\n"), done.stdout + done.stderr[-3000:]
    missing, idle, _ = done.stdout.splitlines()
    assert " on /GPU:1, and this worker has /CPU:0, /CPU:1; give the worker more" in missing
    assert idle.startswith("this worker has /CPU:0, /CPU:1, and the model leaves /CPU:1 idle")


def nested_model() -> keras.Model:
    inner = keras.Sequential([keras.layers.Dense(4, name="first")], name="block")
    return keras.Sequential([keras.Input((3,)), inner, keras.layers.Dense(2, name="last")])


def test_layers_are_found_by_the_first_pattern_that_fits() -> None:
    found = placed_layers(nested_model(), {"block/*": 1, "*": 2})
    assert [(layer.name, index) for layer, index in found] == [
        ("first", 1),
        ("block", 2),
        ("last", 2),
    ]
    cut = placed_layers(nested_model(), "columns")
    assert [(layer.name, index) for layer, index in cut] == [("first", None), ("last", None)]


@pytest.mark.parametrize(
    ("devices", "message"),
    [
        (
            {"blok/*": 1},
            "devices has 'blok/*', which fits no layer; they are block, block/first, last",
        ),
        ({}, "devices is {} (dict); expected 'columns', or indices of devices by the names"),
        ("rows", "devices is 'rows' (str); expected 'columns', or indices"),
        ({"last": -1}, "devices['last'] is -1"),
        ({"last": True}, "devices['last'] is True"),
    ],
)
def test_wrong_devices_are_refused(devices: object, message: str) -> None:
    with pytest.raises(InvalidJob) as refused:
        placed_layers(nested_model(), make_job(nested_model, devices=devices).devices or {})
    assert str(refused.value).startswith(message)


def test_what_cannot_be_spread_is_refused() -> None:
    with pytest.raises(InvalidSetting, match="local_steps is 2; local steps run on one device"):
        make_job(dense_model, devices="columns", local_steps=2)
    flat = keras.Sequential([keras.Input((3,)), keras.layers.Activation("elu")])
    with pytest.raises(InvalidJob, match=r"no keras\.layers\.Dense to cut"):
        placed_layers(flat, "columns")
    with pytest.raises(InvalidJob, match="is for the layers of a Keras model"):
        placed_layers(object(), "columns")
    check_enough({"a": 1}, Device("/GPU:0", "gpu", ("/GPU:1",)))
    with pytest.raises(InvalidArgument, match=r"on device 1, and this worker has /CPU:0; give"):
        check_enough({"a": 0, "b": 1}, CPU)
