from __future__ import annotations

import pytest

from psrpc.core.batch import BatchId
from worker.protocol.micro_batches import NextBatch


@pytest.mark.parametrize("stride", [10, 30])
def test_a_steady_stride_is_guessed_once_it_has_shown(stride: int) -> None:
    following = NextBatch()
    guesses = [following.after(BatchId(0, i * stride, 10)) for i in range(4)]
    assert guesses == [
        None,
        None,
        BatchId(0, 3 * stride, 10),
        BatchId(0, 4 * stride, 10),
    ]


def test_a_wrong_guess_ends_the_guessing_until_one_would_have_been_right() -> None:
    following = NextBatch()
    firsts = [0, 10, 20, 50, 60, 70, 80]
    guesses = [following.after(BatchId(0, first, 10)) for first in firsts]
    assert [guess and guess.first for guess in guesses] == [None, None, 30, None, None, 80, 90]


def test_no_guess_crosses_an_epoch() -> None:
    following = NextBatch()
    for first in (0, 10, 20):
        following.after(BatchId(0, first, 10))
    assert following.after(BatchId(1, 0, 10)) is None
