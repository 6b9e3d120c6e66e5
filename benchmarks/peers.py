"""Runs the scripts of peers, where they stand and as they are, and ours for what they lack."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from benchmarks import sync_dense

SCRIPTS = {
    "tf": "tf_ps.py",
    "torch": "torch_rpc.py",
    "ray": "ray_ps.py",
    "tf_single": "sync_tf.py",
    "tf_mwms": "sync_tf.py",
    "torch_ddp": "sync_ddp.py",
}

PEERS = {"tf": "TF", "torch": "PyTorch RPC", "ray": "Ray"}
"""What the tables call them."""

LIMIT_S = 300.0


@dataclass(frozen=True)
class Figure:
    """Result of a run.

    Attributes:
        ms: milliseconds a step; None where there is no figure.
        steps_per_s: of all workers together, for workloads that are counted so.
        miss: why there is no figure; empty where there is one.
    """

    ms: float | None = None
    steps_per_s: float | None = None
    miss: str = ""


def run_peer(folder: Path, peer: str, case: str) -> Figure:
    """One run of ``case`` by ``peer``, from its script in ``folder``."""
    script = folder / SCRIPTS[peer]
    command = [str(script), case]
    if peer in sync_dense.SYSTEMS and case.startswith("dense"):
        command = ["-m", "benchmarks.sync_dense", peer, case]
    elif not script.is_file():
        return Figure(miss=f"no {script.name} in {folder}")
    process = subprocess.Popen(
        [sys.executable, *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        stdout, stderr = process.communicate(timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        # The servers that it has started, too.
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        return Figure(miss=f"no result after {LIMIT_S:.0f} s")
    return read_figure(stdout, stderr, case)


def read_figure(stdout: str, stderr: str, case: str) -> Figure:
    """The figure in a peer's output: JSON lines that name ``workload`` and ``ms``."""
    for line in stdout.splitlines():
        try:
            found = json.loads(line)
        except ValueError:
            continue
        if isinstance(found, dict) and found.get("workload") == case:
            return Figure(float(found["ms"]), found.get("steps_per_s"))
    said = stderr.strip().splitlines()
    return Figure(miss=said[-1].strip() if said else "it printed no result")
