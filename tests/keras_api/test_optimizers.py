"""Every class of ``keras.optimizers`` updates as in plain Keras, or is refused and told why."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest

from psrpc.core.batch import BatchId
from psrpc.core.errors import InvalidJob
from tests.keras_api.report import OPTIMIZERS, Outcome
from tests.worker.described_jobs import loaded
from tests.worker.flat_jobs import dense_model, make_job
from tests.worker.keras_jobs import train, train_with_keras
from worker.describe.describe import describe

pytestmark = pytest.mark.slow

optimizers = keras.optimizers
BATCHES = [BatchId(0, first, 8) for first in (0, 8, 16)]


class Own(keras.optimizers.SGD):  # type: ignore[misc]  # Keras has no types
    """A user's class derived from an optimizer."""


MADE: dict[str, Callable[[], Any]] = {
    "LossScaleOptimizer": lambda: optimizers.LossScaleOptimizer(optimizers.SGD()),
    "MultiOptimizer": lambda: optimizers.MultiOptimizer(optimizers.OptimizerMap(optimizers.SGD())),
    "Optimizer": Own,
}
"""Those that need arguments, and one of the user's own."""

REFUSED = {
    "MultiOptimizer": "use one optimizer for all variables",
    "Optimizer": "Own",
}
"""What is refused, and why."""

NAMES = sorted(
    name
    for name, value in vars(optimizers).items()
    if isinstance(value, type) and issubclass(value, optimizers.Optimizer)
)


@pytest.mark.parametrize("name", NAMES)
def test_an_optimizer_updates_as_in_keras_or_is_refused(name: str) -> None:
    make = MADE.get(name, getattr(optimizers, name))
    job = make_job(dense_model, optimizer=make)
    if name in REFUSED:
        with pytest.raises(InvalidJob) as raised:
            describe(loaded(job))
        assert REFUSED[name] in str(raised.value)
        own = ", your own" if make is Own else ""
        OPTIMIZERS.append(Outcome(name + own, refused=str(raised.value)))
        return
    described = describe(loaded(job))
    alone = described["needs_single_shard"]
    rounds = [[batch] for batch in BATCHES]
    ours = train(job, rounds, shards=1 if alone else 2, described=described)
    expected = train_with_keras(job, BATCHES, make())
    for path, value in expected.items():
        np.testing.assert_allclose(ours[path], value, rtol=1e-4, atol=1e-6, err_msg=path)
    needs = "one shard" if alone else {"whole": "whole variables"}.get(described["placement"], "")
    OPTIMIZERS.append(Outcome(name, state=tuple(described["slots"]), note=needs))
