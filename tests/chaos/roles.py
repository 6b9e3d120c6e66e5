"""Entry points of forked processes: the project's commands, and a worker without TensorFlow."""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType

import coordinator.cli.__main__
import coordinator.membership.slice_hosts
import coordinator.process.describing
import coordinator.process.serve
import coordinator.rpc.messages
import coordinator.rpc.status
import coordinator.training.job_state
import pserver.cli.__main__
import pserver.process.shard  # what `pserver serve` imports when it runs
from tests.chaos import worker_process
from tests.chaos.launcher import Entry

LEASE_S = 1.5
HEARTBEAT_S = 0.3
"""Shorter than in earnest, so that a schedule sees leases lapse."""

DESCRIPTION = "CHAOS_DESCRIPTION"
"""In the coordinator's environment: the file with what `worker describe` would print."""

STACKS = signal.SIGUSR1
"""Makes a process write down where its threads are."""


def _patches() -> Sequence[tuple[ModuleType, str, object]]:
    return (
        (coordinator.training.job_state, "LEASE_S", LEASE_S),
        (coordinator.rpc.status, "LEASE_S", LEASE_S),
        (coordinator.rpc.messages, "HEARTBEAT_S", HEARTBEAT_S),
        (coordinator.membership.slice_hosts, "STARTING_S", 1.0),
        (coordinator.membership.slice_hosts, "RESTART_S", 2.0),
        (coordinator.membership.slice_hosts, "REGISTER_S", 2.0),
        (coordinator.membership.slice_hosts, "SILENT_S", 2.5),
        (
            coordinator.process.describing,
            "describe_command",
            lambda *_: ["cat", os.environ[DESCRIPTION]],
        ),
    )


def run_coordinator(arguments: Sequence[str]) -> int:
    """The command ``coordinator``, told what the job is instead of building its model."""
    for module, name, value in _patches():
        assert hasattr(module, name), f"{module.__name__} has no {name} any more"
        setattr(module, name, value)
    return coordinator.cli.__main__.main(arguments)


def run_shard(arguments: Sequence[str]) -> int:
    """The command ``pserver``."""
    return pserver.cli.__main__.run(arguments)


def run_command(arguments: Sequence[str]) -> int:
    """A command in a new interpreter, with nothing of ours in it."""
    os.execv(sys.executable, [sys.executable, "-m", *arguments])


def _with_stacks(entry: Callable[[Sequence[str]], int]) -> Entry:
    def run(arguments: Sequence[str]) -> int:
        faulthandler.register(STACKS, sys.stderr, all_threads=True)
        return entry(arguments)

    return run


ENTRIES: Mapping[str, Entry] = {
    "coordinator": _with_stacks(run_coordinator),
    "shard": _with_stacks(run_shard),
    "command": run_command,
    "worker": _with_stacks(worker_process.run),
}
