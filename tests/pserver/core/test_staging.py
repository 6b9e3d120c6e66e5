"""The mean of a round: fixed order, fixed arithmetic."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pserver.core.staging import Missing, Ready, Staged, Staging, weighted_mean
from psrpc.core.batch import BatchId
from psrpc.core.commands import Attempt
from psrpc.core.errors import InvalidArgument


@settings(derandomize=True)
@given(st.permutations(range(5)), st.permutations(range(5)))
def test_the_order_of_arrival_and_of_naming_does_not_matter(
    arrival: list[int], naming: list[int]
) -> None:
    counts = [7, 3, 10, 1, 9]
    batches = [BatchId(1, 10 * i, counts[i]) for i in range(5)]
    rng = np.random.default_rng(0)
    gradients = [rng.normal(size=11).astype("float32") for _ in range(5)]
    staging = Staging(5)
    for i in arrival:
        staging.stage(Attempt(batches[i], i), Staged(counts[i], {"a": gradients[i].copy()}))
    found = staging.decide(tuple(Attempt(batches[i], i) for i in naming))
    assert isinstance(found, Ready)
    mean = weighted_mean(found.parts)["a"]
    expected = np.float32(7 / 30) * gradients[0]
    for i in range(1, 5):
        expected += np.float32(counts[i] / 30) * gradients[i]
    assert mean.dtype == np.float32
    assert mean.tobytes() == expected.tobytes()


def test_double_precision_stays_double() -> None:
    staging = Staging(2)
    for i in range(2):
        staging.stage(Attempt(BatchId(0, i, 1), i), Staged(1, {"a": np.full(3, 1 / 3, "float64")}))
    found = staging.decide(tuple(Attempt(BatchId(0, i, 1), i) for i in range(2)))
    assert isinstance(found, Ready)
    mean = weighted_mean(found.parts)["a"]
    assert mean.dtype == np.float64
    np.testing.assert_array_equal(mean, np.full(3, 1 / 3))


def test_of_integers_the_highest_batch_that_is_not_skipped_counts() -> None:
    staging = Staging(4)
    # The last one is not finite.
    for i, number in ((2, 2**60 + 1), (0, 7), (1, 5)):
        gradients = {"a": np.full(2, i, "float32"), "n": np.full(3, number, "int64")}
        staging.stage(Attempt(BatchId(0, i, 1), i), Staged(1, gradients))
    staging.stage(Attempt(BatchId(0, 3, 1), 3), Staged(1, None))
    found = staging.decide(tuple(Attempt(BatchId(0, i, 1), i) for i in range(4)))
    assert isinstance(found, Ready)
    mean = weighted_mean(found.parts)
    assert mean["n"].tolist() == [2**60 + 1] * 3
    np.testing.assert_allclose(mean["a"], 1)


def test_deciding_names_what_is_missing_and_changes_nothing() -> None:
    staging = Staging(2)
    here, absent = Attempt(BatchId(0, 0, 1), 1), Attempt(BatchId(0, 1, 1), 2)
    staging.stage(here, Staged(1, None))
    assert staging.decide((here, absent)) == Missing((absent,))
    assert len(staging) == 1
    assert staging.decide((here,)) == Ready((), frozenset([here.batch]))
    assert staging.clear() == [Staged(1, None)]
    assert len(staging) == 0


def test_a_decision_counts_no_micro_batch_twice() -> None:
    staging = Staging(2)
    batch, other = BatchId(0, 0, 1), BatchId(0, 1, 1)
    for attempt in (Attempt(batch, 1), Attempt(batch, 2), Attempt(other, 1)):
        staging.stage(attempt, Staged(1, {"a": np.ones(3, np.float32)}))
    for named in ((Attempt(batch, 1), Attempt(batch, 2)), (Attempt(batch, 1),) * 2):
        with pytest.raises(InvalidArgument, match="expected one of each micro-batch"):
            staging.decide(named)
