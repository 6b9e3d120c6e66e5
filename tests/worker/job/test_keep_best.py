"""Which result is compared, and which way."""

from __future__ import annotations

import re

import pytest

from psrpc.core.errors import InvalidJob
from worker.job.plateau import parse_keep_best


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("loss", ("loss", "min")),
        ("mean_squared_error", ("mean_squared_error", "min")),
        ("sparse_categorical_crossentropy", ("sparse_categorical_crossentropy", "min")),
        ("sparse_categorical_accuracy", ("sparse_categorical_accuracy", "max")),
        ("auc_1", ("auc_1", "max")),
        ("min:gain", ("gain", "min")),
        ("max:gain", ("gain", "max")),
        ("max:loss", ("loss", "max")),
        ("min:a:b", ("a:b", "min")),
    ],
)
def test_names_and_directions(text: str, meant: tuple[str, str]) -> None:
    assert parse_keep_best(text) == meant


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("gain", "'max:gain' or 'min:gain'"),
        ("recall_loss", "'max:recall_loss' or 'min:recall_loss'"),
        ("best:loss", "'max:loss' or 'min:loss'"),
        ("min:", "'max:accuracy' or 'min:accuracy'"),
        ("", "'max:accuracy' or 'min:accuracy'"),
    ],
)
def test_ambiguous_settings_are_refused(text: str, hint: str) -> None:
    with pytest.raises(InvalidJob, match=re.escape(hint)):
        parse_keep_best(text)
