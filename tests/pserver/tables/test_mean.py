"""The sum that a round of sync training applies to rows."""

from __future__ import annotations

import numpy as np

from psrpc.core.tables import Rows, weighted_sum
from tests.pserver.tables.table_cases import gradients


def test_every_id_once_in_the_order_given() -> None:
    parts = [
        (np.float32(weight), gradients(ids, seed=seed))
        for seed, (weight, ids) in enumerate(
            [(0.3, [1, 5, 9]), (0.5, [5, 7]), (0.2, [-4, 1, 5, 2**62])]
        )
    ]
    total = weighted_sum(parts)
    assert total.ids.tolist() == [-4, 1, 5, 7, 9, 2**62]
    for i, row in zip(total.ids, total.values, strict=True):
        expected = np.zeros(3, np.float32)
        for weight, rows in parts:
            for own, gradient in zip(rows.ids, rows.values, strict=True):
                if own == i:
                    expected = expected + weight * gradient
        np.testing.assert_array_equal(row, expected)


def test_parts_of_the_same_ids_and_one_alone() -> None:
    rows = gradients([1, 2, 3])
    (alone,) = [weighted_sum([(np.float32(0.5), rows)])]
    both = weighted_sum([(np.float32(0.25), rows), (np.float32(0.25), rows)])
    for total in (alone, both):
        np.testing.assert_array_equal(total.values, rows.values / 2)
        assert not np.shares_memory(total.values, rows.values)


def test_no_rows() -> None:
    none = Rows(np.empty(0, np.int64), np.empty((0, 3), np.float32))
    total = weighted_sum([(np.float32(0.5), none), (np.float32(0.5), gradients([4]))])
    assert total.ids.tolist() == [4]
