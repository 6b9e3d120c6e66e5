"""The workloads that this project and its peers run, and the targets of the first over the second.

The sizes are those of the peers' scripts, so that figures compare.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

JOBS = Path(__file__).resolve().parent / "jobs"

Transport = Literal["shm", "tcp", "tcp_bf16"]

WARMUP = 10
"""Steps of each worker that no figure counts."""


@dataclass(frozen=True)
class Dense:
    """``count`` float32 variables of one shape, updated by SGD at 1e-3 in ``steps`` steps.

    A step computes ``g = 1e-6 * v + 1e-9`` over all of them, has it applied, and ends when the
    worker can compute with the fresh values.
    """

    count: int
    shape: tuple[int, ...]
    steps: int

    @property
    def nbytes(self) -> int:
        """Of all variables."""
        return 4 * self.count * math.prod(self.shape)


@dataclass(frozen=True)
class Mnist:
    """A fully connected classifier of MNIST, trained asynchronously.

    Attributes:
        layers: units, from the input to the output.
        epochs: per run; enough for ten seconds and more of steps with all workers there.
    """

    layers: tuple[int, ...]
    activation: str
    batch_size: int
    learning_rate: float
    momentum: float
    epochs: int


@dataclass(frozen=True)
class RowsDrawn:
    """A table of 1,000,000 x 64 zeros, updated by SGD at 1e-3 in ``steps`` steps.

    A step draws ``count`` ids, fetches their rows, and has ``1e-3 * row + 1e-6`` of each applied.

    Attributes:
        zipf: ids are drawn by Zipf's law, the r-th with a probability of about 1 / r, so that few
            of a step are different; they are drawn uniformly otherwise, as the peers do.
    """

    count: int
    steps: int
    zipf: bool = False
    vocabulary: int = 1_000_000
    width: int = 64


DENSE = {
    "dense_1x64MB": Dense(1, (16384, 1024), steps=100),
    "dense_16x4MB": Dense(16, (1024, 1024), steps=100),
    "dense_256x16KB": Dense(256, (64, 64), steps=600),
}

ROWS = {
    "emb_4096": RowsDrawn(4096, steps=2500),
    "emb_65536": RowsDrawn(65_536, steps=300),
    "emb_4096_zipf": RowsDrawn(4096, steps=2500, zipf=True),
    "emb_65536_zipf": RowsDrawn(65_536, steps=300, zipf=True),
}
"""Enough steps that most rows exist in most of them: the peers' tables have all from the start."""

MNIST = {
    "mnist_sigmoid": Mnist((784, 100, 10), "sigmoid", 100, 0.001, 0.0, epochs=20),
    # The peers' rate is 0.01, where asynchronous momentum of 0.95 diverges; that ends a job here.
    # The rate has no influence on speed.
    "mnist_dnn": Mnist((784, *(160,) * 5, 10), "elu", 50, 0.001, 0.95, epochs=6),
}


@dataclass(frozen=True)
class Case:
    """One row of the table: a workload with so many workers."""

    workload: str
    workers: int = 1

    @property
    def name(self) -> str:
        """As the peers' scripts call it."""
        return f"{self.workload}_{self.workers}w" if self.workload in MNIST else self.workload

    @property
    def job(self) -> Path:
        """The job file that runs it here."""
        return JOBS / f"{self.workload}.py"

    @property
    def in_ms(self) -> bool:
        """Whether it is counted in milliseconds a step, and not in steps per second."""
        return self.workload not in MNIST

    @property
    def peers(self) -> tuple[str, ...]:
        """Those that run it."""
        if self.workload in ROWS and ROWS[self.workload].zipf:
            return ()
        return ("tf", "torch", "ray") if self.in_ms else ("tf",)

    @property
    def transports(self) -> tuple[Transport, ...]:
        """How it is run here."""
        return ("shm", "tcp", "tcp_bf16") if self.workload in DENSE else ("shm", "tcp")


CASES = (
    *(Case(workload) for workload in (*DENSE, *ROWS)),
    *(Case(workload, workers) for workload in MNIST for workers in (1, 3)),
)

TARGETS: dict[str, dict[Transport, float]] = {
    "dense_1x64MB": {"shm": 2.0, "tcp": 1.3, "tcp_bf16": 1.8},
    "dense_16x4MB": {"shm": 1.5, "tcp": 1.1, "tcp_bf16": 1.5},
    "dense_256x16KB": {"shm": 2.0, "tcp": 4.0},
    "emb_4096": {"shm": 2.0, "tcp": 1.5},
    "emb_65536": {"shm": 2.0, "tcp": 1.3},
    "mnist_sigmoid_1w": {"shm": 2.5, "tcp": 2.0},
    "mnist_sigmoid_3w": {"shm": 3.0, "tcp": 2.5},
    "mnist_dnn_1w": {"shm": 2.5, "tcp": 2.0},
    "mnist_dnn_3w": {"shm": 3.0, "tcp": 2.5},
}
"""How many times faster than its peers a case is meant to be: with shared memory than the best of
them, over TCP than TensorFlow, the one that uses TCP."""
