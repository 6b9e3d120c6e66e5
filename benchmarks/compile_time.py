"""How long a model of many small variables takes until its first gradient, ours beside plain
TensorFlow.

    python -m benchmarks.compile_time --variables 5000

Each side runs in a process of its own, in turn: it builds the model, compiles the gradient for one
batch shape and takes a step, then some more. Ours is the step of a worker, from flat parameters to
the buffers that go to the shards; plain TensorFlow's is a ``tf.function`` with a ``GradientTape``
on the model's own variables, without an optimizer's update. Compiling is counted in CPU seconds of
the process, so that it matters little what else the machine does.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from benchmarks.table import markdown, number
from psrpc.core.placement import make_plan

SIDES = ("plain", "ours")
TARGET = 2.0
LAYERS_IN_A_ROW = 25
"""How deep the model is; a layer has two variables, so it is as wide as it needs to be."""
STEPS = 20


def main(argv: Sequence[str] | None = None) -> None:
    options = parser().parse_args(argv)
    if options.side:
        found = SIDE[options.side](options.variables)
        sys.stdout.write(json.dumps(found) + "\n")
        return
    figures = {side: in_a_process(side, options.variables) for side in SIDES}
    sys.stdout.write(table(options.variables, figures))


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(
        prog="python -m benchmarks.compile_time",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    result.add_argument("--variables", type=int, default=5000, help="of the model, about")
    result.add_argument("--side", choices=SIDES, help="measures one side in this process")
    return result


def in_a_process(side: str, variables: int) -> dict[str, float]:
    command = [sys.executable, "-m", "benchmarks.compile_time", "--side", side]
    done = subprocess.run(
        [*command, "--variables", str(variables)], stdout=subprocess.PIPE, check=True, text=True
    )
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def table(variables: int, figures: dict[str, dict[str, float]]) -> str:
    """Markdown, and whether the target is met."""
    rows = [
        [side, *(number(figures[side][name]) for name in ("build_s", "compile_s", "step_ms"))]
        for side in SIDES
    ]
    header = ["side", "building, CPU s", "compiling, CPU s", "step, ms"]
    ratio = figures["ours"]["compile_s"] / figures["plain"]["compile_s"]
    verdict = "met" if ratio <= TARGET else "**missed**"
    return (
        f"{variables} variables.\n\n{markdown(header, rows)}\n\n"
        f"Compiling takes {ratio:.2f} times as long as in plain TensorFlow (≤ {TARGET:g}, "
        f"{verdict}).\n"
    )


def measure_ours(variables: int) -> dict[str, float]:
    from worker.runtime.quiet import import_tensorflow

    import_tensorflow()
    import tensorflow as tf

    from pserver import Arrays, Job
    from worker.model.variables import model_variables
    from worker.runtime.devices import ParameterBuffers, configure_devices
    from worker.step.flat import FlatStep, StepInput
    from worker.step.replica import Replica

    x, y = records()
    device = configure_devices("none")
    start = time.process_time()
    replica = Replica(
        Job(
            model=lambda: make_model(variables),
            loss="mse",
            optimizer="sgd",
            train=Arrays(x, y),
            batch_size=len(x),
        )
    )
    build_s = time.process_time() - start
    plan = make_plan([spec for spec, _ in model_variables(replica.model)], 1, "cut")
    step = FlatStep(replica.make_step(plan, counts=True), plan, device)
    parameters = ParameterBuffers(replica.values(plan)).tensors
    seeds = tf.zeros([replica.num_seeds(), 2], tf.int64)
    given = StepInput(seeds, (tf.constant(x), tf.constant(y)))
    return {"build_s": build_s, **timed(lambda: step(parameters, given))}


def measure_plain(variables: int) -> dict[str, float]:
    from worker.runtime.quiet import import_tensorflow

    import_tensorflow()
    import keras
    import tensorflow as tf

    x, y = records()
    start = time.process_time()
    model = make_model(variables)
    build_s = time.process_time() - start
    loss_of = keras.losses.MeanSquaredError()

    def differentiate(x: tf.Tensor, y: tf.Tensor) -> Any:
        with tf.GradientTape() as tape:
            loss = loss_of(y, model(x, training=True))
        return loss, tape.gradient(loss, model.trainable_variables)

    step = tf.function(differentiate)
    batch = tf.constant(x), tf.constant(y)
    return {"build_s": build_s, **timed(lambda: step(*batch))}


SIDE: dict[str, Callable[[int], dict[str, float]]] = {"ours": measure_ours, "plain": measure_plain}


def timed(step: Callable[[], object]) -> dict[str, float]:
    """CPU seconds until the first ``step`` is done, and the median of more in milliseconds."""
    start = time.process_time()
    step()
    compile_s = time.process_time() - start
    steps = []
    for _ in range(STEPS):
        begun = time.perf_counter()
        step()
        steps.append(1e3 * (time.perf_counter() - begun))
    return {"compile_s": compile_s, "step_ms": statistics.median(steps)}


def records() -> tuple[Any, Any]:
    """One batch: float32 ``[10, 4]`` and ``[10, 1]``."""
    return np.ones((10, 4), np.float32), np.ones((10, 1), np.float32)


def make_model(variables: int) -> Any:
    """A Keras model of about so many variables of 16 and 4 elements."""
    import keras

    keras.utils.set_random_seed(0)
    inputs = keras.Input((4,))
    hidden = inputs
    width = max(2, variables // 2 // LAYERS_IN_A_ROW)
    for _ in range(LAYERS_IN_A_ROW):
        hidden = keras.layers.Add()([keras.layers.Dense(4)(hidden) for _ in range(width)])
    return keras.Model(inputs, keras.layers.Dense(1)(hidden))


if __name__ == "__main__":
    main()
