"""Initial rows depend on (seed, table, id, column) alone."""

from __future__ import annotations

from statistics import NormalDist
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from pserver.tables.initial import InitialRows
from psrpc.core.errors import InvalidJob
from psrpc.core.tables import Ids
from tests.pserver.tables.table_cases import spec

KINDS: list[dict[str, Any]] = [
    {"class_name": "uniform", "config": {"low": -0.25, "high": 0.75}},
    {"class_name": "normal", "config": {"mean": 1.0, "stddev": 0.5}},
    {"class_name": "constant", "config": {"value": 0.25}},
]


def filled(ids: Ids, **changes: Any) -> npt.NDArray[np.float32]:
    its = spec(**changes)
    into = np.full((len(ids), its.width), np.nan, np.float32)
    InitialRows(its).fill(ids, into)
    return into


@pytest.mark.parametrize("kind", KINDS, ids=lambda k: k["class_name"])
@pytest.mark.parametrize("width", [1, 3, 64])
def test_neither_order_nor_batch_changes_a_bit(kind: dict[str, Any], width: int) -> None:
    ids = np.random.default_rng(0).permutation(np.arange(-500, 500)) * 7**17
    whole = filled(ids, initializer=kind, width=width)
    for n in (1, 7, 333):
        parts = [filled(p, initializer=kind, width=width) for p in np.array_split(ids, n)]
        np.testing.assert_array_equal(np.concatenate(parts), whole)
    scattered = np.zeros((1000, width), np.float32)
    order = np.random.default_rng(1).permutation(1000)
    InitialRows(spec(initializer=kind, width=width)).fill_to(ids[order], order, scattered)
    np.testing.assert_array_equal(scattered, whole)


@pytest.mark.parametrize(
    ("kind", "width", "expected"),
    [
        (KINDS[0], 3, [0.2084102, 0.1097765, -0.124654055]),
        (KINDS[1], 3, [0.9477802, 0.8204719, 0.4256648]),
    ],
)
def test_the_values_are_what_they_always_were(
    kind: dict[str, Any], width: int, expected: list[float]
) -> None:
    # Load-bearing: rows that no push has touched are in no checkpoint.
    (row,) = filled(np.array([42]), initializer=kind, width=width)
    np.testing.assert_array_equal(row, np.array(expected, np.float32))


@pytest.mark.parametrize("change", [{"seed": 1}, {"name": "users"}])
def test_seed_and_name_change_every_row(change: dict[str, Any]) -> None:
    ids = np.arange(1000)
    assert (filled(ids) != filled(ids, **change)).mean() > 0.999


def test_uniform_is_uniform() -> None:
    values = filled(np.arange(50_000), initializer=KINDS[0], width=4)
    assert values.min() >= -0.25
    assert values.max() <= 0.75
    counts, _ = np.histogram(values, bins=20, range=(-0.25, 0.75))
    np.testing.assert_allclose(counts, 10_000, rtol=0.05)
    correlation = np.corrcoef(values.T)
    np.testing.assert_allclose(correlation, np.eye(4), atol=0.02)


def test_normal_is_normal() -> None:
    values = np.sort(filled(np.arange(50_000), initializer=KINDS[1], width=4).ravel())
    exact = NormalDist(1.0, 0.5)
    at = (0.001, 0.02, 0.2, 0.5, 0.8, 0.98, 0.999)
    quantiles = [values[int(p * len(values))] for p in at]
    np.testing.assert_allclose(quantiles, [exact.inv_cdf(p) for p in at], atol=0.02)
    assert abs(values.std() - 0.5) < 0.005


def test_an_initializer_without_its_argument() -> None:
    with pytest.raises(InvalidJob, match=r"table 'items' has initializer uniform without high"):
        InitialRows(spec(initializer={"class_name": "uniform", "config": {"low": 0.0}}))
