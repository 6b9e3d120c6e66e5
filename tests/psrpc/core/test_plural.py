"""Counts and their nouns."""

from __future__ import annotations

import pytest

from psrpc.core.text import counted


@pytest.mark.parametrize(
    ("number", "nouns", "said"),
    [
        (0, ("record",), "0 records"),
        (1, ("record",), "1 record"),
        (2, ("record",), "2 records"),
        (1, ("batch", "batches"), "1 batch"),
        (2, ("batch", "batches"), "2 batches"),
    ],
)
def test_a_count_has_the_form_of_its_noun(number: int, nouns: tuple[str, ...], said: str) -> None:
    assert counted(number, *nouns) == said
