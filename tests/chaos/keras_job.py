"""A small classifier for schedules with TensorFlow: paced, its last batches wait for the gate."""

import os
import time
from pathlib import Path

import keras
import numpy as np

from psrpc.core.batch import BatchId
from tests.chaos.schedule import GATE
from tests.chaos.witness import BATCH_SIZE, Options
from tests.e2e.jobs.dense import model
from worker import Arrays, Job
from worker.data.source import Batch

OPTIONS = Options.from_json(os.environ["CHAOS_OPTIONS"])
GATE_FILE = Path(os.environ["CHAOS_GATE"])
GATE_S = 0.02

rng = np.random.default_rng(7)
x = rng.normal(size=(OPTIONS.batches * BATCH_SIZE, 12)).astype("float32")
y = (x @ rng.normal(size=(12, 4))).argmax(1).astype("int32")


class Paced(Arrays):
    """Takes its time."""

    def read(self, seed: int, batch: BatchId) -> Batch:
        time.sleep(OPTIONS.pace_ms / 1000)
        while OPTIONS.number(batch) >= GATE * OPTIONS.total_batches and not GATE_FILE.exists():
            time.sleep(GATE_S)
        return super().read(seed, batch)


job = Job(
    model=model,
    loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    optimizer=keras.optimizers.Adam(0.01),
    train=Paced(x, y),
    batch_size=BATCH_SIZE,
    epochs=OPTIONS.epochs,
    mode=OPTIONS.policy.mode,
    replicas=OPTIONS.policy.replicas,
    engine="keras",
    intra_op_threads=1,
    checkpoint_every=OPTIONS.checkpoint_every,
)
