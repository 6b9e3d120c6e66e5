"""The command lines of the processes that ``coordinator up`` starts."""

from __future__ import annotations

import json
import os
import shlex
import socket
import string
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from coordinator.launch.options import UpArguments
from psrpc.core.names import CERTS
from psrpc.ops.process import PARENT_PID, child_environment, module_command
from psrpc.options import config_tf
from psrpc.options.config_keys import is_a_setting
from psrpc.options.settings import OFF
from psrpc.security.credentials import PLAINTEXT, Security


@dataclass(frozen=True)
class UpOptions(UpArguments):
    """The options of ``coordinator up``, and values derived from them.

    Attributes:
        job: the job file, as the user wrote it.
        run_dir_given: whether the user chose ``run_dir``.
        dashboard: HOST:PORT for browsers; None for no dashboard.
        goes_on: resume the run of ``run_dir`` if it has begun, else begin it.
        security: the credentials of an operator; all processes use the same files.
    """

    job: str
    run_dir: Path = field(kw_only=True)
    run_dir_given: bool = field(default=False, kw_only=True)
    dashboard: str | None = field(default=None, kw_only=True)
    goes_on: bool = field(default=False, kw_only=True)
    security: Security = field(default=PLAINTEXT, kw_only=True)


@dataclass(frozen=True)
class Command:
    """A process to start."""

    arguments: Sequence[str]
    environment: Mapping[str, str]


@dataclass(frozen=True)
class ClusterCommands:
    """The processes of one job, by name.

    Attributes:
        address: HOST:PORT of the coordinator, the same after each restart.
        coordinator: the coordinator, which writes ``RUN_DIR/address`` once it serves.
        members: the other processes: ``shard-0``, …, ``worker-a``, ``worker-b``, … Workers have
            letters here because the coordinator numbers them in the order of their registration.
        security: the credentials of an operator, for calls to the coordinator.
    """

    address: str
    coordinator: Command
    members: Mapping[str, Command]
    security: Security = PLAINTEXT


def cluster(
    options: UpOptions, environment: Mapping[str, str], cores: int, address: str
) -> ClusterCommands:
    """Returns the processes that ``coordinator up`` starts.

    Args:
        environment: the environment of this process, the base of the children's.
        cores: cores of this machine, which the workers share.
        address: HOST:PORT for the coordinator.
    """
    common = cluster_environment(environment)
    # TensorFlow gives every operation as many threads as there are cores, too many for several
    # workers. It reads this variable only if neither the job nor an option sets a number.
    threads = str(max(1, cores // options.workers))
    shared = {"TF_NUM_INTRAOP_THREADS": threads, **common}
    members = {
        f"shard-{shard}": Command(_shard(options, address, shard), common)
        for shard in range(options.shards)
    }
    for worker in range(options.workers):
        name = f"worker-{letters(worker)}"
        slow_down = options.slow_down if worker == options.workers - 1 else 1.0
        members[name] = Command(_worker(options, address, name, slow_down), shared)
    coordinator = Command(_coordinator(options, address), common)
    return ClusterCommands(address, coordinator, members, options.security)


def resume_command(options: UpOptions) -> str:
    """Returns the command that resumes a stopped run."""
    return start_command(options, "--resume", "--run-dir", str(options.run_dir))


def start_command(options: UpOptions, *more: str) -> str:
    """Returns the command that starts a run with these options, in a new run directory unless
    ``more`` or the user names one."""
    if options.run_dir_given and "--run-dir" not in more:
        more = (*more, "--run-dir", str(options.run_dir))
    command = ["coordinator", "up", options.job, *more]
    command += ["--shards", str(options.shards), "--workers", str(options.workers)]
    security = options.security
    if security.directory != options.run_dir.absolute() / CERTS:
        command += security.options()
    return shlex.join(command + _of_the_job(options))


def letters(number: int) -> str:
    """Returns a number written in letters: 0 is ``"a"``, 25 ``"z"``, 26 ``"aa"``."""
    text = ""
    while number >= 0:
        text = string.ascii_lowercase[number % 26] + text
        number = number // 26 - 1
    return text


def _coordinator(options: UpOptions, address: str) -> list[str]:
    command = module_command("coordinator.cli", "serve", "--job", options.job)
    command += ["--shards", str(options.shards), "--run-dir", str(options.run_dir)]
    command += ["--bind", address, "--workers", str(options.workers)]
    if options.resume:
        command.append("--resume")
    elif options.goes_on:
        command += ["--resume", "auto"]
    if options.attended:
        command.append("--attended")
    else:
        # An attendant would take the end of the processes for that of the job.
        command.append("--starts-again")
    if options.dashboard is not None:
        command += ["--dashboard", options.dashboard]
    return command + _of_the_job(options) + _of_every_child(options)


def _shard(options: UpOptions, address: str, shard: int) -> list[str]:
    command = module_command("pserver.cli", "serve", "--shard", str(shard), "--bind", "127.0.0.1:0")
    if options.data_connections == OFF:
        command += ["--data-connections", OFF]
    return command + _of_every_member(options, address)


def _worker(options: UpOptions, address: str, name: str, slow_down: float) -> list[str]:
    command = module_command("worker.cli", "run", "--job", options.job, "--gpu", options.gpu)
    if options.devices is not None:
        command += ["--devices", options.devices]
    if options.gpu_memory_fraction is not None:
        command += ["--gpu-memory-fraction", str(options.gpu_memory_fraction)]
    if options.intra_op_threads is not None:
        command += ["--intra-op-threads", str(options.intra_op_threads)]
    if not options.shm:
        command.append("--no-shm")
    if options.step_times:
        command += ["--step-times", str(options.run_dir / "steps" / f"{name}.csv")]
    if slow_down > 1:
        command += ["--slow-down", f"{slow_down:g}"]
    own = options.run_dir.absolute() / CERTS
    if options.security.directory == own and (own / name).is_dir():
        # A worker runs the job's code, which must not learn where the authority's key is.
        options = replace(options, security=options.security.at(own / name))
    return command + _of_every_member(options, address)


def cluster_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Returns the environment of a cluster's processes, derived from ``environment``, that of this
    process. :func:`cluster` adds a variable for workers."""
    # The command line configures a child completely; variables may describe another cluster.
    own = {
        name: value
        for name, value in environment.items()
        if not is_a_setting(name) and name != config_tf.NAME
    }
    return {
        **child_environment(own),
        # Lets a child that is slow to start detect that its parent has ended already.
        PARENT_PID: str(os.getpid()),
        # Logs are read while they are written.
        "PYTHONUNBUFFERED": "1",
    }


def _of_the_job(options: UpOptions) -> list[str]:
    command = []
    if options.mode is not None:
        command += ["--mode", options.mode]
    if options.replicas is not None:
        command += ["--replicas", str(options.replicas)]
    for override in options.overrides:
        command += ["--set", override]
    return command


def _of_every_member(options: UpOptions, address: str) -> list[str]:
    timeout = ["--connect-timeout", f"{options.connect_timeout_s:g}"]
    return ["--coordinator", address, *timeout, *_of_every_child(options)]


def _of_every_child(options: UpOptions) -> list[str]:
    common = ["--log-format", options.log_format, "--die-with-parent"]
    if options.trace:
        common += ["--trace", options.trace]
    return [*common, *options.security.options()]


TARGETS = "metrics.json"
"""A file in the run directory, in the form of Prometheus's ``file_sd_configs``. Load-bearing."""


@contextmanager
def with_metrics(cluster: ClusterCommands, job: str, run_dir: Path) -> Iterator[ClusterCommands]:
    """Yields ``cluster`` with a metrics address for each process; a restarted process serves at the
    same one. Within the block, ``RUN_DIR/metrics.json`` lists the addresses.

    Args:
        job: the job's name.

    Raises:
        OSError: there is no port left, or the file cannot be written.
    """
    path = run_dir / TARGETS
    with ExitStack() as held:
        names = ["coordinator", *cluster.members]
        addresses = {name: held.enter_context(reserved_address()) for name in names}
        path.write_text(as_targets(job, addresses))
        held.callback(_remove, path)

        def with_address(name: str, command: Command) -> Command:
            return replace(command, arguments=[*command.arguments, "--metrics", addresses[name]])

        yield replace(
            cluster,
            coordinator=with_address("coordinator", cluster.coordinator),
            members={n: with_address(n, command) for n, command in cluster.members.items()},
        )


def as_targets(job: str, addresses: dict[str, str]) -> str:
    """Returns the text of ``metrics.json``: a target per process, labelled ``job``, ``process``."""
    targets = [
        {"targets": [address], "labels": {"job": job, "process": name}}
        for name, address in addresses.items()
    ]
    return json.dumps(targets, indent=1) + "\n"


def _remove(path: Path) -> None:
    with suppress(OSError):
        path.unlink()


@contextmanager
def reserved_address() -> Iterator[str]:
    """Yields an address of this host that a server can bind to each time it is started.

    The kernel never gives the port of a bound socket to a process that asks for any port, be it to
    listen or to connect from. A server that reuses addresses, as gRPC's do, can still bind to it
    while the socket does not listen.
    """
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{held.getsockname()[1]}"
