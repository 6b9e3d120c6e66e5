"""A whole cluster whose disk is full for a while: it trains on, and says what it cannot save."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from contextlib import closing
from pathlib import Path

import pytest

from coordinator.client.client import CoordinatorClient
from psrpc.checkpoint.checkpoint import newest_good
from psrpc.options.locate import security_of_run
from psrpc.v1.coordinator_pb2 import GetJobStatusResponse
from tests.e2e.cluster import JOBS, Gate, Process, Run, by_hand, processes_of, until
from tests.faults.disks import fill, mounted_disk

pytestmark = pytest.mark.slow

EPOCHS = 25
STEPS = 21
"""Rounds of an epoch."""


def test_a_full_disk_stops_checkpoints_with_a_warning_and_not_training(tmp_path: Path) -> None:
    settings = ("--set", f"epochs={EPOCHS}", "--set", "checkpoint_every=5")
    with (
        mounted_disk(tmp_path / "disk", megabytes=8) as disk,
        closing(Gate(tmp_path, epoch=1)) as gate,
        by_hand(disk) as hand,
    ):
        where = ("--run-dir", hand.run_dir, "--shards", "2", "--workers", "1", "--mode", "sync")
        process = hand.start(
            "up", "coordinator", "up", JOBS / "gated.py", *where, *settings, **gate.environment
        )
        until(lambda: (hand.run_dir / "address").exists(), "the coordinator's address")
        address, security = (hand.run_dir / "address").read_text(), security_of_run(hand.run_dir)
        with closing(CoordinatorClient(address.strip(), security)) as client:

            def wait_for(what: str, true_of: Callable[[GetJobStatusResponse], bool]) -> None:
                def found() -> bool:
                    assert process.popen.poll() is None, said(process, hand.run_dir)
                    return true_of(client.get_job_status())

                until(found, what)

            wait_for("the first epoch", lambda s: s.global_step == STEPS)
            filler = fill(disk, 0)
            gate.open()
            wait_for(
                "failed checkpoints, enough that a log takes a page more",
                lambda s: len(failures(s.warnings)) >= 30 and s.global_step > 2 * STEPS,
            )
            gate.close()
            assert os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize < 64 << 10
            filler.unlink()
            gate.open()
        assert process.wait() == 0, said(process, hand.run_dir)
        run = Run(hand.run_dir, 0, process.text(), "")
        assert not processes_of(hand.run_dir)
        assert run.summary["phase"] == "done"
        assert run.summary["generation"] == 1, "no shard was started again"
        failed = failures(run.summary["warnings"])
        assert any("no space for" in warning for warning in failed), failed
        assert newest_good(hand.run_dir / "checkpoints").manifest.global_step == EPOCHS * STEPS
        assert not list((hand.run_dir / "checkpoints").glob(".tmp-*"))


def failures(warnings: Iterable[str]) -> list[str]:
    return [warning for warning in warnings if warning.startswith("snapshot step-")]


def said(process: Process, run_dir: Path) -> str:
    return f"{process.text()}\n{Run(run_dir, 1, '', '').logs()}"
