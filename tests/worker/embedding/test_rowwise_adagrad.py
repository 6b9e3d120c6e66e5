"""Row-wise Adagrad, which workers describe and shards compute."""

from __future__ import annotations

import numpy as np
import pytest

from pserver.tables import rules
from pserver.updates.allowlist import check_schedule
from pserver.updates.schedules import make_schedule
from psrpc.core.errors import InvalidJob
from psrpc.core.tables import TableSpec
from worker.embedding.table_options import RowwiseAdagrad


def test_both_sides_have_the_same_defaults() -> None:
    config = RowwiseAdagrad().serialized()["config"]
    assert config == {"learning_rate": 0.001, "initial_accumulator_value": 0.0, "epsilon": 1e-8}
    said, implied = rules.RowwiseAdagrad(config), rules.RowwiseAdagrad({})
    assert said.slots == implied.slots == {"row_accumulators": 0.0}
    rate = np.float32(config["learning_rate"])
    factors = (rate, np.float32(1e-8))
    assert said.factors(rate, 0, "float32") == implied.factors(rate, 0, "float32") == factors


@pytest.mark.slow
def test_a_schedule_of_keras_is_one_that_shards_know() -> None:
    import keras

    from worker.embedding.table_options import table_optimizer

    decay = keras.optimizers.schedules.ExponentialDecay(0.5, decay_steps=2, decay_rate=0.25)
    optimizer = table_optimizer("rows", RowwiseAdagrad(learning_rate=decay))
    assert optimizer is not None
    rate = optimizer["config"]["learning_rate"]
    check_schedule(rate)
    assert [make_schedule(rate)(step) for step in (0, 2, 4)] == [0.5, 0.125, 0.03125]
    spec = TableSpec("t", 2, None, {"class_name": "constant", "config": {"value": 0.0}}, optimizer)
    with pytest.raises(InvalidJob, match=r"learning_rate 'fast'; expected a number or a schedule"):
        RowwiseAdagrad(learning_rate="fast").serialized()
    assert list(rules.make_row_rule(spec).slots) == ["row_accumulators"]
