from __future__ import annotations

import numpy as np
import pytest

from benchmarks.simulated_shard import Recipe, Shard
from psrpc.core.batch import BatchId
from psrpc.core.commands import Attempt
from psrpc.core.encoding import Gradient, plain
from psrpc.core.placement import make_plan
from psrpc.core.plan import VariableSpec
from psrpc.core.policy import Policy

PLAN = make_plan([VariableSpec("w", (4,), "float32", "trainable")], 1, "cut")
ARENA = PLAN.arenas[0].name
SGD = {"class_name": "SGD", "config": {"name": "SGD", "learning_rate": 1.0, "momentum": 0.0}}


def shard(policy: Policy, recipe: Recipe | None = None) -> Shard:
    return Shard(PLAN, SGD, {ARENA: np.zeros(4, np.float32)}, policy, recipe or Recipe())


def ones() -> Gradient:
    return {ARENA: plain(np.ones(4, np.float32))}


def attempt(index: int) -> Attempt:
    return Attempt(BatchId(0, index, 1), 1)


def test_workers_that_take_turns_are_stale_by_the_others() -> None:
    here = shard(Policy())
    held = {name: here.pull(name).version for name in ("a", "b", "c")}
    found = []
    for index in range(9):
        name = "abc"[index % 3]
        outcome, staleness, values = here.push_pull(name, attempt(index), held[name], ones())
        assert outcome == "applied"
        found.append(staleness)
        held[name] = values.version
    assert found == [0, 1, 2, 2, 2, 2, 2, 2, 2]
    np.testing.assert_array_equal(here.pull("a").arrays[ARENA], np.full(4, -9.0))


def test_the_shard_obeys_its_policy() -> None:
    here = shard(Policy(staleness_lr="inverse"))
    here.push_pull("a", attempt(0), 0, ones())
    _, staleness, values = here.push_pull("b", attempt(1), 0, ones())
    assert staleness == 1
    np.testing.assert_array_equal(values.arrays[ARENA], np.full(4, -1.5))


def test_refused_calls_change_nothing() -> None:
    here = shard(Policy(max_staleness=0))
    here.push_pull("a", attempt(0), 0, ones())
    outcome, _, values = here.push_pull("b", attempt(1), 0, ones())
    assert outcome == "too_stale"
    np.testing.assert_array_equal(values.arrays[ARENA], np.full(4, -1.0))


def test_a_round_is_a_mean_times_the_recipe() -> None:
    here = shard(Policy(mode="sync", replicas=2), Recipe(rate_scale=2.0))
    for index in range(2):
        here.stage("a", attempt(index), 0, ones())
    here.decide(0, [attempt(0), attempt(1)])
    values = here.pull("a")
    assert values.version == 1
    np.testing.assert_array_equal(values.arrays[ARENA], np.full(4, -2.0))


def test_a_gradient_that_is_not_finite_is_skipped() -> None:
    here = shard(Policy())
    outcome, _, values = here.push_pull("a", attempt(0), 0, {})
    assert outcome == "skipped"
    assert values.version == 0
    with pytest.raises(AssertionError):
        np.testing.assert_array_equal(values.arrays[ARENA], np.full(4, -1.0))
