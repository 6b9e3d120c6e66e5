"""Mistakes in job files and settings, found before anything is started."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.mistakes.commands import say

pytestmark = pytest.mark.slow  # imports TensorFlow

HEAD = """
import keras, numpy as np
import tensorflow as tf
from worker import Arrays, Csv, Embedding, Function, Job
x, y = np.zeros((40, 3), "float32"), np.zeros((40, 1), "float32")
def made(change):
    return Function(lambda a, b: change(tf.data.Dataset.from_tensor_slices((x[a:b], y[a:b]))), 40)
def of_ids():
    ids = keras.Input((), dtype="int64")
    return keras.Model(ids, keras.layers.Dense(1)(Embedding(2, 30, name="items")(ids)))
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
    "a job behind the guard of a script": (
        "if __name__ == '__main__':\n    job = job_with()",
        (),
        "PS101",
        'add: job = Job(...), outside of `if __name__ == "__main__"`, which is not run',
    ),
    "a model's function with arguments": (
        "def build(units, depth=2): pass\njob = job_with(model=build)",
        (),
        "PS105",
        "model needs units; expected a function without arguments: model=lambda: build(units=...)",
    ),
    "a model's function without return": (
        "job = job_with(model=lambda: None)",
        (),
        "PS101",
        "model() made None (did you forget `return`?); expected a keras.Model or a tf.Module",
    ),
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
    "a misspelt metric": (
        "job = job_with(metrics=['acuracy'])",
        (),
        "PS101",
        "Keras has no metric of that name; did you mean 'accuracy'?",
    ),
    "a misspelt loss": (
        "job = job_with(loss='binary_crosentropy')",
        (),
        "PS101",
        "Keras has no loss of that name; did you mean 'binary_crossentropy'?",
    ),
    "a misspelt optimizer": (
        "job = job_with(optimizer='adma')",
        (),
        "PS101",
        "Keras has no optimizer of that name; did you mean 'adam'?",
    ),
    "a model in place of its function": (
        "job = job_with(model=keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)]))",
        (),
        "PS105",
        "(model=build, not model=build())",
    ),
    "one metric without a list": ("job = job_with(metrics='auc')", (), "PS105", "metrics=['auc']"),
    "labels that are text": (
        "job = job_with(train=Arrays(x, np.array(['cat', 'dog'] * 20)))",
        (),
        "PS101",
        "labels are text, such as 'dog', and the loss takes numbers",
    ),
    "a dataset that batches": (
        "job = job_with(train=made(lambda dataset: dataset.batch(10)))",
        (),
        "PS106",
        "gave 4 batches, and was asked for 40 records; leave .batch(...) out",
    ),
    "a dataset that shuffles": (
        "job = job_with(train=made(lambda dataset: dataset.shuffle(40)))",
        (),
        "PS106",
        "is shuffled; leave .shuffle(...) out",
    ),
    "an id outside its vocabulary": (
        "job = job_with(train=Arrays(np.arange(40), y), batch_size=40, model=of_ids)",
        (),
        "PS101",
        "record 3",
    ),
    "a directory that is no checkpoint": (
        "job = job_with(init_from='/')",
        (),
        "PS101",
        "is neither a checkpoint (it has no manifest.json) nor a run directory",
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
