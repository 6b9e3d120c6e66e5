"""Sums of gradients on the devices that computed them; the devices are parts of the CPU here."""

from __future__ import annotations

import pytest

from tests.fresh_interpreter import run_forked

ON_THREE = """
import ml_dtypes, numpy as np, tensorflow as tf
from worker.runtime.devices import Device, configure_devices
three = configure_devices("none", cpus=3, intra_op_threads=1)
from psrpc.core.placement import make_plan
from psrpc.core.plan import VariableSpec
from worker.lanes.collective_sum import CollectiveSum
from worker.step.arenas import DeviceResult, encoded
from worker.step.layout import Layout

PLAN = make_plan((VariableSpec("w", (600, 600), "float32", "trainable"),
                  VariableSpec("b", (5,), "float32", "trainable"),
                  VariableSpec("mean", (2,), "float64", "state"),
                  VariableSpec("count", (2,), "int64", "state")), 2, "cut")

class Gradients:
    def __init__(self, wire):
        self.layout = Layout(PLAN, wire, alone_nbytes=1 << 10)
        self.add = CollectiveSum(self.layout, three.names)

    def on(self, device, *values):
        # By arena, in plan order, each filled with one value.
        by_arena = dict(zip([arena.name for arena in PLAN.arenas], values, strict=True))
        spans = self.layout.spans
        with tf.device(device.name):
            plain = [tf.fill([s.stop - s.start], tf.constant(by_arena[s.arena.name], s.arena.dtype))
                     for s in spans]
            return DeviceResult(self.layout, device, encoded(spans, plain), [0.5, 1.0])

def elements(gradients, name):
    encoded = [shard[name] for shard in gradients]
    parts = np.concatenate([part for each in encoded for part in each.parts])
    return parts.view(DTYPES.get(encoded[0].encoding, parts.dtype))

DTYPES = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16}
trained, mean, count = (arena.name for arena in PLAN.arenas)
one, two, three_ = three.each
made = Gradients("plain")
results = [made.on(one, 1.5, 0.25, 7), made.on(two, 2.0, 0.5, 9), made.on(three_, -4.0, 2.0, 8)]
for used in (results, results[:2], results):
    sums = made.add(used)
    assert len(sums) == 2
    for name, expected in ((trained, -0.5 if len(used) == 3 else 3.5),
                           (mean, 2.75 if len(used) == 3 else 0.75),
                           (count, 8 if len(used) == 3 else 9)):
        found = elements(sums, name)
        arena = next(arena for arena in PLAN.arenas if arena.name == name)
        assert found.dtype == arena.dtype and len(found) == arena.length, name
        assert (found == expected).all(), (name, found)
# What was added is as it was, and comes to the host by itself when it is asked for.
assert (elements(results[1].gradients, trained) == 2.0).all()
assert results[1].finite and results[1].loss == 0.5

# An infinite sum is none.
large = float(np.finfo(np.float32).max)
assert made.add([made.on(one, large, 0.0, 0), made.on(two, large, 0.0, 0)]) == ()

for wire in ("bfloat16", "float16"):
    made = Gradients(wire)
    # Rounded once: 1 + 1/128 + 1/256 in bfloat16 is 1 + 1/64 if the sum were rounded twice.
    sums = made.add([made.on(one, 1.0, 0.0, 0), made.on(two, 0.0078125, 0.0, 0),
                     made.on(three_, 0.00390625, 0.0, 0)])
    exact = np.float32(1.01171875).astype(DTYPES[wire])
    assert (elements(sums, trained) == exact).all(), (wire, sums)
print("all right")
"""


@pytest.mark.slow
def test_the_devices_add_up_what_each_of_them_has_computed() -> None:
    done = run_forked(ON_THREE)
    assert done.stdout.endswith("all right\n"), done.stdout + done.stderr[-3000:]
    assert not done.stderr
