"""How long training pauses for a checkpoint: one shard of 100 MB with Adam.

    python -m benchmarks.checkpoint_pause [--megabytes 100] [--checkpoints 5] [--directory DIR]

One worker pushes and pulls as fast as it can, through the shard's real engine; another thread
orders snapshots, as the coordinator's command stream does, and the shard's own thread writes them.
A pause is the longest step from the order to the end of the writing, less the median of the steps
before. The first checkpoint of a process is shown beside the later ones.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, get_args

import numpy as np

from benchmarks.table import markdown
from pserver.core.assembly import shard_extents
from pserver.core.fence import Fence, ShardIdentity
from pserver.core.requests import InitializeRequest, PushRequest
from pserver.engine.engine import ShardEngine
from pserver.snapshots.writer import SnapshotFiles, SnapshotWriter
from pserver.transport.shard_memory import Shared
from pserver.updates.engine import EngineKind
from pserver.updates.factory import make_engine
from psrpc.core.batch import BatchId
from psrpc.core.commands import Attempt, SnapshotOrder
from psrpc.core.placement import make_plan
from psrpc.core.plan import Plan, VariableSpec, aligned_empty
from psrpc.core.shard_reports import SnapshotReport
from psrpc.ops.process import apply_malloc_settings

TARGET_MS = 200.0
"""The longest pause."""

FIRST_TARGET_MS = 100.0
"""How much longer than the median of the later ones the first pause may be."""

STEPS_BEFORE = 20
WARMUP = 5
WRITTEN_S = 120.0
"""How long a checkpoint may take before the measurement is given up."""

ADAM = {
    "module": "keras.optimizers",
    "class_name": "Adam",
    "registered_name": None,
    "config": {"learning_rate": 0.001},
}


@dataclass(frozen=True)
class Pause:
    """One checkpoint, in milliseconds."""

    ordinary: float
    longest_before: float
    longest: float
    written: float

    @property
    def difference(self) -> float:
        """The pause: what the longest step took more than an ordinary one."""
        return self.longest - self.ordinary


class Training:
    """A shard of one float32 arena, and a worker that pushes ones and copies what it gets."""

    def __init__(self, kind: EngineKind, nbytes: int, run_dir: Path) -> None:
        self._plan = make_plan(
            [VariableSpec("dense/kernel", (nbytes // 4,), "float32", "trainable")], 1, "cut"
        )
        identity = ShardIdentity(0, 1, 1, 1)
        self._written = threading.Event()
        self._error = ""
        files = SnapshotFiles(identity, self._plan, "run", run_dir)
        self._writer = SnapshotWriter(files, self._reported)
        updates = make_engine(kind, ADAM, self._plan, 0)
        self._engine = ShardEngine(identity, self._plan, updates, self._writer)
        self._run_dir = run_dir
        self._fence = Fence(1, 1, self._plan.hash, 1)
        self._extents = tuple(shard_extents(self._plan, 0))
        self._gradient = _ones(self._plan)
        self._parameters = _ones(self._plan)
        self._steps = 0

    def __enter__(self) -> Training:
        self._writer.start()
        initial = _ones(self._plan)
        self._engine.initialize(
            InitializeRequest(self._fence, self._extents), Shared([initial.view(np.uint8)]), 10.0
        )
        for _ in range(WARMUP):
            self.step()
        return self

    def __exit__(self, *exception: object) -> None:
        self._writer.stop(WRITTEN_S)
        self._engine.close()

    def step(self) -> float:
        """One push and pull; milliseconds."""
        begun = time.perf_counter()
        batch = BatchId(0, self._steps, 1)
        request = PushRequest(
            self._fence, "worker-0", Attempt(batch, 1), self._steps, 1, False, self._extents
        )
        _, values = self._engine.push_pull(
            request, Shared([self._gradient.view(np.uint8)]), 10.0, "plain"
        )
        for array in values.arrays.values():
            np.copyto(self._parameters, array)
        del values, array
        self._steps += 1
        return (time.perf_counter() - begun) * 1e3

    def checkpoint(self) -> Pause:
        """Orders a snapshot while steps are made, and goes on until it is written.

        Raises:
            RuntimeError: it could not be written.
        """
        before = [self.step() for _ in range(STEPS_BEFORE)]
        name = f"checkpoints/.tmp-step-{self._steps:08d}"
        (self._run_dir / name).mkdir(parents=True)
        order = SnapshotOrder(name.rpartition("/")[2], self._steps, write=True, directory=name)
        self._written.clear()
        ordering = threading.Thread(target=self._engine.commands.take_snapshot, args=(order,))
        during = []
        begun = time.perf_counter()
        ordering.start()
        while not self._written.is_set():
            during.append(self.step())
            if time.perf_counter() - begun > WRITTEN_S:
                raise RuntimeError(f"{name} was not written in {WRITTEN_S:.0f} s")
        written = (time.perf_counter() - begun) * 1e3
        ordering.join()
        # The first step after a frozen state may have to find new memory.
        during += [self.step() for _ in range(WARMUP)]
        if self._error:
            raise RuntimeError(self._error)
        return Pause(statistics.median(before), max(before), max(during), written)

    def _reported(self, report: SnapshotReport) -> None:
        self._error = report.error
        self._written.set()


def _ones(plan: Plan) -> np.ndarray[Any, np.dtype[np.float32]]:
    array = aligned_empty(plan.arenas[0].length, "float32")
    array.fill(1)
    return array


def measure(kind: EngineKind, nbytes: int, checkpoints: int, directory: str | None) -> list[Pause]:
    """Takes several checkpoints of one process, in order."""
    with (
        tempfile.TemporaryDirectory(dir=directory) as run_dir,
        Training(kind, nbytes, Path(run_dir)) as training,
    ):
        return [training.checkpoint() for _ in range(checkpoints)]


def row(engine: str, pauses: Sequence[Pause]) -> list[str]:
    """Returns the line of the table of one process."""
    first, *later = pauses
    ordinary = statistics.median(pause.ordinary for pause in pauses)
    usual = statistics.median(pause.difference for pause in later)
    worst = max(pause.difference for pause in later)
    return [
        engine,
        f"{ordinary:.0f}",
        f"{first.difference:.0f}",
        f"{usual:.0f}",
        f"{worst:.0f}{_verdict(max(worst, first.difference), TARGET_MS)}",
        f"{first.difference - usual:.0f}{_verdict(first.difference - usual, FIRST_TARGET_MS)}",
    ]


def _verdict(ms: float, target_ms: float) -> str:
    return f" (≤ {target_ms:.0f}, {'met' if ms <= target_ms else '**missed**'})"


HEADER = (
    "engine",
    "ordinary step, ms",
    "first pause",
    "later pauses, median",
    "their longest",
    "first less later",
)


def main() -> None:
    """Prints a table of both engines, each measured in a process of its own."""
    parser = argparse.ArgumentParser(description="The pause of training for a checkpoint.")
    parser.add_argument("--megabytes", type=int, default=100, metavar="N", help="of parameters")
    parser.add_argument("--checkpoints", type=int, default=5, metavar="N")
    parser.add_argument("--directory", help="where checkpoints are written; default: /tmp")
    parser.add_argument("--engine", choices=get_args(EngineKind), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.engine is not None:
        apply_malloc_settings()
        pauses = measure(args.engine, args.megabytes * 10**6, args.checkpoints, args.directory)
        print(json.dumps(list(map(asdict, pauses))))  # noqa: T201
        return
    rows = []
    for engine in get_args(EngineKind):
        command = [sys.executable, "-m", "benchmarks.checkpoint_pause", "--engine", engine]
        done = subprocess.run(
            [*command, *sys.argv[1:]], stdout=subprocess.PIPE, text=True, check=True
        )
        rows.append(row(engine, [Pause(**pause) for pause in json.loads(done.stdout)]))
    print(markdown(HEADER, rows))  # noqa: T201


if __name__ == "__main__":
    main()
