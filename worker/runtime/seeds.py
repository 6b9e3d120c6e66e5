"""Random state that depends on the batch, not on the worker."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt

from psrpc.core.batch import BatchId


def seed_state(job_seed: int, batch: BatchId, generator: int) -> npt.NDArray[np.uint32]:
    """Returns ``[2] uint32``, the state of the model's ``generator``-th seed generator (in model
    order) for ``batch``, so that every worker draws the same masks for it.

    Both words fit the int64 in which Keras keeps the state on TensorFlow.
    """
    text = f"{job_seed} {batch.epoch} {batch.first} {batch.count} {generator}"
    return np.frombuffer(hashlib.sha256(text.encode()).digest()[:8], "<u4").astype(np.uint32)


@contextmanager
def python_draws_alike() -> Iterator[None]:
    """Makes Python's ``random`` draw the same in each process within the block. Layers such as
    ``AugMix`` use it while TensorFlow traces them, so workers would otherwise compute differently.
    """
    before = random.getstate()
    random.seed(0)
    try:
        yield
    finally:
        random.setstate(before)
