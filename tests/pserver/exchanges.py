"""A plan and gradients for exchanges with a shard."""

from __future__ import annotations

import numpy as np

from psrpc.core.batch import BatchId
from psrpc.core.plan import Plan
from tests.pserver.shards import (
    NDArray,
    plan_of,
    whole,
)

PLAN = plan_of(size=3000)
NAME, STATE = "float32.trainable", "float32.state"
BATCH = BatchId(0, 0, 10)


def normal(plan: Plan = PLAN) -> dict[str, NDArray]:
    rng = np.random.default_rng(3)
    arrays = whole(plan)
    for array in arrays.values():
        array[:] = rng.normal(size=len(array))
    return arrays
