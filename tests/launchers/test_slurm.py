"""The batch script of ``coordinator launch slurm`` under a real Slurm, and under ``mpirun``."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.docs.following import follow_page
from tests.docs.host import Shell
from tests.e2e.cluster import EXAMPLES, command, environment, members, processes_of, until
from tests.launchers.slurm_engine import slurm

pytestmark = [pytest.mark.launchers, pytest.mark.timeout(900)]

LIMIT_S = 240.0

DRAINED = ("75", "143")
"""Statuses of a start that SIGTERM has ended; 143 if a process had not begun to listen for it."""


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mapping[str, str]]:
    with slurm(tmp_path_factory.mktemp("slurm")) as environment:
        yield environment


def launch(run_dir: Path, *more: str, **env: str) -> subprocess.CompletedProcess[str]:
    words: list[str | Path] = [
        "--run-dir",
        run_dir,
        "--shards",
        "2",
        "--workers",
        "2",
        "--set",
        "epochs=4",
        *more,
    ]
    return subprocess.run(
        command("coordinator", "launch", "slurm", EXAMPLES / "mnist_dnn.py", *words),
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        env=environment(**env),
    )


def submitted(done: subprocess.CompletedProcess[str]) -> str:
    """Returns the number of the batch job."""
    found = re.search(r"submitted batch job (\d+)", done.stdout)
    assert found, done.stderr
    return found[1]


def state(number: str, env: Mapping[str, str]) -> str:
    """Returns the state of a batch job and why it waits, such as ``PENDING BeginTime``; empty once
    it has ended."""
    said = subprocess.run(
        ["squeue", "-h", "-j", number, "-t", "PD,R,CG", "-o", "%T %r"],
        capture_output=True,
        text=True,
        env=env,
    )
    return said.stdout.strip()


def counted(run_dir: Path) -> Mapping[str, Any]:
    """Returns the counts of batches of a job that is done, each once."""
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["phase"] == "done"
    found = summary["counted"]
    assert (found["counted"], found["twice"], found["skipped"]) == (found["batches"], 0, 0)
    return dict(found)


def epochs(run_dir: Path) -> int:
    """Returns how many epochs are done."""
    history = run_dir / "history.csv"
    return len(history.read_text().splitlines()) - 1 if history.exists() else 0


def begin_again_soon(number: str, env: Mapping[str, str]) -> None:
    """Slurm waits for two minutes before it starts a job once more. It has to wait for seconds:
    it would take its node's permission for the one that it has just revoked, and a node that is
    slow to answer would get the end of the last start during this one, as status 143."""
    until(lambda: state(number, env) == "PENDING BeginTime", "the batch job to be queued again")
    update = ["scontrol", "update", f"jobid={number}", "starttime=now+15"]
    subprocess.run(update, check=True, env=env)
    until(lambda: state(number, env).startswith("RUNNING"), "the batch job to begin again")


def ended(log: Path) -> list[str]:
    """Returns the statuses with which a batch job's starts have ended, but the last one."""
    return re.findall(r"(?m)^ended with status (\d+)", log.read_text())


@pytest.mark.parametrize("more", [(), ("--shards", "0", "--set", "dense=allreduce")])
def test_a_killed_task_costs_no_batch(
    tmp_path: Path, engine: Mapping[str, str], more: tuple[str, ...]
) -> None:
    """A shard, or a worker that hosts the parameters."""
    run = tmp_path / "run"
    number = submitted(launch(run, "--insecure", "--mode", "sync", *more, **engine))
    until(lambda: epochs(run) > 0, "the first epoch")
    log = run / f"slurm-{number}.log"
    assert bool(members(run, "pserver")) == (not more)
    host = re.search(r"shard registered .*pid=(\d+)", log.read_text())
    assert host
    os.kill(int(host[1]), signal.SIGKILL)
    begin_again_soon(number, engine)
    until(lambda: not state(number, engine), "the batch job to end")
    killed, *late = ended(log)
    assert killed == "137"
    # The end of the first start may reach the second one, since the wait between them is cut short.
    assert late in ([], ["143"]), log.read_text()
    assert counted(run)["batches"] == 4800
    assert not processes_of(run)


# Open MPI refuses root, and more processes than cores, unless these are set.
MPI = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
}


@pytest.mark.long
def test_the_page_leads_to_a_trained_model(tmp_path: Path, engine: Mapping[str, str]) -> None:
    """It preempts the batch job, and trains under ``mpirun``, too."""
    with Shell(tmp_path, {**engine, **MPI}) as host:
        follow_page("docs/slurm.md", host)
        [log] = (host.folder / "runs" / "first").glob("slurm-*.log")
        [status] = ended(log)
        assert status in DRAINED
        for run, batches in (("first", 19_800), ("second", 990)):
            assert counted(host.folder / "runs" / run)["batches"] == batches
        assert not processes_of(host.folder)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--sbatch", "time=x"], "error PS140: sbatch refuses: Invalid --time specification"),
        (["--partition", "fast"], "error PS140: Slurm has no partition 'fast'; it has all"),
        (["--gpu", "0,7"], "--gpu is 0,7, and a node of partition 'all' has 2 GPUs at most, which"),
        (["--cpus-per-task", "3"], "partition 'all' has room for 2 (8 cores on 2 nodes); ask"),
    ],
)
def test_slurm_refuses_in_one_line(
    tmp_path: Path, engine: Mapping[str, str], more: list[str], said: str
) -> None:
    done = launch(tmp_path / "run", "--insecure", *more, **engine)
    assert done.returncode == 2
    assert said in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_node_that_does_not_see_the_run_directory_says_so(
    tmp_path: Path, engine: Mapping[str, str]
) -> None:
    """The node reads a copy of the script, whose run directory is not there."""
    run, other = tmp_path / "run", tmp_path / "other.sbatch"
    script = launch(run, "--insecure", "--dry-run").stdout
    log = tmp_path / "log"
    other.write_text(script.replace(f"{run}/slurm-%j.log", str(log)))
    done = subprocess.run(
        ["sbatch", "--parsable", other], capture_output=True, text=True, check=True, env=engine
    )
    until(lambda: not state(done.stdout.strip(), engine), "the batch job to end")
    assert "error PS141: node " in log.read_text()
