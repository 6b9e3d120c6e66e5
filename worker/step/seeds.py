"""Random state that belongs to a batch, not to a worker."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt

from psrpc.core.batch import BatchId


def seed_state(job_seed: int, batch: BatchId, generator: int) -> npt.NDArray[np.uint32]:
    """``[2] uint32``, the state to give the ``generator``-th seed generator of a model (in model
    order) before it computes ``batch``, so that whoever repeats a batch draws the same masks.

    Both words fit the int64 in which Keras keeps the state on TensorFlow.
    """
    text = f"{job_seed} {batch.epoch} {batch.first} {batch.count} {generator}"
    return np.frombuffer(hashlib.sha256(text.encode()).digest()[:8], "<u4").astype(np.uint32)


@contextmanager
def python_draws_alike() -> Iterator[None]:
    """Within a block Python's ``random`` draws the same in each process, each time. Layers such as
    ``AugMix`` ask it what to do while TensorFlow traces them: otherwise a batch would come to
    something else on another worker."""
    before = random.getstate()
    random.seed(0)
    try:
        yield
    finally:
        random.setstate(before)
