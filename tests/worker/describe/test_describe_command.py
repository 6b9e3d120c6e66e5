"""``worker describe`` as a process: what is on stdout, and what on stderr."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.cluster import ended

pytestmark = pytest.mark.slow
NOISE = """
import os
print("on stdout")
os.write(1, b"on descriptor 1")
"""


JOB = """
import keras, numpy as np
from worker import Arrays, Job

def loss(y, p):
    return {loss}

job = Job(
    model=lambda: keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)]),
    loss=loss, optimizer="sgd", batch_size=2, train=Arrays(np.zeros((8, 1)), np.zeros((8, 1))),
)
"""


RUN = "import sys; from worker.describe.describe import describe_main; "
RUN += "sys.exit(describe_main(sys.argv[1], sys.argv[2:], 'sync'))"


def run(path: Path, *settings: str) -> subprocess.CompletedProcess[str]:
    """Imports TensorFlow, which must not write to stdout either."""
    return subprocess.run(
        [sys.executable, "-c", RUN, str(path), *settings], capture_output=True, text=True
    )


def run_warm(path: Path, *settings: str) -> subprocess.CompletedProcess[str]:
    sets = [word for setting in settings for word in ("--set", setting)]
    return ended("worker", "describe", path, "--mode", "sync", *sets)


def test_stdout_holds_one_document_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "noisy.py"
    path.write_text(NOISE + JOB.format(loss="keras.ops.square(y - p)"))
    done = run(path, "replicas=2")
    assert done.returncode == 0
    document = json.loads(done.stdout)
    assert document["name"] == "noisy"
    assert document["policy"] == {"mode": "sync", "replicas": 2}
    assert "on stdout" in done.stderr
    assert "on descriptor 1" in done.stderr


def test_errors_are_shown_on_stderr_with_the_users_frames_alone(tmp_path: Path) -> None:
    path = tmp_path / "bad.py"
    path.write_text(JOB.format(loss="y - p.no_such_part"))
    refused = run_warm(path)
    assert (refused.returncode, refused.stdout) == (2, "")
    assert refused.stderr.splitlines() == [
        "error PS105: mode is 'sync' but replicas is not set; say how many micro-batches "
        "make a round: Job(replicas=3), --replicas 3 or coordinator set mode=sync replicas=3"
    ]
    failed = run_warm(path, "replicas=2")
    assert (failed.returncode, failed.stdout) == (2, "")
    *frames, last = failed.stderr.splitlines()
    assert last.startswith("error PS103: the training step raised AttributeError: ")
    assert "no_such_part" in last
    assert any(f'File "{path}"' in frame for frame in frames)
    assert not any("worker/" in frame or "site-packages" in frame for frame in frames)


def test_a_setting_that_the_model_reads_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "late.py"
    path.write_text(JOB.format(loss="y - p") + "from worker import setting\nsetting('units', 1)\n")
    text = path.read_text().replace("model=lambda: ", "model=lambda: setting('units', 1) and ")
    path.write_text(text)
    refused = run_warm(path, "replicas=1", "units=7")
    assert (refused.returncode, refused.stdout) == (2, "")
    assert refused.stderr.splitlines()[-1] == (
        "error PS104: model(): setting('units') is read after the job file was loaded; "
        "read it at the top of the file"
    )
