"""Figures as they are shown."""

from __future__ import annotations

import math

import pytest

from coordinator.core.wording import figure, in_words, metrics, shard_name
from psrpc.v1.coordinator_pb2 import ShardStatus


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (0.0, "0.0000"),
        (0.25, "0.2500"),
        (-12.5, "-12.5000"),
        (0.001, "0.0010"),
        (4.4123e-06, "4.41e-06"),
        (-0.00051234, "-0.000512"),
        (math.nan, "nan"),
        (math.inf, "inf"),
    ],
)
def test_a_small_figure_is_not_shown_as_zero(value: float, shown: str) -> None:
    assert figure(value) == shown
    assert metrics({"loss": value}) == f"loss {shown}"


def test_changed_settings_are_named_without_those_that_are_off() -> None:
    assert in_words({"dense": "allreduce", "slices": "2"}) == "dense=allreduce slices=2"
    assert in_words({"dense": "shards", "slices": "none"}) == "dense=shards"
    assert in_words({"slices": "none"}) == "slices=none"


def test_a_slice_is_not_called_a_shard() -> None:
    assert shard_name(ShardStatus(shard=1)) == "shard 1"
    assert shard_name(ShardStatus(shard=1, slice=True)) == "slice 1"
