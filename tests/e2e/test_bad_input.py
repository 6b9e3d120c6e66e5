"""Users' mistakes: one clear line, a non-zero exit, and nothing left running."""

from __future__ import annotations

import re
import socket
from pathlib import Path

import pytest

from tests.e2e.cluster import JOBS, by_hand, codes, ended, up

pytestmark = pytest.mark.slow

HEAD = """
import keras, numpy as np
from worker import Arrays, Job
x, y = np.zeros((40, 3), "float32"), np.zeros((40, 1), "float32")
def job_with(**fields):
    fields = dict(
        model=lambda: keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)]), loss="mse",
        optimizer="sgd", train=Arrays(x, y), batch_size=10, engine="numpy", replicas=2) | fields
    return Job(**fields)
"""


@pytest.mark.parametrize(
    ("text", "args", "message"),
    [
        ("x = 1", (), "defines no job"),
        ("job = job_with()", ("--set", "epoch=3"), "epoch.*epochs"),
        (
            "job = job_with(loss='sparse_categorical_crossentropy', "
            "train=Arrays(x, np.full((40,), 7)))",
            (),
            "label.*7",
        ),
        ("job = job_with(optimizer=keras.optimizers.Adam())", ("--shards", "0"), "shards"),
    ],
)
def test_a_job_that_cannot_run(
    tmp_path: Path, text: str, args: tuple[str, ...], message: str
) -> None:
    """One mistake of each kind: in the file, in a setting, in what the model makes of the data,
    and in an option. tests/worker/describe/test_describe.py and others there have all of them."""
    job = tmp_path / "job.py"
    job.write_text(HEAD + text)
    run = up(job, tmp_path / "run", *args, check=False)
    assert run.code == 2, run.stderr
    lines = [line for line in run.stderr.splitlines() if line.strip()]
    assert len(lines) == 1, run.stderr
    assert re.search(message, lines[0]), lines[0]


def test_a_job_file_that_raises_shows_its_own_traceback(tmp_path: Path) -> None:
    job = tmp_path / "job.py"
    job.write_text("def settings():\n    return 1 / 0\n\nsettings()\n")
    run = up(job, tmp_path / "run", check=False)
    assert run.code == 2
    assert "return 1 / 0" in run.stderr
    assert "ZeroDivisionError" in run.stderr.strip().splitlines()[-1]
    assert "loader.py" not in run.stderr, "our own frames are not the user's business"


def test_a_port_in_use_is_named(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        for role, args in (
            ("coordinator", ("--job", JOBS / "dense.py", "--run-dir", tmp_path / "run")),
            ("pserver", ("--shard", "0", "--coordinator", "127.0.0.1:9")),
        ):
            done = ended(role, "serve", "--bind", f"127.0.0.1:{port}", *args)
            assert done.returncode == 2, done.stderr
            assert f"port {port} is in use" in done.stderr
            assert "Traceback" not in done.stderr


def test_a_coordinator_that_is_not_there_is_awaited_aloud(tmp_path: Path) -> None:
    """By a shard and a worker at the same time. The first announcement comes after 3 s."""
    where = ("--coordinator", "127.0.0.1:9", "--connect-timeout", "6")
    with by_hand(tmp_path) as hand:
        hand.start("shard", "pserver", "serve", "--shard", "0", *where)
        hand.start("worker", "worker", "run", *where)
        assert codes(hand.processes) == [1, 1], hand.logs()
        for process in hand.processes:
            said = process.text()
            assert "127.0.0.1:9" in said
            assert "wait" in said, said
            assert "error PS204: " in said.splitlines()[-1]
            assert "Traceback" not in said


def test_shards_that_do_not_fit_the_job(tmp_path: Path) -> None:
    with by_hand(tmp_path) as hand:
        coordinator = hand.coordinator(JOBS / "dense.py", "--shards", "2")
        address = coordinator.wait_for(r"127\.0\.0\.1:\d+")[0]
        where = ("--coordinator", address)
        out_of_range = hand.start("shard-5", "pserver", "serve", "--shard", "5", *where)
        assert out_of_range.wait() == 2
        assert "5" in out_of_range.text()
        assert "0 to 1" in out_of_range.text() or "0..1" in out_of_range.text()
        first = hand.start("shard-0", "pserver", "serve", "--shard", "0", *where)
        coordinator.wait_for("shard registered .*shard=0")
        second = hand.start("again", "pserver", "serve", "--shard", "0", *where)
        assert second.wait() == 2
        assert "shard 0" in second.text()
        first.wait_for("waiting for shard 1 to register")
        assert first.popen.poll() is None, "the first one is not disturbed"


def test_a_worker_with_another_job_file(tmp_path: Path) -> None:
    other = tmp_path / "dense.py"
    other.write_text((JOBS / "dense.py").read_text() + "\n# changed\n")
    with by_hand(tmp_path) as hand:
        coordinator = hand.coordinator(JOBS / "dense.py")
        address = coordinator.wait_for(r"127\.0\.0\.1:\d+")[0]
        worker = hand.start("worker", "worker", "run", "--coordinator", address, "--job", other)
        assert worker.wait() == 2
        line = worker.text().strip().splitlines()[-1]
        assert str(other) in line
        assert "sha" in line.lower()


def test_a_poisoned_batch_is_skipped_everywhere_and_counted(tmp_path: Path) -> None:
    """In an async epoch, and in a sync one after it."""
    sets = ("--set", "epochs=2", "--set", "then=sync", "--set", "then_after=1")
    run = up(JOBS / "poisoned.py", tmp_path / "run", *sets, "--shards", "2", POISONED="1")
    assert run.summary["skipped"] == 2
    assert run.summary["batches"] == 80
    assert run.summary["global_step"] == 40 + 20
    assert run.summary["phase"] == "done"


def test_ten_poisoned_batches_in_a_row_stop_the_job(tmp_path: Path) -> None:
    args = ("--mode", "sync", "--shards", "2")
    run = up(JOBS / "poisoned.py", tmp_path / "run", *args, POISONED="400", check=False)
    assert run.code == 1
    assert run.summary["phase"] == "failed"
    assert "10" in run.summary["reason"]
    assert run.summary["reason"].removeprefix("PS603: ") in run.stderr


def test_divergence_stops_the_job(tmp_path: Path) -> None:
    """At this rate each update of the linear model overshoots, by 9 % on average: slow enough for
    the loss to stay finite for the 200 steps that the guard watches."""
    sets = ("--set", "optimizer.learning_rate=0.95", "--set", "epochs=40")
    run = up(
        JOBS / "poisoned.py", tmp_path / "run", "--workers", "1", *sets, POISONED="0", check=False
    )
    assert run.code == 1
    assert "diverge" in run.summary["reason"]
