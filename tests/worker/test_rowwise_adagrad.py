"""Row-wise Adagrad, which workers describe and shards compute."""

from __future__ import annotations

import numpy as np

from pserver.tables import rules
from worker.rowwise_adagrad import RowwiseAdagrad


def test_both_sides_have_the_same_defaults() -> None:
    config = RowwiseAdagrad().serialized()["config"]
    assert config == {"learning_rate": 0.001, "initial_accumulator_value": 0.0, "epsilon": 1e-8}
    said, implied = rules.RowwiseAdagrad(config), rules.RowwiseAdagrad({})
    assert said.slots == implied.slots == {"row_accumulators": 0.0}
    rate = np.float32(config["learning_rate"])
    factors = (rate, np.float32(1e-8))
    assert said.factors(rate, 0, "float32") == implied.factors(rate, 0, "float32") == factors
