"""Measures ``model.fit`` on a cluster beside ``coordinator up`` and plain ``fit``.

    python -m benchmarks.fit [--runs 3] [--json FILE] [--readme]

One model, `examples/mnist_dnn.py` with Adam, one shard and two workers in sync mode. Rates are of
training alone, from the summary of the run. A hold is timed in the caller, from the last step of
one segment to the first of the next.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from benchmarks.cluster import ROOT
from benchmarks.report import add_arguments, publish
from benchmarks.table import markdown

What = Literal[
    "plain fit, micro-batches/s",
    "coordinator up, micro-batches/s",
    "fit without holds, micro-batches/s",
    "fit with a hold per epoch, micro-batches/s",
    "hold, ms",
    "hold with a changed model, ms",
    "first fit to its first hold, s",
    "second fit to its first hold, s",
    "1 GB of arrays handed over, s",
    "1 GB written, s",
]

EPOCHS, BATCH = 4, 100
WORKERS = 2

JOB = """
from benchmarks.fit import build, data
from pserver import Arrays, Job

x, y = data()
job = Job(model=build, train=Arrays(x, y), batch_size=50, epochs=4, mode="sync", replicas=2)
"""


@dataclass(frozen=True)
class FitSample:
    """One figure of one run."""

    run: int
    what: What
    value: float


def build() -> Any:
    """Returns the compiled model."""
    import keras

    keras.utils.set_random_seed(1)
    hidden = [keras.layers.Dense(160, "elu", kernel_initializer="he_normal") for _ in range(5)]
    model = keras.Sequential(
        [keras.Input((784,)), *hidden, keras.layers.Dense(10, activation="softmax")]
    )
    model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


def data() -> tuple[Any, Any]:
    """Returns MNIST's training images, ``[60000, 784]`` float32, and their labels."""
    import numpy as np

    with np.load(ROOT / "examples" / "data" / "mnist.npz", allow_pickle=False) as file:
        x, y = file["x_train"], file["y_train"]
    return x.reshape(len(x), -1).astype("float32") / 255, y


def main(argv: Sequence[str] | None = None) -> None:
    """Measures, and prints the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fit", description=__doc__)
    parser.add_argument("--runs", type=int, default=3, metavar="N", help="default: %(default)s")
    add_arguments(parser)
    options = parser.parse_args(argv)
    samples = (sample for run in range(1, options.runs + 1) for sample in measure(run))
    publish("fit", samples, table, options)


def measure(run: int) -> Iterator[FitSample]:
    """Measures everything once, in a temporary directory."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "job.py").write_text(JOB)
        command = [sys.executable, "-m", "coordinator.cli", "up", str(folder / "job.py")]
        command += ["--workers", str(WORKERS), "--run-dir", str(folder / "up")]
        subprocess.run(command, check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
        yield FitSample(run, "coordinator up, micro-batches/s", batches_per_s(folder / "up"))
        yield from measure_fits(run, folder)
        yield from measure_hand_over(run, folder)


def measure_fits(run: int, folder: Path) -> Iterator[FitSample]:
    """Measures fits of one cluster, and one without."""
    import keras

    import pserver

    x, y = data()
    model = build()
    began = time.monotonic()
    model.fit(x, y, batch_size=BATCH // WORKERS, epochs=1, verbose=0)
    rate = len(x) / (BATCH // WORKERS) / (time.monotonic() - began)
    yield FitSample(run, "plain fit, micro-batches/s", rate)

    class Clock(keras.callbacks.Callback):  # type: ignore[misc]  # Keras has no types
        """Notes when hooks come, and changes the model in some."""

        def __init__(self, changes: bool = False) -> None:
            super().__init__()
            self.began = time.monotonic()
            self.changes = changes

        def on_train_begin(self, logs: Any = None) -> None:  # noqa: ARG002
            self.start_s = time.monotonic() - self.began

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:  # noqa: ARG002
            if self.changes:
                self.model.set_weights([0.999 * each for each in self.model.get_weights()])

    with pserver.Cluster(workers=WORKERS, run_dir=folder / "runs") as cluster:

        def fitted(epochs: int, *callbacks: Any) -> float:
            model.fit(x, y, batch_size=BATCH, epochs=epochs, verbose=0, callbacks=list(callbacks))
            assert cluster.run_dir is not None
            return batches_per_s(cluster.run_dir)

        first = Clock()
        fitted(1, first)
        yield FitSample(run, "first fit to its first hold, s", first.start_s)
        second = Clock()
        fitted(1, second)
        yield FitSample(run, "second fit to its first hold, s", second.start_s)
        yield FitSample(run, "fit without holds, micro-batches/s", fitted(EPOCHS))
        rate = fitted(EPOCHS, keras.callbacks.Callback())
        yield FitSample(run, "fit with a hold per epoch, micro-batches/s", rate)
        whole = lasting(lambda: fitted(1))
        cluster.batch_hooks_every = 20
        holds = len(x) // BATCH // 20
        held = lasting(lambda: fitted(1, Clock()))
        yield FitSample(run, "hold, ms", 1e3 * (held - whole) / holds)
        changed = lasting(lambda: fitted(1, Clock(changes=True)))
        yield FitSample(run, "hold with a changed model, ms", 1e3 * (changed - whole) / holds)


def measure_hand_over(run: int, folder: Path) -> Iterator[FitSample]:
    """Measures how long arrays of 1 GB take to a directory, and a plain file of the same bytes."""
    import numpy as np

    from worker.stored.arguments import training_data
    from worker.stored.stored_data import store

    x = np.ones((250_000, 1000), np.float32)
    plain = lasting(lambda: np.save(folder / "plain.npy", x))
    yield FitSample(run, "1 GB written, s", plain)
    train, _ = training_data(x, np.zeros(len(x), np.int32))
    took_s = lasting(lambda: store(folder / "stored", train))
    yield FitSample(run, "1 GB of arrays handed over, s", took_s)


def lasting(call: Any) -> float:
    """Returns the seconds that a call takes."""
    began = time.monotonic()
    call()
    return time.monotonic() - began


def batches_per_s(run_dir: Path) -> float:
    """Returns the rate of a run, while it trained."""
    return float(json.loads((run_dir / "summary.json").read_text())["batches_per_s"])


def table(samples: Sequence[FitSample]) -> str:
    """Returns markdown: the median of each figure, and of ratios within a run."""
    rows = []
    for what in get_args(What):
        values = [sample.value for sample in samples if sample.what == what]
        if values:
            rows.append([what, f"{statistics.median(values):.3g}"])
    return markdown(["figure", "median"], rows)


if __name__ == "__main__":
    main()
