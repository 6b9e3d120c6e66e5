"""Packages that are not installed: the extras of ``tf-pserver``."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.coordinator.builders import make_run, serving
from tests.e2e.cluster import EXAMPLES, JOBS
from tests.mistakes.commands import say

pytestmark = pytest.mark.slow

MODULES = (
    "tensorflow",
    "keras",
    "fsspec",
    "opentelemetry.exporter.otlp.proto.http.trace_exporter",
    "ray",
)
"""Of the extras ``tf``, ``remote``, ``otel`` and ``ray``."""

MISTAKES = {
    "a worker without TensorFlow": (
        "worker run --job {jobs}/dense.py",
        "a worker needs TensorFlow, which is not installed in ",
        "tf",
    ),
    "a description without TensorFlow": (
        "worker describe {jobs}/dense.py",
        "`worker describe` needs TensorFlow, which is not",
        "tf",
    ),
    "a cluster on a machine without TensorFlow": (
        "coordinator up {jobs}/dense.py",
        "`coordinator up` needs TensorFlow, which is not",
        "tf",
    ),
    "a coordinator without TensorFlow, and without a description": (
        "coordinator serve --job {jobs}/dense.py --bind 127.0.0.1:0",
        "where it is installed, and --description job.json here",
        "tf",
    ),
    "traces without OpenTelemetry": (
        "pserver serve --shard 0 --trace http://127.0.0.1:1/v1/traces",
        "--trace needs OpenTelemetry",
        "otel",
    ),
    "a launch on Ray without Ray": (
        "coordinator launch ray {examples}/mnist_dnn.py --run-dir {run} --insecure",
        "a launch on Ray needs Ray, which is not installed",
        "ray",
    ),
}


@pytest.fixture(autouse=True)
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hides the packages from imports, and from looks for them."""
    for module in MODULES:
        monkeypatch.setitem(sys.modules, module, None)


@pytest.mark.parametrize("mistake", MISTAKES)
def test_the_command_that_brings_it(
    mistake: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    typed, message, extra = MISTAKES[mistake]
    run = tmp_path / "run"
    said = say(capfd, *typed.format(jobs=JOBS, examples=EXAMPLES, run=run).split())
    assert (said.code, said.status) == ("PS135", 2), said.everything
    assert message in said.message
    assert f"pip install 'tf-pserver[{extra}]'" in said.message
    assert "Traceback" not in said.everything
    assert not run.exists()


@pytest.mark.parametrize("mistake", ["a Keras shard without TensorFlow"])
def test_a_shard_that_can_never_run(
    mistake: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = make_run(tmp_path, engine="keras")
    (tmp_path / "token").write_text(run.token)
    with serving(run) as served:
        said = say(capfd, *f"pserver serve --shard 0 --coordinator {served.address}".split())
        assert (said.code, said.status) == ("PS135", 2), said.everything
        assert said.message.startswith("the job's engine, keras, needs TensorFlow, which is not")
        assert "pip install 'tf-pserver[tf]', or use engine numpy in the job" in said.message
        # The job has heard it, too.
        assert served.job_run.reason.startswith("PS135: shard 0 at 127.0.0.1:")
