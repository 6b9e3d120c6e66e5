"""The command lines of the processes that ``coordinator up`` starts."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from psrpc.process import with_malloc_settings


@dataclass(frozen=True)
class UpOptions:
    """What ``coordinator up`` was asked for; None leaves a choice to the job.

    Attributes:
        job: the job file, as the user wrote it.
        overrides: ``key=value``, in order.
        intra_op_threads: threads of one TensorFlow operation in a worker; None means the job's
            own number, and where it has none an even share of the machine's cores.
        connect_timeout_s: how long shards and workers look for the coordinator.
    """

    job: str
    shards: int
    workers: int
    run_dir: Path
    mode: str | None = None
    replicas: int | None = None
    resume: bool = False
    overrides: tuple[str, ...] = ()
    log_format: str = "console"
    connect_timeout_s: float = 120.0
    intra_op_threads: int | None = None
    gpu: str = "auto"
    gpu_memory_fraction: float | None = None


def coordinator_command(options: UpOptions) -> list[str]:
    """Serves on a port that the operating system chooses and writes to ``RUN_DIR/address``."""
    command = _module("coordinator.cli", "serve", "--job", options.job)
    command += ["--shards", str(options.shards), "--run-dir", str(options.run_dir)]
    command += ["--bind", "127.0.0.1:0"]
    if options.mode is not None:
        command += ["--mode", options.mode]
    if options.replicas is not None:
        command += ["--replicas", str(options.replicas)]
    if options.resume:
        command.append("--resume")
    for override in options.overrides:
        command += ["--set", override]
    return command + _of_every_child(options)


def shard_command(options: UpOptions, address: str, shard: int) -> list[str]:
    """Shard number ``shard``, which finds the coordinator at ``address``."""
    command = _module("pserver.cli", "serve", "--shard", str(shard), "--bind", "127.0.0.1:0")
    return command + _of_every_member(options, address)


def worker_command(options: UpOptions, address: str) -> list[str]:
    """A worker, which finds the coordinator at ``address``."""
    command = _module("worker.cli", "run", "--job", options.job, "--gpu", options.gpu)
    if options.gpu_memory_fraction is not None:
        command += ["--gpu-memory-fraction", str(options.gpu_memory_fraction)]
    if options.intra_op_threads is not None:
        command += ["--intra-op-threads", str(options.intra_op_threads)]
    return command + _of_every_member(options, address)


def child_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment of the coordinator and the shards."""
    return {
        **with_malloc_settings(dict(environment)),
        # So that a child that is slow to start can tell that its parent is gone already.
        "PSRPC_PARENT_PID": str(os.getpid()),
        # A log is read while it is written.
        "PYTHONUNBUFFERED": "1",
    }


def worker_environment(environment: Mapping[str, str], workers: int, cores: int) -> dict[str, str]:
    """The environment of one of ``workers`` workers that share ``cores`` cores.

    TensorFlow gives every operation as many threads as there are cores; with several workers that
    is too many. It reads this variable only where neither the job nor an option says a number.
    """
    share = str(max(1, cores // workers))
    return {"TF_NUM_INTRAOP_THREADS": share, **child_environment(environment)}


def _module(name: str, *arguments: str) -> list[str]:
    return [sys.executable, "-m", name, *arguments]


def _of_every_member(options: UpOptions, address: str) -> list[str]:
    timeout = ["--connect-timeout", f"{options.connect_timeout_s:g}"]
    return ["--coordinator", address, *timeout, *_of_every_child(options)]


def _of_every_child(options: UpOptions) -> list[str]:
    return ["--log-format", options.log_format, "--die-with-parent"]
