"""Every option of ``coordinator serve``, ``pserver serve`` and ``worker run``, declared once.

A whole cluster shares one environment and one TOML file. So each command must be able to tell
another command's setting from a misspelt one, and all declarations are in this module. Importing it
is fast.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from psrpc.core.policy import MODES
from psrpc.options.declaration import (
    SHARDS,
    cpu_devices,
    duration_s,
    factor,
    fraction,
    gpu_choice,
    option,
    positive,
    run_path,
)

Resumption = Literal["always", "auto", "never"]

GPUS = "auto|none|all|I,J"
"""How ``--help`` shows a choice of GPUs."""

OFF = "off"
"""Stands in place of an address or port that is not used."""

METRICS = "127.0.0.1:0"
"""Default of ``--metrics``: every process is observable, only from its own machine, and processes
on one machine do not collide. A scraper on another machine needs a fixed port."""

TRACE_HELP = (
    "send OpenTelemetry spans of push, pull, apply and checkpoint to this OTLP endpoint, such as "
    "http://localhost:4318/v1/traces (default: none)"
)
"""Help of ``--trace``."""

DASHBOARD_PORT = 5080
"""The port if ``--dashboard`` names only a host."""

_SECURITY = "security"


_TOKEN_FILE = (
    "instead of certificates for each role: one secret, sent over TLS; of --certs only {} is "
    "needed then (default: $PSERVER_TOKEN_FILE)"
)
_INSECURE = (
    "plaintext {}: anyone who reaches the port can change the model (default: $PSERVER_INSECURE)"
)


@dataclass(frozen=True, kw_only=True)
class SecurityOptions:
    """How a process authenticates itself.

    Attributes:
        elsewhere: key -> where the setting was set, for settings that are not from the command
            line.
    """

    certs: Path | None = option(
        "the job's certificates, as `coordinator certs init` makes them (default: $PSERVER_CERTS)",
        None,
        metavar="DIR",
        group=_SECURITY,
    )
    token_file: Path | None = option(
        _TOKEN_FILE.format("ca.crt"), None, metavar="FILE", group=_SECURITY
    )
    insecure: bool = option(_INSECURE.format("to other machines"), default=False, group=_SECURITY)
    elsewhere: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class ListenerSecurityOptions(SecurityOptions):
    """How a process that listens authenticates itself."""

    token_file: Path | None = option(
        _TOKEN_FILE.format("ca.crt and the own certificate"), None, metavar="FILE", group=_SECURITY
    )
    insecure: bool = option(
        _INSECURE.format("on other addresses than this machine's own"),
        default=False,
        group=_SECURITY,
    )


@dataclass(frozen=True, kw_only=True)
class ProcessOptions(SecurityOptions):
    """The options of every process of a cluster."""

    log_format: Literal["console", "json"] = option(
        "how to write logs (default: %(default)s)", "console"
    )
    metrics: str = option(
        "where Prometheus finds /metrics: on loopback in plain HTTP, elsewhere in HTTPS for "
        "holders of a certificate of the job, or with --insecure for everybody; port 0 is any, "
        "and the log says which (default: %(default)s)",
        METRICS,
        metavar="HOST:PORT|off",
    )
    trace: str = option(TRACE_HELP, "", metavar="URL")
    die_with_parent: bool = option(
        "end at once when the process that started this one ends", default=False
    )


@dataclass(frozen=True, kw_only=True)
class ServerOptions(ListenerSecurityOptions, ProcessOptions):
    """The options of every process that serves gRPC."""

    reflection: bool = option(
        "describe the services to callers that ask (gRPC reflection); on this machine's own "
        "addresses that is done in any case",
        default=False,
    )


@dataclass(frozen=True)
class CoordinatorOptions(ServerOptions):
    """The options of ``coordinator serve``; None leaves a choice to the job."""

    job: Path = option("the job file", metavar="FILE")
    shards: int = option(SHARDS, 1, metavar="K")
    workers: int | None = option(
        "if known; fewer than slices are refused", None, convert=positive, metavar="N"
    )
    bind: str = option("default: %(default)s", "127.0.0.1:5000", metavar="HOST:PORT")
    run_dir: Path | None = option("default: runs/<job>-<time>", None, convert=run_path)
    mode: str | None = option("overrides the job's mode", None, choices=MODES)
    replicas: int | None = option("sync: micro-batches of one round", None, metavar="K")
    overrides: tuple[str, ...] = option(
        "override a field of the job; may be repeated", (), flag="--set", metavar="KEY=VALUE"
    )
    resumption: Resumption = option(
        "go on from the newest good checkpoint of --run-dir, or of the job's newest run; "
        "auto, for supervisors: begin, go on or say that all is done, whichever it is",
        "never",
        flag="--resume",
        const="always",
        metavar="auto",
    )
    description: Path | None = option(
        "what `worker describe JOB -o FILE` wrote elsewhere, instead of describing the job here, "
        "which takes TensorFlow; of the same job file, --set and --mode",
        None,
        metavar="FILE",
    )
    attended: bool = option(
        "hold before the first step, and wherever the attendant says, until it ends the hold "
        "(AwaitHold, EndHold)",
        default=False,
    )
    starts_again: bool = option(
        "exit status 76 (`coordinator set dense=...`) starts the cluster again", default=False
    )
    dashboard: str | None = option(
        "show the job to browsers there; HOST is this machine's own (127.0.0.1) unless "
        "--insecure; default: not at all",
        None,
        metavar="HOST:PORT",
    )


@dataclass(frozen=True)
class ShardOptions(ServerOptions):
    """The options of ``pserver serve``."""

    shard: int = option("index of the shard, from 0", metavar="N")
    coordinator: str = option(
        "where the coordinator is (default: %(default)s)",
        "localhost:5000",
        metavar="HOST[:PORT]",
    )
    bind: str = option(
        "address to listen on; port 0 is any, 0.0.0.0 every interface (default: any port; "
        "on 127.0.0.1 if the coordinator is on localhost, else on every interface)",
        "",
        metavar="HOST:PORT",
    )
    advertise: str | None = option(
        "address that workers use, where it differs from the one bound",
        None,
        metavar="HOST[:PORT]",
    )
    run_dir: Path | None = option(
        "where the job's run directory is here, if not where the coordinator has it",
        None,
        convert=run_path,
        metavar="PATH",
    )
    connect_timeout_s: float = option(
        "how long to go on without the coordinator (default: %(default)s)",
        120.0,
        flag="--connect-timeout",
        metavar="SECONDS",
    )
    data_connections: str = option(
        "where workers of other machines connect for tensors, beside --bind: 0 is any, off "
        "sends tensors with the calls (default: any)",
        "0",
        metavar="PORT",
    )


@dataclass(frozen=True)
class WorkerOptions(ProcessOptions):
    """The options of ``worker run``; None leaves a choice to the job."""

    coordinator: str = option(
        "where the coordinator is (default: %(default)s)",
        "localhost:5000",
        metavar="HOST[:PORT]",
    )
    job: str | None = option(
        "this machine's copy of the job file (default: the coordinator's path for it)",
        None,
        metavar="FILE",
    )
    gpu: str = option(
        "the GPU to compute on, or several, for a micro-batch on each; auto takes the first one "
        "there is (default: %(default)s)",
        "auto",
        convert=gpu_choice,
        metavar=GPUS,
    )
    devices: str | None = option(
        "divide the CPU into N devices, to try several without GPUs",
        None,
        convert=cpu_devices,
        metavar="cpu:N",
    )
    gpu_memory_fraction: float | None = option(
        "take this part of the GPU's memory, between 0 and 1 (default: as it is needed)",
        None,
        convert=fraction,
        metavar="F",
    )
    intra_op_threads: int | None = option(
        "threads of one TensorFlow operation (default: as the job says)",
        None,
        convert=positive,
        metavar="N",
    )
    connect_timeout_s: float = option(
        "give up on a missing coordinator or shard after S seconds (default: 120)",
        120.0,
        flag="--connect-timeout",
        convert=duration_s,
        metavar="S",
    )
    run_dir: Path | None = option(
        "dense=allreduce: where the job's run directory is here, if not where the coordinator has "
        "it",
        None,
        convert=run_path,
        metavar="PATH",
    )
    advertise: str | None = option(
        "dense=allreduce: address at which other workers reach this machine, if it is not the one "
        "towards the coordinator",
        None,
        metavar="HOST",
    )
    shm: bool = option(
        "send tensors over TCP also to shards on this host (default: share memory with them)",
        default=True,
    )
    step_times: Path | None = option(
        "at the end, write how long each of the last 100000 steps waited for data, computed, "
        "and exchanged with the shards: a CSV file, in seconds",
        None,
        metavar="FILE",
    )
    slow_down: float = option(
        "a chaos switch: make every step take F times as long to compute, to see what a "
        "straggler does to a job (default: %(default)s)",
        1.0,
        convert=factor,
        metavar="F",
    )


SETTINGS_OF: Mapping[str, type[ProcessOptions]] = {
    "coordinator": CoordinatorOptions,
    "pserver": ShardOptions,
    "worker": WorkerOptions,
}
"""Section -> the class that declares its settings. Does not list ``[common]``, which may have any
setting."""
