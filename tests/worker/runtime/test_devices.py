from __future__ import annotations

from pathlib import Path

import pytest
import tensorflow as tf

from psrpc.core.errors import InvalidArgument
from tests.fresh_interpreter import run_forked
from worker.runtime.devices import choose_gpus, configure_devices

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(
    ("gpu", "count", "expected"),
    [
        ("auto", 0, ()),
        ("auto", 2, (0,)),
        ("none", 2, ()),
        ("1", 2, (1,)),
        ("all", 3, (0, 1, 2)),
        ("2,0", 3, (2, 0)),
    ],
)
def test_which_gpus_are_meant(gpu: str, count: int, expected: tuple[int, ...]) -> None:
    assert choose_gpus(gpu, count) == expected


@pytest.mark.parametrize(
    ("gpu", "count", "message"),
    [
        ("0", 0, "--gpu 0: TensorFlow finds no GPU here; use --gpu none"),
        ("1", 1, "--gpu 1: TensorFlow finds GPU 0; "),
        ("3", 3, "--gpu 3: TensorFlow finds GPUs 0 to 2; "),
        ("all", 0, "--gpu all: TensorFlow finds no GPU here; "),
        ("0,2", 2, "--gpu 0,2: TensorFlow finds GPUs 0 to 1; "),
    ],
)
def test_a_gpu_that_is_not_there(gpu: str, count: int, message: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        choose_gpus(gpu, count)
    assert message in str(caught.value)


def test_a_fraction_of_memory_is_of_one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tf.config, "list_physical_devices", lambda _kind: ["first", "second"])
    monkeypatch.setattr(tf.config, "set_visible_devices", lambda _chosen, _kind: None)
    with pytest.raises(InvalidArgument, match="is of one GPU, and --gpu 0,1 has 2; leave it out"):
        configure_devices("0,1", memory_fraction=0.5)


ON_A_SECOND_DEVICE = """
import numpy as np, tensorflow as tf
from psrpc.core.batch import BatchId
from worker.runtime.devices import Device, configure_devices
cpu = tf.config.list_physical_devices("CPU")[0]
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
host = configure_devices("none", intra_op_threads=1)
assert tf.config.threading.get_intra_op_parallelism_threads() == 1
assert host.is_host and host.label == "cpu"
from tests.worker.flat_jobs import FIRST, JobStepper, make_job, noisy_model, whole
other = Device("/CPU:1", "second cpu")
for wire in ("bfloat16", "plain"):
    here, there = (JobStepper(make_job(noisy_model), device, wire=wire) for device in (host, other))
    assert there.read(FIRST).batch[0].device.endswith("CPU:1"), there.read(FIRST).batch[0].device
    expected, found = here.run(FIRST), there.run(FIRST)
    assert expected.loss == found.loss
    updates = whole(there.plan, found)
    for name, update in whole(here.plan, expected).items():
        assert update.tobytes() == updates[name].tobytes()
    for array in there.parameters.arrays.values():
        array.fill(np.nan)  # what was given for the step is the step's no more
    for name, update in whole(there.plan, found).items():
        assert update.tobytes() == updates[name].tobytes()
trace = next(iter(there.step._traces.values()))
graph = trace._concrete.graph.as_graph_def()
work = [node for node in graph.node if node.op in ("MatMul", "ConcatV2")]
assert work
assert {node.device for node in work} == {"/device:CPU:1"}

import keras
from tests.worker import table_jobs
from worker import Embedding
def model():
    rows = Embedding(4, 7, name="rows")
    return keras.Sequential([keras.Input((5,), dtype="int64"), rows, keras.layers.Flatten()])
ids = np.random.default_rng(0).integers(0, 7, (table_jobs.RECORDS, 5))
job = table_jobs.make_job(model, ids, loss=lambda y, rows: tf.reduce_sum(rows**2) * y[0])
here, there = (table_jobs.TableJobStepper(job, device=device) for device in (host, other))
sums = [stepper.gradients(stepper.run())["rows"] for stepper in (here, there)]
assert np.isfinite(sums[0]).any()
# The host sums up by itself, another device within the step.
np.testing.assert_allclose(sums[0], sums[1], rtol=1e-6)
for stepper, ops in ((here, 0), (there, 1)):
    (trace,) = stepper.step._traces.values()
    nodes = trace._concrete.graph.as_graph_def().node
    assert [node.device for node in nodes if node.op == "SegmentSum"] == ["/device:CPU:1"] * ops
print("same on both")
"""


def test_a_step_on_another_device_gives_the_same() -> None:
    done = run_forked(ON_A_SECOND_DEVICE)
    assert "same on both" in done.stdout, done.stderr[-3000:]
