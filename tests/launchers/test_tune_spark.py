"""Studies whose trials are tasks of a real Spark."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

import pserver
from psrpc.core.errors import InvalidSetting, LaunchFailed
from tests.e2e.cluster import JOBS, members, processes_of, until, wait_until_gone
from tests.e2e.test_modes import small_copy
from tests.e2e.test_tune import summary, table
from tests.launchers.spark_engine import EXECUTORS, executor_of
from tests.launchers.test_slurm import epochs

pytestmark = [
    pytest.mark.launchers,
    pytest.mark.timeout(1500),
    # pyspark's own.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]
pytest.importorskip("optuna")

TRIALS, EPOCHS = 3, 40
BATCHES = EPOCHS * 40


@pytest.mark.long
def test_lost_executors_and_ctrl_c_train_nothing_twice(tmp_path: Path, session: Any) -> None:
    study = tmp_path / "study"
    options: dict[str, Any] = {
        "space": {"optimizer.learning_rate": "uniform(0.01, 0.1)"},
        "sampler": "random",
        "pruner": "none",
        "trials": TRIALS,
        "parallel": 2,
        "overrides": [f"epochs={EPOCHS}", "checkpoint_every=100"],
        "run_dir": study,
        "spark": session,
    }

    def trial(number: int) -> Path:
        return study / f"trial-{number:04d}"

    def harm() -> None:
        until(lambda: epochs(trial(0)) > 2, "epochs of trial 0")
        lost = [executor_of(members(trial(0), "worker")[0])]
        os.kill(lost[0], signal.SIGKILL)
        wait_until_gone(lost)
        before = epochs(trial(0))
        until(lambda: epochs(trial(0)) > before + 1, "trial 0 on another executor")
        killed.extend(lost)
        until(lambda: epochs(trial(2)) > 0, "trial 2")
        os.kill(os.getpid(), signal.SIGINT)

    killed: list[int] = []
    thread = threading.Thread(target=harm, daemon=True)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        pserver.tune(JOBS / "searched.py", **options)
    thread.join()
    assert killed
    wait_until_gone(processes_of(study))
    finished = {
        int(row["trial"]): summary(study, int(row["trial"]))
        for row in table(study)
        if row["state"] == "complete"
    }
    pserver.tune(JOBS / "searched.py", **options)
    assert [row["state"] for row in table(study)] == ["complete"] * TRIALS
    for number in range(TRIALS):
        found = summary(study, number)
        assert found == finished.get(number, found), "trained twice"
        counted = found["counted"]
        assert (counted["batches"], counted["counted"], counted["twice"]) == (BATCHES, BATCHES, 0)
    wait_until_gone(processes_of(study))


@pytest.mark.long
def test_a_grid_on_spark_has_the_table_of_this_machine(tmp_path: Path, session: Any) -> None:
    """The search of the original report, with a part of its data."""
    job = small_copy("mnist_search", tmp_path)
    options: dict[str, Any] = {
        "metric": "max:accuracy",
        "sampler": "grid",
        "parallel": 2,
        "overrides": ["epochs=2"],
        # The bits of a product depend on the number of threads.
        "intra_op_threads": 1,
        "dashboard": None,
    }
    tables = {}
    for name, where in (("here", None), ("spark", session)):
        study = pserver.tune(job, run_dir=tmp_path / name, spark=where, **options)
        tables[name] = [(each.params, each.value) for each in study.trials]
    points = [(rate, dropout) for dropout in (0.45, 0.7) for rate in (0.001, 0.0001)]
    found = [(p["optimizer.learning_rate"], p["dropout"]) for p, _ in tables["here"]]
    assert sorted(found) == sorted(points)
    assert tables["spark"] == tables["here"]
    assert len({value for _, value in tables["here"]}) == 4, "the settings matter"


def test_what_cannot_run_is_refused_before_a_trial(
    tmp_path: Path, session: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("coordinator.launchers.spark.SETTLE_S", 0.1)
    options: dict[str, Any] = {"run_dir": tmp_path / "study", "spark": session}
    with pytest.raises(LaunchFailed, match=r"the study has --parallel 4 trials, .* 3 slots"):
        pserver.tune(JOBS / "searched.py", **options, parallel=EXECUTORS + 1)
    with pytest.raises(InvalidSetting, match="nonsense"):
        pserver.tune(JOBS / "searched.py", {"nonsense": [1, 2]}, **options)
    assert not list(tmp_path.glob("study/trial-*"))
