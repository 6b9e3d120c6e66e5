"""Records that make workers wait where a test wants to look at them, or to kill one."""

from __future__ import annotations

import os
from pathlib import Path

from psrpc.core.batch import BatchId
from worker import Arrays
from worker.data.source import Batch

GATES = [gate for gate in os.environ.get("GATE", "").split(os.pathsep) if gate]
EPOCHS = [int(epoch) for epoch in os.environ.get("GATE_EPOCH", "0").split(os.pathsep)]
HOLD = os.environ.get("HOLD")


class GatedArrays(Arrays):
    """All wait before the first batch of an epoch, or of several, until the gate is opened
    (``tests.e2e.cluster.Gate``). One alone waits at the FIFO ``HOLD``: who comes first to the
    second epoch, and writes its process id beside it."""

    def read(self, seed: int, batch: BatchId) -> Batch:
        for gate, epoch in zip(GATES, EPOCHS, strict=False):
            if batch.epoch >= epoch:
                wait_at(gate)
        if HOLD and batch.epoch == 1 and is_first(Path(HOLD + ".pid")):
            wait_at(HOLD)
        return super().read(seed, batch)


def wait_at(fifo: str) -> None:
    # It opens for reading once a process has it open for writing.
    os.close(os.open(fifo, os.O_RDONLY))


def is_first(path: Path) -> bool:
    try:
        with path.open("x") as file:
            file.write(str(os.getpid()))
    except FileExistsError:
        return False
    return True
