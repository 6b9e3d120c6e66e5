"""Commands that a run and its export advise work as printed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from tests.e2e.cluster import LIMIT_S, Run, ended, environment, up

pytestmark = pytest.mark.slow

JOB = """
import keras, numpy as np
from worker import Arrays, Embedding, Job, setting
kind = setting("kind", "own")
class Twice(keras.layers.Layer):
    def call(self, x):
        return 2 * x
def model():
    i = keras.Input((), dtype="int64", name="ids")
    if kind == "growing":
        x = Embedding(3, name="things")(i)
    elif kind == "fixed":
        x = Embedding(3, 5, padding=0, name="things")(i)
    else:
        x = Twice()(keras.layers.Embedding(5, 3)(i))
    return keras.Model(i, keras.layers.Dense(1)(x))
job = Job(model=model, loss="mse", optimizer="sgd", engine="numpy", batch_size=16,
          train=Arrays(np.arange(32) % 5, np.ones((32, 1), "float32")))
"""

SAVED_MODEL = "import tensorflow as tf; m = tf.saved_model.load('model'); m.serve(np.arange(5))"
TABLES = (
    "from safetensors.numpy import load_file; "
    "load_file('tables/things.safetensors'), load_file('tables/model.safetensors')"
)

Trained = Callable[[str], Run]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    @cache
    def run(kind: str) -> Run:
        where = tmp_path_factory.mktemp(kind)
        (where / "job.py").write_text(JOB)
        return up(where / "job.py", where / "run", "--set", f"kind={kind}")

    return run


def typed(line: str, run: Run) -> subprocess.CompletedProcess[str]:
    """Runs a line as in a shell beside the job file, in which the commands are installed."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return subprocess.run(
        ["/bin/sh", "-c", line],
        cwd=run.run_dir.parent,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        env=environment(PATH=path),
        check=False,
    )


def export(run: Run, to: str) -> subprocess.CompletedProcess[str]:
    """Exports to a file or directory beside the job file, from a warm process."""
    # A slash at the end stands for a directory.
    return ended("coordinator", "export", run.run_dir, "--to", f"{run.run_dir.parent}/{to}")


def check_loads(*loads: tuple[Run, str]) -> None:
    """Loads written files without this project, as a user does who types the code beside each. In
    one process, since most of its time goes to imports."""
    code = "; ".join(f"os.chdir('{run.run_dir.parent}'); {code}" for run, code in loads)
    done = typed(f'python -c "import os, numpy as np; {code}"', loads[0][0])
    assert done.returncode == 0, f"{code}\n{done.stderr}"


def advice_of(run: Run) -> str:
    [advice] = re.findall(r"^to use the model: (.*)$", run.stdout, flags=re.MULTILINE)
    return str(advice)


def test_the_last_line_of_a_run_with_tables(trained: Trained) -> None:
    """And what is advised where a Keras file is asked for, which cannot hold such tables."""
    fixed, growing = trained("fixed"), trained("growing")
    for run in (fixed, growing):
        done = typed(advice_of(run), run)
        assert done.returncode == 0, f"{advice_of(run)}\n{done.stderr}"
        refused = export(run, "model.keras")
        assert refused.returncode == 2
        assert "give a directory (with / at its end) for a SavedModel" in refused.stderr
    assert export(growing, "model/").returncode == 0
    check_loads((fixed, SAVED_MODEL), (growing, TABLES), (growing, SAVED_MODEL))


def test_the_last_line_of_a_run_and_how_to_load_layers_of_the_jobs_own(trained: Trained) -> None:
    run = trained("own")
    done = typed(advice_of(run), run)
    assert done.returncode == 0, done.stderr
    [(call, other)] = re.findall(r"load it with (.*\)); a SavedModel \(--to (\S+)\)", done.stdout)
    done = export(run, other.replace("DIR", "model"))
    assert done.returncode == 0, done.stderr
    code = f"import keras; from job import Twice; {call}(np.arange(5))"
    check_loads((run, code), (run, SAVED_MODEL))
