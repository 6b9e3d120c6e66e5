"""``pserver.launch.spark`` and ``pserver.predictions`` on a real Spark."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coordinator.launchers import spark as engine
from pserver import launch, predictions
from psrpc.core.errors import LaunchFailed
from tests.docs.following import follow_page
from tests.docs.host import Shell
from tests.e2e.cluster import EXAMPLES, ended, members, processes_of, until, wait_until_gone
from tests.e2e.parquet_job import counting_job
from tests.launchers.spark_engine import executor_of, submitting
from tests.launchers.test_slurm import counted, epochs

pytestmark = [
    pytest.mark.launchers,
    pytest.mark.timeout(1500),
    # pyspark's own.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]

RECORDS, BATCH, EPOCHS = 4096, 16, 40

JOB = counting_job(RECORDS, BATCH, EPOCHS)


def meanwhile(act: Callable[[], object]) -> threading.Thread:
    """Acts in another thread, while this one trains."""
    thread = threading.Thread(target=act, daemon=True)
    thread.start()
    return thread


def test_lost_executors_stops_and_cancelled_jobs_cost_no_record(
    tmp_path: Path, session: Any
) -> None:
    run = tmp_path / "run"
    run.mkdir()
    # There, so that the command lines of all processes name the directory.
    job = run / "job.py"
    job.write_text(JOB)
    ids = session.range(RECORDS)
    frame = ids.selectExpr(f"array(id, id + {RECORDS}) things", "float(id % 100 + 1) worth")
    options: dict[str, Any] = {"run_dir": run, "shards": 1, "workers": 2, "insecure": True}

    def lose_executors() -> None:
        until(lambda: epochs(run) > 0, "the first epoch")
        lost = [executor_of(members(run, role)[0]) for role in ("pserver", "worker")]
        left = processes_of(run)
        for pid in lost:
            os.kill(pid, signal.SIGKILL)
        wait_until_gone(lost)
        done = epochs(run)
        until(lambda: epochs(run) > done + 1, "further epochs")
        assert len(set(processes_of(run)) - set(left)) == 2
        session.sparkContext.cancelAllJobs()

    thread = meanwhile(lose_executors)
    with pytest.raises(LaunchFailed, match=r"^the Spark job was cancelled"):
        launch.spark(session, job, data=frame, **options)
    thread.join()
    wait_until_gone(processes_of(run))
    done = epochs(run)

    def interrupt() -> None:
        until(lambda: epochs(run) > done, "an epoch of the second launch")
        [coordinator] = members(run, "coordinator")
        os.kill(coordinator, signal.SIGKILL)
        wait_until_gone([coordinator])
        later = epochs(run)
        # It finds one of them done that the other had not written down.
        until(lambda: epochs(run) > later + 1, "an epoch with another coordinator")
        os.kill(os.getpid(), signal.SIGINT)

    thread = meanwhile(interrupt)
    # The frame is written already: this one is not read.
    with pytest.raises(KeyboardInterrupt):
        launch.spark(session, job, data=frame.limit(0), **options)
    thread.join()
    wait_until_gone(processes_of(run))

    summary = launch.spark(session, job, data=frame, **options)
    assert summary["phase"] == "done"
    assert counted(run)["batches"] == EPOCHS * RECORDS // BATCH
    wait_until_gone(processes_of(run))

    exported = ended("coordinator", "export", run, "--to", tmp_path / "model.keras")
    assert exported.returncode == 0, exported.stderr
    new = predictions(frame, tmp_path / "model.keras", x="things").toArrow()
    found = np.array(new["prediction"].to_pylist())
    worth = np.array(new["worth"].to_pylist())
    assert found.tolist() == np.stack([EPOCHS * worth] * 2, axis=1).tolist()


@pytest.mark.long
def test_the_page_leads_to_a_trained_model(tmp_path: Path) -> None:
    with Shell(tmp_path, submitting(tmp_path)) as host:
        done = follow_page("docs/spark.md", host)
        assert counted(host.folder / "runs" / "flats")["batches"] == 12_000
        [trained] = [each.output for each in done if "train.py" in each.command]
        assert "Lost task" in trained
        wait_until_gone(processes_of(host.folder))


def test_a_process_that_refuses_its_command_ends_the_call(tmp_path: Path, session: Any) -> None:
    """No executor has a GPU of this number."""
    options: dict[str, Any] = {"shards": 1, "workers": 2, "insecure": True, "gpu": "7"}
    with pytest.raises(LaunchFailed, match=r"--gpu 7") as refused:
        launch.spark(session, EXAMPLES / "mnist_dnn.py", run_dir=tmp_path / "run", **options)
    assert refused.value.code != "PS140"
    wait_until_gone(processes_of(tmp_path / "run"))


def test_more_processes_than_slots_are_refused(
    tmp_path: Path, session: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "SETTLE_S", 0.1)
    says = r"1 shard and 3 workers, .* and Spark has 3 slots \(1 of spark.task.cpus each\); ask for"
    options: dict[str, Any] = {"shards": 1, "workers": 3, "insecure": True}
    with pytest.raises(LaunchFailed, match=says):
        launch.spark(session, EXAMPLES / "mnist_dnn.py", run_dir=tmp_path / "run", **options)
    assert not (tmp_path / "run").exists()


def test_a_value_that_is_missing_from_a_frame_is_named(tmp_path: Path, session: Any) -> None:
    frame = session.sql("select float(null) a")
    with pytest.raises(Exception, match="a row of the frame has no value in column 'a'"):
        predictions(frame, lambda: len, x=["a"]).collect()
