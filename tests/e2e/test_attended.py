"""``coordinator up --attended``: a process holds the job, changes it between its steps and lets it
go on, whatever is killed meanwhile."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from coordinator.client.client import CoordinatorClient
from psrpc.checkpoint.load import load_state, load_variables
from psrpc.checkpoint.manifest import read_manifest
from psrpc.checkpoint.shard_file import ShardState
from psrpc.core.errors import InvalidArgument, PsError
from psrpc.options.locate import security_of_run
from psrpc.v1 import coordinator_pb2 as pb
from tests.changed_copy import write_changed_copy
from tests.e2e.cluster import (
    JOBS,
    LIMIT_S,
    Run,
    command,
    environment,
    members,
    processes_of,
    until,
    wait_until_gone,
)

pytestmark = pytest.mark.slow

EPOCHS = 3
RECORDS = 1230
PER_EPOCH = 62
GONE_S = 15.0
"""Time that the processes of a job have after their attendant is gone."""


class Attended:
    """A running ``coordinator up --attended``, and its attendant."""

    def __init__(self, run_dir: Path, process: subprocess.Popen[bytes]) -> None:
        self.run_dir = run_dir
        self.process = process
        until(self._serves, "the coordinator to serve")
        address = (run_dir / "address").read_text().strip()
        self.client = CoordinatorClient(address, security_of_run(run_dir))
        self.after = -1

    def _serves(self) -> bool:
        assert self.process.poll() is None, self.run_dir.with_suffix(".log").read_text()
        return (self.run_dir / "address").exists()

    def hold(self) -> pb.AwaitHoldResponse:
        """The next hold, or the end of the job."""
        found: list[pb.AwaitHoldResponse] = []

        def holds() -> bool:
            try:
                found[:] = [self.client.await_hold(self.after)]
            except PsError as error:
                if not error.retryable:
                    raise
                return False
            return found[0].held or found[0].phase in ("done", "failed")

        until(holds, f"a hold after batch {self.after}")
        return found[0]

    def end(
        self,
        hold: pb.AwaitHoldResponse,
        until_batch: int,
        rate: float | None = None,
        restore: str = "",
    ) -> None:
        def accepted() -> bool:
            try:
                self.client.end_hold(hold.at, until_batch, rate, restore)
            except PsError as error:
                if not error.retryable:
                    raise
                return False
            return True

        until(accepted, f"the hold at batch {hold.at} to be ended")
        self.after = hold.at

    def kill(self, role: str) -> None:
        os.kill(members(self.run_dir, role)[0], signal.SIGKILL)

    def values(self, hold: pb.AwaitHoldResponse) -> dict[str, np.ndarray]:
        return load_variables(self.run_dir / hold.checkpoint)


ATTENDS = """
import subprocess, sys
sys.exit(subprocess.Popen(sys.argv[1:], stdin=subprocess.PIPE).wait())
"""
"""A process that holds the standard input of another open."""


@contextmanager
def attended(run_dir: Path, *args: str) -> Iterator[Attended]:
    up = ("up", JOBS / "dense.py", "--run-dir", run_dir, "--shards", "2", "--workers", "2")
    job = ("--attended", "--set", f"epochs={EPOCHS}", "--set", "checkpoint_every=15")
    output = run_dir.with_suffix(".log").open("wb")
    with (
        output,
        subprocess.Popen(
            [sys.executable, "-c", ATTENDS, *command("coordinator", *up, *job, *args)],
            env=environment(),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
        ) as process,
    ):
        try:
            yield Attended(run_dir, process)
        finally:
            process.kill()


def zeroed(shard: int, state: ShardState) -> ShardState:
    """Other parameters on each shard, and an optimizer without momentum."""
    values = {name: np.full_like(array, 0.25 + shard) for name, array in state.values.items()}
    elements = {
        slot: {name: np.zeros_like(array) for name, array in arrays.items()}
        for slot, arrays in state.elements.items()
    }
    return replace(state, values=values, elements=elements)


@pytest.mark.parametrize(("mode", "within"), [("async", 20), ("sync", 21)])
def test_an_attendant_holds_and_changes_a_job_from_which_processes_are_killed(
    tmp_path: Path, mode: str, within: int
) -> None:
    run_dir = tmp_path / "run"
    with attended(run_dir, "--mode", mode) as job:
        hold = job.hold()
        assert (hold.at, hold.global_step, hold.epoch, dict(hold.evaluation)) == (0, 0, 0, {})
        assert hold.checkpoint == "checkpoints/step-00000000"
        with pytest.raises(InvalidArgument, match="holds at batch 0, and not at 5"):
            job.client.end_hold(5, 20)
        job.end(hold, 20)

        hold = job.hold()
        assert (hold.at, hold.epoch, dict(hold.evaluation)) == (within, 0, {})
        name = write_changed_copy(run_dir / hold.checkpoint, zeroed)
        changed = load_variables(run_dir / "checkpoints" / name)
        # So little that the next hold shows what was restored.
        job.end(hold, PER_EPOCH, rate=1e-6, restore=name)

        hold = job.hold()
        assert (hold.at, hold.epoch) == (PER_EPOCH, 1)
        assert sorted(hold.evaluation) == ["accuracy", "loss"]
        for variable, value in job.values(hold).items():
            np.testing.assert_allclose(value, changed[variable], atol=1e-4, err_msg=variable)
        job.end(hold, PER_EPOCH + 50, rate=1.0)
        job.kill("pserver")

        hold = job.hold()
        assert hold.at == PER_EPOCH + (51 if mode == "sync" else 50)
        moved = [np.abs(v - changed[n]).max() for n, v in job.values(hold).items()]
        assert min(moved) > 1e-3
        # In the midst of a hold, which comes again.
        job.kill("pserver")
        job.end(hold, 2 * PER_EPOCH)
        job.kill("worker")

        hold = job.hold()
        assert (hold.at, hold.epoch) == (2 * PER_EPOCH, 2)
        assert sorted(hold.evaluation) == ["accuracy", "loss"]
        job.kill("coordinator")
        # It has forgotten the hold, and holds where it stands.
        hold = job.hold()
        assert (hold.at, hold.epoch) == (2 * PER_EPOCH, 2)
        job.end(hold, EPOCHS * PER_EPOCH)

        hold = job.hold()
        assert (hold.at, hold.epoch) == (EPOCHS * PER_EPOCH, EPOCHS)
        assert sorted(hold.evaluation) == ["accuracy", "loss"]
        job.end(hold, EPOCHS * PER_EPOCH + 1)
        assert job.hold().phase == "done"
        assert job.process.wait(LIMIT_S) == 0
    assert not processes_of(run_dir)
    run = Run(run_dir, 0, "", "")
    assert run.summary["batches"] == EPOCHS * PER_EPOCH
    assert run.summary["counted"]["twice"] == 0
    plan = read_manifest(run.checkpoint).plan
    for shard in range(2):
        state = load_state(run.checkpoint, plan, shard)
        assert [epoch["applied"] for epoch in state.applied] == EPOCHS * [[[0, RECORDS]]]


def test_nothing_of_a_job_is_left_once_its_attendant_is_killed(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    with attended(run_dir) as job:
        hold = job.hold()
        job.end(hold, EPOCHS * PER_EPOCH)
        left = processes_of(run_dir)
        assert len(left) >= 5
        job.process.kill()
        began = time.monotonic()
        wait_until_gone(left)
        assert time.monotonic() - began < GONE_S
    until(lambda: not processes_of(run_dir), "all to be gone")
