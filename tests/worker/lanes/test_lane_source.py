"""A micro-batch on each device of a worker; the devices are parts of the CPU here."""

from __future__ import annotations

from pathlib import Path

import pytest

from psrpc.core.errors import InvalidArgument
from tests.fresh_interpreter import run_forked
from tests.worker.flat_jobs import dense_model, make_job
from worker.lanes.lane_source import check_lanes
from worker.runtime.devices import HOST, Device

ROOT = Path(__file__).parents[3]
TWO = Device(HOST, "2 cpus", ("/CPU:1",))

ON_TWO = """
import keras, numpy as np, tensorflow as tf, threading
from worker.runtime.devices import configure_devices
two = configure_devices("none", cpus=2, intra_op_threads=1)
from pserver.transport.workspace import Workspace
from psrpc.core.batch import BatchId
from psrpc.core.errors import InvalidArgument, InvalidJob
from psrpc.core.placement import make_plan
from tests.worker.flat_jobs import JobStepper, make_job, noisy_model
from worker.lanes.lane_source import LaneSource
from worker.model.variables import model_variables
from worker.runtime.waits import WorkerWaits

A, B, C = BatchId(0, 0, 8), BatchId(0, 8, 8), BatchId(0, 16, 8)

def made(build=noisy_model, **fields):
    source = LaneSource(make_job(build, **{"mode": "async", **fields}), two, WorkerWaits(print))
    source.build()
    plan = make_plan([spec for spec, _ in model_variables(source._replica.model)], 2, "cut")
    source.prepare(plan, Workspace(plan, source.wire, shared=False))
    for name, values in source.initial_values().items():
        source.spare[name][:] = values
    source.swap(0)
    return source

def at_once(source, *batches):
    results = source.gradients(batches, [source.read(batch) for batch in batches])
    return [(result.loss, copied(result)) for result in results]

def copied(result):
    return [{name: [part.tobytes() for part in encoded.parts] for name, encoded in shard.items()}
            for shard in result.gradients]

def same(found, expected):
    assert found == expected

# The bits of one device, whichever device computes a batch, with others beside it or none.
stepper = JobStepper(make_job(noisy_model))
expected = {batch: (result.loss, copied(result)) for batch in (A, B, C)
            for result in [stepper.run(batch)]}
source = made()
assert source.at_once == 2

# Two batches for each device are read ahead.
feed = source._made.feed
source.expect([BatchId(0, 8 * n, 8) for n in range(6)])
with feed._changed:
    assert feed._changed.wait_for(lambda: len(feed._ready) == 4 and not feed._reading, 60)
    assert len(feed._expected) == 2
source.forget()

for batches in ((A, B), (A, B), (C, A), (B,), (B, C)):
    for batch, found in zip(batches, at_once(source, *batches), strict=True):
        same(found, expected[batch])
alone = source.gradient(C, source.read(C))
same((alone.loss, copied(alone)), expected[C])
(trace,) = source._lanes[1]._step._traces.values()
nodes = trace._concrete.graph.as_graph_def().node
where = {node.device[-5:] for node in nodes if node.op == "MatMul"}
assert where == {"CPU:1"}, where

# Gradients that are to be summed stay on their devices until they are asked for.
source = made(sum_devices=True)
given = [source.read(batch) for batch in (A, B)]
results = source.gradients((A, B), given)
assert [result.buffers[0].device[-5:] for result in results] == ["CPU:0", "CPU:1"]
sums = source.add(results)
for batch, result in zip((A, B), results, strict=True):
    same((result.loss, copied(result)), expected[batch])
for total, *summands in zip(sums, *[result.gradients for result in results], strict=True):
    for name, encoded in total.items():
        one, other = (np.concatenate(each[name].parts) for each in summands)
        assert np.array_equal(np.concatenate(encoded.parts), one + other), name
same(at_once(source, C)[0], expected[C])

# The devices compute at the same time, once both are compiled.
meets = threading.Barrier(2, timeout=60)
compiled = []
def meet(value):
    if compiled:
        meets.wait()
    if "fails" in compiled:
        raise ValueError("as planned")
    return value
def meeting(y_true, y_pred):
    loss = keras.losses.sparse_categorical_crossentropy(y_true, y_pred)
    stops = tf.numpy_function(meet, [tf.zeros([])], tf.float32)
    stops.set_shape([])
    return loss + tf.stop_gradient(stops)
source = made(loss=meeting)
at_once(source, A, B)
compiled.append("meets")
for batch, found in zip((A, B), at_once(source, A, B), strict=True):
    same(found, expected[batch])

# An error on one device is raised when no other computes any more.
compiled.append("fails")
try:
    at_once(source, A, B)
except InvalidJob as error:
    assert "the training step on" in str(error), error
else:
    raise AssertionError("not raised")

# Each device has a residual of its own.
source = made(compression="int8")
first = at_once(source, A, B)
source.settle((), A)
source.settle((0, 1), B)
again = at_once(source, A, B)
same(again[1], first[1])
try:
    same(again[0], first[0])
except AssertionError:
    pass
else:
    raise AssertionError("what int8 leaves out is added to the next gradient")
source.take_back(A)
source.take_back(B)
for mine, theirs in zip(at_once(source, A, B), again, strict=True):
    same(mine, theirs)
source.take_back()
for mine, theirs in zip(at_once(source, A, B), again, strict=True):
    same(mine, theirs)
# Joining anew forgets all residuals.
source.leave()
plan = source._plan
source.prepare(plan, Workspace(plan, source.wire, shared=False))
for name, values in source.initial_values().items():
    source.spare[name][:] = values
source.swap(0)
for mine, theirs in zip(at_once(source, A, B), first, strict=True):
    same(mine, theirs)

# A model that says tf.device by itself keeps all devices for one micro-batch.
class Second(keras.layers.Dense):
    def call(self, inputs):
        with tf.device("/CPU:1"):
            return super().call(inputs)
spread = made(lambda: keras.Sequential(
    [keras.Input((6,)), keras.layers.Dense(5), Second(3, "softmax")]), local_steps=1)
assert spread.at_once == 1
spread.gradient(A, spread.read(A))
# So does one that says it in training alone.
class Noise(keras.layers.Layer):
    def call(self, inputs, training=False):
        with tf.device("/CPU:1" if training else None):
            return inputs * 2.0
trained = made(lambda: keras.Sequential(
    [keras.Input((6,)), Noise(), keras.layers.Dense(3, "softmax")]))
assert trained.at_once == 1
trained.gradient(A, trained.read(A))
try:
    made(local_steps=2)
except InvalidArgument as error:
    assert error.code == "PS506", error.code
else:
    raise AssertionError("not refused")
print("all right")
"""


@pytest.mark.slow
def test_two_devices_compute_a_micro_batch_each_with_the_bits_of_one() -> None:
    done = run_forked(ON_TWO)
    assert done.stdout.endswith("all right\n"), done.stdout + done.stderr[-3000:]


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"mode": "ssp", "staleness": 2}, "ssp counts the steps of each worker"),
        ({"then": "ssp", "then_after": 1, "epochs": 2, "staleness": 2}, "ssp counts the steps"),
        ({"mode": "async", "local_steps": 4}, "local_steps=4 and several devices in a worker"),
        ({"mode": "sync", "replicas": 1}, "/CPU:0, /CPU:1, and a round has 1 micro-batch; "),
    ],
)
def test_what_does_not_go_with_several_devices_is_refused_with_the_fix(
    fields: dict[str, object], said: str
) -> None:
    job = make_job(dense_model, **fields)
    with pytest.raises(InvalidArgument, match=said) as refused:
        check_lanes(job, TWO)
    assert refused.value.code == "PS506"
    fix = "--replicas 2" if fields.get("replicas") == 1 else "start a worker for each device"
    assert fix in str(refused.value)


@pytest.mark.parametrize(
    "fields",
    [
        {"mode": "async"},
        {"mode": "sync", "replicas": 2},
        {"mode": "sync", "replicas": 1, "then": "async", "then_after": 1, "epochs": 2},
    ],
)
def test_other_jobs_are_not(fields: dict[str, object]) -> None:
    check_lanes(make_job(dense_model, **fields), TWO)
