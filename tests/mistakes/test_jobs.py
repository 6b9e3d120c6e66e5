"""Mistakes in job files and settings, found before anything is started."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.mistakes.commands import say

pytestmark = pytest.mark.slow  # imports TensorFlow

HEAD = """
import keras, numpy as np
from worker import Arrays, Csv, Job
x, y = np.zeros((40, 3), "float32"), np.zeros((40, 1), "float32")
def job_with(**fields):
    fields = dict(
        model=lambda: keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)]), loss="mse",
        optimizer="sgd", train=Arrays(x, y), batch_size=10, engine="numpy", replicas=2) | fields
    return Job(**fields)
"""

MISTAKES = {
    "no such file": (None, (), "PS102", "there is no job file"),
    "a syntax error": ("job = job_with(", (), "PS103", "SyntaxError"),
    "a bug": ("job = job_with(train=missing)", (), "PS103", "name 'missing' is not defined"),
    "no job": ("x = 1", (), "PS101", "add: job = Job(...)"),
    "an unknown setting": ("job = job_with()", ("epoch=3",), "PS104", "did you mean epochs"),
    "a field that there is not": (
        "job = job_with(batch_sizes=3)",
        (),
        "PS104",
        "did you mean 'batch_size'?",
    ),
    "no value": ("job = job_with()", ("epochs",), "PS104", "expected key=value"),
    "a learning rate of NaN": (
        "job = job_with()",
        ("optimizer.learning_rate=nan",),
        "PS105",
        "expected a finite number",
    ),
    "a negative batch size": (
        "job = job_with()",
        ("batch_size=-5",),
        "PS105",
        "expected a whole number of at least 1",
    ),
    "a setting of another mode": ("job = job_with(staleness=3)", (), "PS105", "is for mode ssp"),
    "a data file that is missing": (
        "job = job_with(train=Csv('gone.csv', y='label'))",
        (),
        "PS106",
        "there is no file 'gone.csv'",
    ),
    "records without labels": ("job = job_with(train=Arrays(x, y[:20]))", (), "PS106", "20"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_the_cause_and_what_to_do(
    mistake: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    text, settings, code, fix = MISTAKES[mistake]
    path = tmp_path / "job.py"
    if text is not None:
        path.write_text(HEAD + text)
    options = [option for setting in settings for option in ("--set", setting)]
    said = say(capfd, "worker", "describe", path, *options)
    assert (said.code, said.status) == (code, 2), said.everything
    assert fix in said.message
    # Of what the user's code raised the place is shown, of nothing else.
    assert (f'File "{path}", line' in said.everything) == (code == "PS103")
