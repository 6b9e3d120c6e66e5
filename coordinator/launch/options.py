"""The options of ``coordinator up``, declared once. Imports nothing slow."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from coordinator.launch.restarts import MAX_RESTARTS
from psrpc.core.policy import MODES
from psrpc.options.config import add_options
from psrpc.options.declaration import SHARDS, cpu_devices, gpu_choice, option, run_path
from psrpc.options.settings import GPUS, TRACE_HELP, ListenerSecurityOptions

ANYWHERE = "127.0.0.1:0"
"""A free port of this machine, reachable from this machine alone."""


@dataclass(frozen=True, kw_only=True)
class LocalArguments(ListenerSecurityOptions):
    """The options of every command that runs clusters on this machine; None leaves a choice to the
    job."""

    shards: int = option(SHARDS, 1, metavar="K")
    workers: int = option("default: 1", 1, metavar="N")
    mode: str | None = option("overrides the job's mode", None, choices=MODES)
    replicas: int | None = option("sync: micro-batches of one round", None, metavar="K")
    overrides: tuple[str, ...] = option(
        "override a field of the job; may be repeated", (), flag="--set", metavar="KEY=VALUE"
    )
    gpu: str = option("for the workers; default: auto", "auto", convert=gpu_choice, metavar=GPUS)
    devices: str | None = option(
        "for the workers: divide the CPU into N devices", None, convert=cpu_devices, metavar="cpu:N"
    )
    gpu_memory_fraction: float | None = option("for the workers", None, metavar="F")
    intra_op_threads: int | None = option(
        "threads of one operation in a worker; default: the job's own number, else an even share "
        "of the cores",
        None,
        metavar="N",
    )
    connect_timeout_s: float = option(
        "how long processes look for each other; default: 120",
        120.0,
        flag="--connect-timeout",
        metavar="SECONDS",
    )
    shm: bool = option(
        "workers send tensors over TCP; default: they share memory with the shards", default=True
    )
    data_connections: Literal["0", "off"] = option(
        "off: such tensors go with the calls, not over connections of their own", "0"
    )
    step_times: bool = option(
        "at the end, each worker writes to RUN_DIR/steps how long each of its last 100000 steps "
        "waited for data, computed, and exchanged with the shards",
        default=False,
    )
    max_restarts: int = option(
        "start processes that die or hang again, N times in all; 0: never; default: %(default)s",
        MAX_RESTARTS,
        metavar="N",
    )
    warm_start: bool = option(
        "each process imports TensorFlow by itself; default: one imports it, and the others are "
        "forked from that",
        default=True,
    )
    slow_down: float = option(
        "a chaos switch: the last worker takes F times as long to compute, to see what a "
        "straggler does to the job; default: 1",
        1.0,
        metavar="F",
    )
    log_format: Literal["console", "json"] = option(
        "of the processes' logs in RUN_DIR/logs; default: console", "console"
    )
    trace: str = option(TRACE_HELP, "", metavar="URL")


@dataclass(frozen=True, kw_only=True)
class UpArguments(LocalArguments):
    """The options of ``coordinator up``, without the job and the dashboard."""

    run_dir: Path | None = option("default: runs/<job>-<time>", None, convert=run_path)
    attended: bool = option(
        "hold before the first step, and wherever the process that keeps standard input open says; "
        "at the end of standard input, stop at once",
        default=False,
    )
    resume: bool = option(
        "go on from the newest checkpoint of --run-dir, or of the job's newest run", default=False
    )


def add_up_arguments(parser: argparse.ArgumentParser) -> None:
    """Defines the command line of ``coordinator up``."""
    parser.add_argument("job", metavar="JOB", help="the job file")
    add_options(parser, UpArguments)
    parser.set_defaults(**{**vars(UpArguments()), "overrides": []})
    add_dashboard(parser, "the job")


def add_dashboard(parser: argparse.ArgumentParser, what: str) -> None:
    """Defines ``--dashboard`` and ``--no-dashboard``, for a page with ``what``."""
    where = parser.add_mutually_exclusive_group()
    where.add_argument(
        "--dashboard",
        default=ANYWHERE,
        metavar="HOST:PORT",
        help=f"where browsers can look at {what}; default: a free port, for this machine alone",
    )
    where.add_argument(
        "--no-dashboard", dest="dashboard", action="store_const", const=None, help="nowhere"
    )
