"""A coordinator and shards where TensorFlow is not installed, with workers where it is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.e2e.cluster import JOBS, ROOT, Hand, Process, by_hand, ended

pytestmark = pytest.mark.slow

HIDDEN = """
import sys
for name in ("tensorflow", "keras", "h5py", "tensorboard", "cloudpickle", "setproctitle"):
    sys.modules[name] = None
"""


@pytest.fixture
def bare(tmp_path: Path) -> dict[str, str]:
    """The environment of a process that finds no package of the extra ``tf``."""
    folder = tmp_path / "bare"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(HIDDEN)
    return {"PYTHONPATH": f"{folder}:{ROOT}"}


def begin(hand: Hand, bare: dict[str, str], *settings: str) -> tuple[Process, Process, str]:
    """Describes ``dense.py`` with TensorFlow, and starts a coordinator and a shard without."""
    file = hand.folder / "job.json"
    sets: list[str | Path] = [word for one in settings for word in ("--set", one)]
    done = ended("worker", "describe", JOBS / "dense.py", "-o", file, *sets)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    where = ("--run-dir", hand.run_dir, "--bind", "127.0.0.1:0", "--insecure")
    job = ("--job", JOBS / "dense.py", "--description", file)
    coordinator = hand.start("coordinator", "coordinator", "serve", *job, *sets, *where, **bare)
    address = coordinator.wait_for(r"serving +address=(\S+)")[1]
    cluster = ("--shard", "0", "--coordinator", address)
    return coordinator, hand.start("shard", "pserver", "serve", *cluster, **bare), address


def test_they_train_with_the_numpy_engine(tmp_path: Path, bare: dict[str, str]) -> None:
    with by_hand(tmp_path) as hand:
        coordinator, shard, address = begin(hand, bare, "epochs=1")
        worker = hand.start("worker", "worker", "run", "--coordinator", address)
        assert [each.wait() for each in (coordinator, shard, worker)] == [0, 0, 0], hand.logs()
    summary = json.loads((hand.run_dir / "summary.json").read_text())
    assert summary["counted"]["counted"] == 62
    assert list((hand.run_dir / "tensorboard").glob("events.out.tfevents.*"))


def test_a_shard_that_cannot_have_the_engine_ends_the_job_and_says_why(
    tmp_path: Path, bare: dict[str, str]
) -> None:
    with by_hand(tmp_path) as hand:
        coordinator, shard, _ = begin(hand, bare, "engine=keras")
        assert [each.wait() for each in (coordinator, shard)] == [1, 2], hand.logs()
        why = r"the job's engine, keras, needs TensorFlow, .*pip install 'tf-pserver\[tf\]'"
        coordinator.wait_for(rf"error PS135: shard 0 at \S+ cannot go on: {why}")
        shard.wait_for(rf"error PS135: {why}")


@pytest.mark.parametrize(
    "words",
    [
        ("worker", "run"),
        ("worker", "describe", JOBS / "dense.py"),
        ("worker", "export", JOBS / "dense.py", "run/checkpoints/x", "--to", "x.keras"),
        ("coordinator", "up", JOBS / "dense.py"),
        ("coordinator", "serve", "--job", JOBS / "dense.py", "--bind", "127.0.0.1:0"),
    ],
    ids=lambda words: " ".join(words[:2]),
)
def test_a_command_that_needs_it_says_so_in_one_line(
    words: tuple[str, *tuple[str | Path, ...]], bare: dict[str, str]
) -> None:
    done = ended(*words, **bare)
    assert done.returncode == 2
    [line] = done.stderr.splitlines()
    assert line.startswith("error PS135: ")
    assert "needs TensorFlow, which is not installed in" in line
    assert "pip install 'tf-pserver[tf]'" in line
