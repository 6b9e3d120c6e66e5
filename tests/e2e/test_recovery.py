"""A whole cluster under ``coordinator up``, and what is killed or stopped in the midst of training:
it goes on by itself, every example counts once, and in sync mode the result has the same bits."""

from __future__ import annotations

import json
import os
import shlex
import signal
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from functools import partial
from pathlib import Path
from urllib.request import urlopen

import numpy as np
import pytest

from coordinator.client.client import CoordinatorClient
from psrpc.checkpoint.checkpoint import read_manifest
from psrpc.checkpoint.load import load_state, load_variables
from psrpc.core.errors import PsError
from psrpc.options.locate import security_of_run
from psrpc.v1.coordinator_pb2 import GetJobStatusResponse
from tests.e2e.cluster import (
    JOBS,
    Gate,
    Process,
    Run,
    by_hand,
    ended,
    members,
    processes_of,
    until,
    up,
    wait_until_gone,
)

pytestmark = pytest.mark.slow

GATED = JOBS / "gated.py"
EPOCHS = 6
RECORDS = 1230
STEPS = 25
"""Of either mode; more than there are between two checkpoints."""

COMMON = ("--shards", "2", "--workers", "2", "--set", f"epochs={EPOCHS}")


class Faulty:
    """A running ``coordinator up`` that is looked at as an outsider does, and harmed. Its workers
    wait for :meth:`end` before they begin the last epoch."""

    def __init__(self, run_dir: Path, process: Process, gate: Gate) -> None:
        self.run_dir = run_dir
        self._process = process
        self._gate = gate
        self._client: CoordinatorClient | None = None
        self._stood = (0, 0)

    def __enter__(self) -> Faulty:
        return self

    def __exit__(self, *_: object) -> None:
        self._forget()

    def kill(self, role: str, number: int = signal.SIGKILL) -> int:
        """Sends a signal to one process of a role; its process id."""
        pid = members(self.run_dir, role)[0]
        os.kill(pid, number)
        return pid

    def kill_all(self) -> None:
        """Every process but ``up`` itself."""
        for pid in processes_of(self.run_dir):
            if pid != self._process.popen.pid:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def until_trained(self, after: int) -> int:
        """Waits for STEPS steps in a generation later than ``after``, and returns that one."""
        began: dict[int, int] = {}

        def trained(status: GetJobStatusResponse) -> bool:
            if status.phase != "training" or status.generation <= after:
                return False
            step = began.setdefault(status.generation, status.global_step)
            held = status.global_step >= status.total_steps * (EPOCHS - 1) // EPOCHS
            return status.global_step >= step + STEPS or held

        self.until(trained, f"training in a generation after {after}")
        return self._stood[0]

    def end(self) -> Run:
        """Lets the workers finish."""
        self._gate.open()
        code = self._process.wait()
        run = Run(self.run_dir, code, self._process.text(), "")
        assert code == 0, f"{run.stdout}\n{run.logs()}"
        assert not processes_of(self.run_dir), "a process outlived the job"
        return run

    def until(self, true_of: Callable[[GetJobStatusResponse], bool], what: str) -> None:
        """Waits for a status of which this is true."""

        def found() -> bool:
            assert self._process.popen.poll() is None, f"up has ended\n{self._process.text()}"
            status = self._status()
            if status is None:
                return False
            stands = (status.generation, status.global_step)
            assert stands >= self._stood, "generation and step never go back"
            self._stood = stands
            return true_of(status)

        until(found, what)

    def _status(self) -> GetJobStatusResponse | None:
        if self._client is None:
            file = self.run_dir / "address"
            if not file.exists():
                return None
            security = security_of_run(self.run_dir)
            self._client = CoordinatorClient(file.read_text().strip(), security)
        try:
            return self._client.get_job_status()
        except PsError:
            self._forget()
            return None

    def _forget(self) -> None:
        if self._client is not None:
            self._client.close()
            self._client = None


@contextmanager
def faulty(folder: Path, *args: str, job: Path = GATED, **env: str) -> Iterator[Faulty]:
    with by_hand(folder) as hand, closing(Gate(folder, epoch=EPOCHS - 1)) as gate:
        run = ("up", job, "--run-dir", hand.run_dir)
        env |= gate.environment
        process = hand.start("up", "coordinator", *run, *COMMON, *args, **env)
        with Faulty(hand.run_dir, process, gate) as cluster:
            yield cluster


def assert_metrics(run_dir: Path) -> None:
    """Every process can be looked at where the run directory says."""
    targets = json.loads((run_dir / "metrics.json").read_text())
    assert len(targets) == 5
    for target in targets:
        role = target["labels"]["process"].split("-")[0].replace("shard", "pserver")
        until(partial(is_there, target["targets"][0], f"\n{role}_info{{"), f"metrics of {target}")


def is_there(address: str, metric: str) -> bool:
    """A worker that is not needed for training may still be starting."""
    try:
        with urlopen(f"http://{address}/metrics", timeout=30) as answer:
            return metric in answer.read().decode()
    except OSError:
        return False


def assert_all_counted_once(run: Run) -> None:
    assert run.summary["examples"] == EPOCHS * RECORDS
    assert run.summary["batches"] == EPOCHS * 62
    counted = run.summary["counted"]
    assert (counted["counted"], counted["batches"]) == (EPOCHS * 62, EPOCHS * 62)
    assert (counted["twice"], counted["skipped"]) == (0, 0)
    plan = read_manifest(run.checkpoint).plan
    for shard in range(2):
        state = load_state(run.checkpoint, plan, shard)
        assert [epoch["applied"] for epoch in state.applied] == EPOCHS * [[[0, RECORDS]]]


def test_sync_training_outlives_anything_and_ends_in_the_same_bits(tmp_path: Path) -> None:
    sync = ("--mode", "sync", "--set", "checkpoint_every=20")
    with faulty(tmp_path, *sync) as cluster:
        generation = cluster.until_trained(after=0)
        assert_metrics(cluster.run_dir)
        cluster.kill("pserver")
        generation = cluster.until_trained(after=generation)
        # Where it was before, although it is another process.
        assert_metrics(cluster.run_dir)
        cluster.kill("worker")
        cluster.kill("coordinator")
        generation = cluster.until_trained(after=generation)
        cluster.kill_all()
        generation = cluster.until_trained(after=generation)
        run = cluster.end()
    assert_all_counted_once(run)
    restarts = run.summary["restarts"]
    assert restarts["coordinator"] == 2
    assert sum(n for name, n in restarts.items() if name.startswith("shard")) == 3
    assert run.summary["generation"] == generation == 4
    # Sync mode does not depend on how many compute.
    whole = up(GATED, tmp_path / "whole", *COMMON, "--workers", "1", *sync)
    assert whole.summary["restarts"] == {}
    expected = load_variables(whole.checkpoint)
    for name, value in load_variables(run.checkpoint).items():
        np.testing.assert_array_equal(value, expected[name], err_msg=name)


def test_async_training_outlives_anything_and_counts_every_example_once(tmp_path: Path) -> None:
    with faulty(tmp_path, "--mode", "async", "--set", "checkpoint_every=20") as cluster:
        generation = cluster.until_trained(after=0)
        cluster.kill("pserver")
        generation = cluster.until_trained(after=generation)
        cluster.kill("worker")
        cluster.kill("coordinator")
        generation = cluster.until_trained(after=generation)
        stopped = cluster.kill("pserver", signal.SIGSTOP)
        generation = cluster.until_trained(after=generation)
        wait_until_gone([stopped])
        run = cluster.end()
    assert_all_counted_once(run)
    restarts = run.summary["restarts"]
    assert sum(restarts.values()) == 4
    assert (restarts["coordinator"], run.summary["generation"]) == (1, generation)


def test_a_stopped_run_continues_by_the_printed_command(tmp_path: Path) -> None:
    """The first Ctrl-C writes a checkpoint, so that nothing is done again."""
    args = ("--shards", "2", "--mode", "sync", "--set", "epochs=6")
    with by_hand(tmp_path) as hand, closing(Gate(tmp_path, epoch=5)) as gate:
        run = ("up", GATED, "--run-dir", hand.run_dir)
        cluster = hand.start("up", "coordinator", *run, *args, **gate.environment)
        # In the midst of its steps, if it has not come to the gate by now.
        cluster.wait_for(r"training  epoch \d/6  step [1-9]")
        cluster.kill(signal.SIGINT)
        assert cluster.wait() == 130, cluster.text()
    last = cluster.text().strip().splitlines()[-1]
    said, _, typed = last.partition(": ")
    assert said == "go on with"
    words = shlex.split(typed)
    assert words[:2] == ["coordinator", "up"]
    stopped_at = json.loads((hand.run_dir / "summary.json").read_text())["global_step"]
    assert 0 < stopped_at < 6 * 21
    newest = max((hand.run_dir / "checkpoints").glob("step-*"))
    assert read_manifest(newest).global_step == stopped_at
    done = ended("coordinator", *words[1:])
    assert done.returncode == 0, done.stdout + done.stderr
    summary = json.loads((hand.run_dir / "summary.json").read_text())
    assert (summary["examples"], summary["global_step"]) == (6 * RECORDS, 6 * 21)
